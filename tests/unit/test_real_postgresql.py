"""The servers of tests leave nothing behind, however they end."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import HANG
from real_postgresql import is_installed, temporary_postgresql

PROGRAM = Path(__file__).parents[1] / "real_postgresql.py"
#: Prints the server's address, and waits.
COMMAND = ["sh", "-c", "echo $CARME_TEST_DATABASE; read line"]
pytestmark = pytest.mark.skipif(not is_installed(), reason="PostgreSQL is not installed")


class Running:
    """The program with a command that waits."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, *COMMAND], stdin=pipe, stdout=pipe, text=True
        )
        assert self.process.stdout
        self.data = Path(self.process.stdout.readline().strip().partition("?host=")[2])
        self.folder = self.data.parent
        self.server = int((self.data / "data/postmaster.pid").read_text().split()[0])

    def end(self, how: signal.Signals) -> int:
        """End it by a signal; its exit code."""
        self.process.send_signal(how)
        self.process.communicate(timeout=HANG)
        return self.process.returncode


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    if running.process.poll() is None:
        running.end(signal.SIGTERM)


def lives(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_is_terminated_leaves_neither_server_nor_files(running: Running) -> None:
    assert "carme" not in running.folder.name, "tests of shared memory look for that"
    assert running.end(signal.SIGTERM) == 143
    assert not running.folder.exists() and not lives(running.server)


def test_what_a_killed_one_leaves_is_removed_by_the_next(running: Running) -> None:
    with temporary_postgresql("other"):
        pass
    assert running.folder.exists() and lives(running.server), "of one that runs nothing is removed"
    running.end(signal.SIGKILL)
    assert running.folder.exists() and lives(running.server)
    with temporary_postgresql("other") as address:
        assert not running.folder.exists() and not lives(running.server)
        command = ["psql", "--no-psqlrc", "-qAt", address, "-c", "SHOW max_wal_size"]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "96MB\n"
