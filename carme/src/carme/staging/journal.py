"""What an unfinished run leaves so that the next one goes on from there.

Small files need no record: they get their final name and time only when they are complete. The
record has the parts of large files, files with several names, and folders whose times are set at the end.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carme.errors import CarmeError
from carme.staging.options import shown
from carme.staging.state import JOURNAL, State
from carme.staging.tree import reason
from carme.translation import message as _

__all__ = ["Journal", "explained_errors"]

_TABLES = """
CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value);
CREATE TABLE IF NOT EXISTS large (path BLOB PRIMARY KEY, identity TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS part (path BLOB, number INTEGER, digest TEXT, PRIMARY KEY (path, number))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS link (device INTEGER, inode INTEGER, path BLOB, PRIMARY KEY (device, inode, path))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folder (path BLOB PRIMARY KEY) WITHOUT ROWID;
"""


@contextlib.contextmanager
def explained_errors(folder: Path) -> Iterator[None]:
    """Report in words that the record cannot be written."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        why = "there is no space left" if "full" in why else why
        raise CarmeError(
            _("{folder} cannot be written: {why}.", folder=shown(str(folder)), why=why),
            _(
                "Free some space or get permission there, then run the same command again; files "
                "that are already copied stay."
            ),
        ) from None


class Journal:
    """The record of one destination; who has it open is the only one that copies there.

    Args:
        folder: The folder at the destination that holds the record; made if it is not there.
        about: What this run is; a record of another one is not used.
        hash: The digest of this run; parts recorded with another one are copied again.

    Raises:
        CarmeError: Another run is at work there, or the record cannot be written.
    """

    def __init__(self, folder: str, about: str, hash: str) -> None:
        self.folder = Path(folder)
        with explained_errors(self.folder), contextlib.ExitStack() as failing:
            self.state = State(folder)
            failing.callback(self.state.close, finished=False)
            self.resumed = self.state.resumed
            file = self.folder / JOURNAL
            try:
                before = self._open(file)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                # The host went down while it was written.
                file.unlink()
                before = {"lost": "yes", **self._open(file)}
            failing.callback(self._base.close)
            down = self.state.down or "lost" in before
            #: Whether a host went down since this copy was begun, with data perhaps not yet on its device.
            self.doubtful = down or "doubtful" in before
            if down or before.get("about") != about or before.get("hash") != hash:
                self._base.execute("DELETE FROM large")
                self._base.execute("DELETE FROM part")
            self._base.execute("DELETE FROM link")
            # Folders that still wait for their times stay: that run may have changed theirs.
            values = {"about": about, "hash": hash}
            if self.doubtful:
                values["doubtful"] = "yes"
            self._base.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", values.items())
            self._base.commit()
            self.state.begin()
            failing.pop_all()
        self._committed = time.monotonic()

    def _open(self, file: Path) -> dict[str, str]:
        """Open the database; what it says of the run before."""
        # Our own lock is the only one: a database's do not work on every shared file system.
        self._base = sqlite3.connect(f"{file.as_uri()}?nolock=1", uri=True)
        self._base.executescript(
            "PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=OFF; PRAGMA locking_mode=EXCLUSIVE;" + _TABLES
        )
        return dict(self._base.execute("SELECT name, value FROM run"))

    def whole_seconds(self) -> bool:
        """Whether the file system keeps times in whole seconds only."""
        return self.state.whole_seconds()

    def large(self, path: str, identity: str) -> dict[int, str]:
        """The verified parts of a large file with their digests; none if it is another file than then."""
        key = os.fsencode(path)
        known = self._base.execute("SELECT identity FROM large WHERE path = ?", (key,)).fetchone()
        if known and known[0] == identity:
            return dict(self._base.execute("SELECT number, digest FROM part WHERE path = ?", (key,)))
        self.forget(path)
        self._base.execute("INSERT INTO large VALUES (?, ?)", (key, identity))
        return {}

    def part(self, path: str, number: int, digest: str) -> None:
        """A part is copied and verified."""
        self._base.execute(
            "INSERT OR REPLACE INTO part VALUES (?, ?, ?)", (os.fsencode(path), number, digest)
        )

    def forget(self, path: str) -> None:
        """A large file is complete, or has to be begun again."""
        self._base.execute("DELETE FROM part WHERE path = ?", (os.fsencode(path),))
        self._base.execute("DELETE FROM large WHERE path = ?", (os.fsencode(path),))

    def link(self, device: int, inode: int, path: str) -> None:
        """A file that has several names has this one."""
        # SQLite's numbers are signed.
        row = (device - (1 << 63), inode - (1 << 63), os.fsencode(path))
        self._base.execute("INSERT OR IGNORE INTO link VALUES (?, ?, ?)", row)

    def links(self) -> Iterator[list[str]]:
        """The names of each file that has several."""
        group: list[str] = []
        last: Any = None
        for device, inode, path in self._base.execute("SELECT * FROM link ORDER BY device, inode, path"):
            if (device, inode) != last and group:
                yield group
                group = []
            last = (device, inode)
            group.append(os.fsdecode(path))
        if group:
            yield group

    def folder_waits(self, path: str) -> None:
        """A folder's times and mode are set at the end."""
        self._base.execute("INSERT OR IGNORE INTO folder VALUES (?)", (os.fsencode(path),))

    def folders(self, size: int) -> Iterator[list[str]]:
        """All folders that wait, so many at a time."""
        cursor = self._base.execute("SELECT path FROM folder")
        while rows := cursor.fetchmany(size):
            yield [os.fsdecode(path) for (path,) in rows]

    def commit(self, every: float = 1.0) -> None:
        """Write what is new, at most once in so many seconds."""
        if time.monotonic() - self._committed >= every:
            self._base.commit()
            self._committed = time.monotonic()

    def close(self, *, finished: bool) -> None:
        """Close it; one that is finished leaves nothing behind."""
        with contextlib.suppress(sqlite3.Error):
            self._base.commit()
        self._base.close()
        self.state.close(finished=finished)
