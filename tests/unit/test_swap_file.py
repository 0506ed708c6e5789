"""The swap file of the benchmark of training beyond memory, with commands that only edit a table of swaps."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# They change the table of swap files as the kernel does; a signal may come in between.
COMMANDS = {
    "mkswap": "",
    "swapon": 'echo "$1 file 100 0 -2" >> "$SWAPS"',
    "swapoff": 'if [ "$SIGNAL" ]; then kill -"$SIGNAL" "$PPID"; fi\ngrep -v "^$1 " "$SWAPS" > "$SWAPS.new"\n'
    'mv "$SWAPS.new" "$SWAPS"',
}
PROGRAM = """
import os, sys, time
from pathlib import Path
import swap_file
from report import tidy_up_when_ended
tidy_up_when_ended()
swap_file.SWAPS = Path(os.environ["SWAPS"])
print(*swap_file.remove_left_swap_files(), flush=True)
with swap_file.swap_file(Path(sys.argv[1]), 4096):
    print("on", flush=True)
    if sys.argv[2] == "wait":
        while True:  # a pause would miss a signal that comes just before it
            time.sleep(0.1)
print("goes on", flush=True)
"""


@pytest.fixture
def swaps(tmp_path: Path) -> Path:
    for name, text in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\nset -e\n{text}\n")
        command.chmod(0o755)
    (tmp_path / "swaps").write_text("Filename Type Size Used Priority\n")
    (tmp_path / "files").mkdir()
    return tmp_path / "swaps"


def start(swaps: Path, what: str, sent: str = "") -> subprocess.Popen[str]:
    folder = swaps.parent
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder / "files", what],
        env=os.environ
        | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SWAPS": str(swaps), "SIGNAL": sent}
        | {"PYTHONPATH": str(BENCHMARKS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def is_clean(swaps: Path) -> bool:
    return len(swaps.read_text().splitlines()) == 1 and not list((swaps.parent / "files").iterdir())


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_switches_the_swap_file_off(swaps: Path, ended_by: signal.Signals) -> None:
    process = start(swaps, "wait")
    assert process.stdout and [process.stdout.readline(), process.stdout.readline()] == ["\n", "on\n"]
    assert not is_clean(swaps)
    process.send_signal(ended_by)
    output, _ = process.communicate(timeout=HANG)
    assert process.returncode and "goes on" not in output
    assert is_clean(swaps)


@pytest.mark.parametrize("sent", ["TERM", "INT"])
def test_a_signal_while_it_is_switched_off_waits(swaps: Path, sent: str) -> None:
    process = start(swaps, "go on", sent)
    output, errors = process.communicate(timeout=HANG)
    assert process.returncode and "goes on" not in output, errors
    assert is_clean(swaps)


def test_what_a_killed_run_leaves_is_switched_off_by_the_next_one(swaps: Path) -> None:
    process = start(swaps, "wait")
    assert process.stdout and [process.stdout.readline(), process.stdout.readline()] == ["\n", "on\n"]
    process.kill()
    process.communicate(timeout=HANG)
    (left,) = (swaps.parent / "files").iterdir()
    output, errors = start(swaps, "go on").communicate(timeout=HANG)
    assert output.splitlines() == [str(left), "on", "goes on"], errors
    assert is_clean(swaps)


@pytest.mark.parametrize("where", ["container", "file system"])
def test_what_is_not_known_to_be_left_stays(swaps: Path, where: str) -> None:
    process = start(swaps, "wait")
    assert process.stdout and [process.stdout.readline(), process.stdout.readline()] == ["\n", "on\n"]
    process.kill()
    process.communicate(timeout=HANG)
    (left,) = (swaps.parent / "files").iterdir()
    if where == "container":  # its process has its number there
        names = left.name.split("-")
        names[-2] = str(int(names[-2]) + 1)
        left = left.rename(left.with_name("-".join(names)))
        lines = swaps.read_text().splitlines()
        swaps.write_text(f"{lines[0]}\n{left} file 100 0 -2\n")
    else:
        left.unlink()
    before = swaps.read_text()
    output, errors = start(swaps, "go on").communicate(timeout=HANG)
    assert output.splitlines() == ["", "on", "goes on"], errors
    assert swaps.read_text() == before and left.exists() == (where == "container")
