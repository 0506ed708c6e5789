"""What the command gives the programs of tests."""

import os
from pathlib import Path

import pytest

from suites import debian
from suites.plan import use


def test_what_many_programs_need_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # Set before it is deleted: so monkeypatch takes away, too, what is set in between.
    monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", "")
    monkeypatch.delenv("HYPOTHESIS_STORAGE_DIRECTORY")
    use(tmp_path / "bin/python")
    assert os.environ["PATH"] == f"{tmp_path}/bin:/usr/bin"
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] == str(debian.CACHE / "hypothesis")
