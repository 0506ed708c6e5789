"""What becomes of the result of an earlier probe."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from carme_runtime.graph import Timing
from carme_runtime.scaling import start
from carme_runtime.scaling.curves import save
from carme_runtime.scaling.profiles import Profile

EARLIER_STAYS = "scale.json still holds the result of an earlier probe."


def prepared(file: Path) -> argparse.Namespace:
    """Options of a probe that is about to start."""
    parser = argparse.ArgumentParser()
    start.add_options(parser)
    options = parser.parse_args(["--scale-probe", "--scale-result", str(file)])
    options.n, options.max_restarts, options.dry_run = 1, 0, False
    assert start.prepare(options) == {start.PROBE: str(file)}
    return options


def measured(file: Path) -> None:
    """What a probe writes at its end."""
    save(Profile("Net", "cpu", 8, (Timing(8, 1.0, 2.0),), 0.0, ()), file)


@pytest.mark.parametrize(("code", "expected"), [(0, 2), (1, 1), (2, 2)])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_probe_without_a_result_keeps_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, expected: int, is_there: bool
) -> None:
    file = tmp_path / "scale.json"
    if is_there:
        file.write_text("of an earlier run")
    assert start.checked(prepared(file), code) == expected
    assert [each.read_text() for each in tmp_path.iterdir()] == ["of an earlier run"] * is_there
    errors = capsys.readouterr().err
    assert (EARLIER_STAYS in errors) is is_there
    assert ("nothing was measured" in errors) is (code == 0)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_new_result_takes_the_place_of_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    """Also where both are the same to the byte."""
    file = tmp_path / "scale.json"
    if is_there:
        measured(file)
    options = prepared(file)
    measured(file)
    assert start.checked(options, 0) == 0 and not capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_a_script_that_ends_too_early_says_so_beside_an_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one of two probes of a process has written the result, the other one says nothing."""
    messages: list[str] = []
    monkeypatch.setattr(start, "end", messages.append)
    file = tmp_path / "scale.json"
    file.write_text("of an earlier run")
    earlier = start._identity(file)
    watch = SimpleNamespace(over=False, shortage=lambda: "too few steps")
    start._note_missing_result(watch, file, earlier)
    assert messages == ["too few steps"]
    measured(file)
    start._note_missing_result(watch, file, earlier)
    assert messages == ["too few steps"]
