"""A test that changes what others use fails, no matter who comes next."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, signal, sys
import pytest

TABLE = {"options": {"legend": [1]}}

def test_environment():
    os.environ["CARME_LEFT"] = "x"

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_umask():
    os.umask(0o027)

def test_path():
    sys.path.append("/nowhere")

def test_signals():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def test_table():
    TABLE["options"]["legend"].append(2)

def test_good(monkeypatch, tmp_path):
    monkeypatch.setenv("CARME_LEFT", "y")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere")
    monkeypatch.setitem(TABLE, "more", 1)
"""


def test_what_a_test_leaves_changed_fails_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--rootdir=.", "."]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'temporary'}"],  # it warns of nothing that others left
        cwd=tmp_path,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = dict(re.findall(r"at teardown of test_(\w+) _+\n.* what others use: (.*)", done.stdout))
    assert found == {
        "environment": "$CARME_LEFT",
        "folder": "the folder",
        "umask": "the umask",
        "path": "the search path",
        "signals": "the handler of SIGTERM",
        "table": "test_some.TABLE",
    }, done.stdout
    assert "7 passed, 6 errors" in done.stdout
