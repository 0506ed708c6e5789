"""What a run changed on the demo is undone by the run itself, or by the next one where it was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from undo_journal import Command, UndoJournal

KILLED = """
import os, sys
from pathlib import Path
from undo_journal import UndoJournal
journal = UndoJournal(Path(sys.argv[1]), print)
with journal.undoing(lambda command: None, [("n1", "undone", "by", "itself")]):
    pass
with journal.undoing(print, [("n1", "first"), ("n2", "second")]), journal.undoing(print, [("head", "inner")]):
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that has changed something."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout and process.stdout.readline() == "begun\n"
    return process


def test_what_a_killed_run_changed_is_undone_by_the_next_one_the_last_change_first(
    tmp_path: Path, other_run: subprocess.Popen[str]
) -> None:
    with other_run:
        other_run.send_signal(signal.SIGKILL)
    ran: list[list[str]] = []
    journal = UndoJournal(tmp_path, lambda command: ran.append(list(command)))
    assert ran == [["head", "inner"], ["n1", "first"], ["n2", "second"]]
    assert [list(command) for command in journal.recovered] == ran
    assert UndoJournal(tmp_path, print).recovered == []


def test_what_a_run_that_goes_on_changed_stays(tmp_path: Path, other_run: subprocess.Popen[str]) -> None:
    with other_run:
        assert UndoJournal(tmp_path, print).recovered == []
        other_run.kill()


def test_a_command_that_fails_is_left_for_the_next_run(tmp_path: Path) -> None:
    def fail(command: Command) -> None:
        raise AssertionError(f"{command} failed")

    journal = UndoJournal(tmp_path, print)
    with pytest.raises(AssertionError, match="failed"), journal.undoing(fail, [("n1", "resume")]):
        pass
    os.close(journal._file)  # as when its process ends
    assert UndoJournal(tmp_path, print).recovered == [["n1", "resume"]]


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    whole = '{"begin": 1, "commands": [["n1", "resume"]]}\n'
    (tmp_path / "0.jsonl").write_text(whole + '{"begin": 2, "comm')
    assert UndoJournal(tmp_path, print).recovered == [["n1", "resume"]]
