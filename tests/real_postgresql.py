"""A PostgreSQL server that runs for a test, from Debian's package; as a program it runs a command with one.

    python tests/real_postgresql.py pytest tests/unit/webui

The command finds the server's address in CARME_TEST_DATABASE. A module of tests that imports `module_server`
has a server of its own, as the fixture `server`.
"""

import contextlib
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from processes import end

__all__ = ["is_installed", "module_server", "new_database", "postgresql", "temporary_postgresql"]

#: Where files lie in memory, and the bytes that have to be free there: a server with some databases needs a
#: quarter.
_MEMORY, _ENOUGH = Path("/dev/shm"), 1 << 30
#: Its content need not outlive a crash, and its write-ahead log stays far below `_ENOUGH`: by default
#: that grows to 1 GB.
_TEMPORARY = ("fsync=off", "max_wal_size=96MB", "min_wal_size=32MB")
#: The names of the folders of such servers, with the number of the process that has made it.
_FOLDER = re.compile(r"postgresql-\w+-(\d+)-\w+")
#: Seconds that an abandoned server gets to end.
_END_SECONDS = 30.0


def is_installed() -> bool:
    """Whether there is a PostgreSQL to start."""
    return any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def _in_memory() -> str | None:
    """The folder for the files of a server that nobody needs afterwards; None: the one for temporary files.

    Each server and each database is a thousand files. A busy disk takes minutes to make those.
    """
    if not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return None
    return str(_MEMORY) if shutil.disk_usage(_MEMORY).free >= _ENOUGH else None


@contextlib.contextmanager
def temporary_postgresql(name: str) -> Iterator[str]:
    """A server with its files in memory, if there is enough, which are removed with it; its address.

    First it stops the servers of processes that were killed before they could, and removes their files.

    Args:
        name: A word about what it is for, in the name of its folder.
    """
    for place in {_MEMORY, Path(tempfile.gettempdir())}:
        _remove_abandoned(place)
    prefix = f"postgresql-{name}-{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=_in_memory()) as folder,
        postgresql(Path(folder), *_TEMPORARY) as address,
    ):
        yield address


@pytest.fixture(scope="module", name="server")
def module_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a temporary server for the tests of one module; they are skipped without PostgreSQL."""
    if not is_installed():
        pytest.skip("PostgreSQL is not installed")
    with temporary_postgresql(request.module.__name__.rpartition(".")[2]) as address:
        yield address


def _remove_abandoned(place: Path) -> None:
    """Remove the folders below `place` whose process has gone, after their servers; only our account's."""
    for folder in place.glob("postgresql-*"):
        found = _FOLDER.fullmatch(folder.name)
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            if found and not Path("/proc", found[1]).exists() and folder.stat().st_uid == os.getuid():
                _stop(folder / "postgres/data")
                shutil.rmtree(folder)


def _stop(data: Path) -> None:
    """Stop the server of a folder, if it runs, and wait for its end."""
    with contextlib.suppress(OSError, ValueError):
        number = int((data / "postmaster.pid").read_text().partition("\n")[0])
        server = os.pidfd_open(number)
        try:
            # Another program may have got its number.
            if os.fsencode(data) in Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(server, signal.SIGQUIT)  # at once: its content is not needed
                select.select([server], [], [], _END_SECONDS)
        finally:
            os.close(server)


@contextlib.contextmanager
def new_database(server: str) -> Iterator[str]:
    """The address of an empty database on a server that `postgresql` started; it goes afterwards."""
    name = f"test_{secrets.token_hex(6)}"
    psql = ["psql", "--no-psqlrc", "--quiet", server, "--command"]
    subprocess.run([*psql, f"CREATE DATABASE {name}"], check=True)
    try:
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
    finally:
        subprocess.run([*psql, f"DROP DATABASE {name} WITH (FORCE)"], check=True)


@contextlib.contextmanager
def postgresql(folder: Path, *settings: str) -> Iterator[str]:
    """A server of our own, on a Unix socket below `folder`; its address.

    Ends the program where PostgreSQL is missing.

    Args:
        settings: Further lines of its configuration, like `fsync=off`.
    """
    programs = max(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), default=None
    )
    if programs is None or not (programs / "initdb").exists():
        sys.exit("PostgreSQL is missing. Use: sudo apt-get install postgresql")
    data = folder / "postgres"
    data.mkdir()
    who: dict[str, Any] = {}
    if os.getuid() == 0:
        account = pwd.getpwnam("postgres")
        os.chown(data, account.pw_uid, account.pw_gid)
        folder.chmod(0o755)
        who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": data}
    initialize = [
        programs / "initdb",
        "-D",
        data / "data",
        "-A",
        "trust",
        "-U",
        "postgres",
        "--no-sync",
        "-E",
        "UTF8",
    ]
    subprocess.run(initialize, check=True, stdout=subprocess.DEVNULL, **who)
    options = ["-c", "listen_addresses=", "-k", data, "-c", "max_connections=100"]
    options += [word for setting in settings for word in ("-c", setting)]
    server = subprocess.Popen(
        [programs / "postgres", "-D", data / "data", *options],
        stdout=subprocess.DEVNULL,  # else a reader of this program's output would wait for the server's end
        stderr=subprocess.DEVNULL,
        **who,
    )
    try:
        while subprocess.run([programs / "pg_isready", "-q", "-h", data], check=False).returncode:
            if server.poll() is not None:
                sys.exit(f"PostgreSQL ended with exit code {server.returncode} before it was ready.")
            time.sleep(0.1)
        yield f"postgresql://postgres@/postgres?host={data}"
    finally:
        server.send_signal(signal.SIGINT)  # at once: pools may still hold connections
        server.wait()


def main() -> int:
    """Run the command of the command line; its exit code. SIGTERM ends the command and the server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with temporary_postgresql("command") as address:
        command = subprocess.Popen(sys.argv[1:], env=os.environ | {"CARME_TEST_DATABASE": address})
        try:
            return command.wait()
        finally:
            end(command)


if __name__ == "__main__":
    sys.exit(main())
