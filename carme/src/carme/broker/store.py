"""What the broker must not forget, in SQLite."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from carme.broker.estimates import Estimate
from carme.broker.records import Record
from carme.errors import CarmeError
from carme.sessions.facts import Facts
from carme.sessions.start_estimates import Range
from carme.translation import message as _

_log = logging.getLogger("carme.broker")

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (job_id INTEGER PRIMARY KEY, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS estimates (
    job_id INTEGER PRIMARY KEY, earliest TEXT NOT NULL, latest TEXT NOT NULL, kept INTEGER, judged INTEGER
);
CREATE TABLE IF NOT EXISTS jobs (key TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS recorded (since TEXT NOT NULL);
"""


class Stored(NamedTuple):
    """What was known when the broker ended.

    Attributes:
        estimates: In the order in which they were judged.
        since: Since when every job that the broker submits is recorded.
    """

    sessions: list[Facts]
    estimates: list[Estimate]
    records: list[Record]
    since: datetime


@dataclass(frozen=True)
class Changes:
    """What is to be written; by job id, and by key of records, what is to be known no more."""

    sessions: Sequence[Facts] = ()
    forgotten: Collection[int] = ()
    estimates: Sequence[Estimate] = ()
    dropped: Collection[int] = ()
    records: Sequence[Record] = ()
    unrecorded: Collection[str] = ()


class Store:
    """The file `sessions.sqlite`. One thread does all reading and writing: the broker waits for no disk.

    A write that has been answered survives whatever ends the broker. The end of the whole host may take the
    last moments with it; Slurm and the hub report most of them again.

    Args:
        folder: Where the file lies; made when it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "sessions.sqlite"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._open_file: sqlite3.Connection | None = None

    async def open(self) -> Stored:
        """Open the file; what is in it.

        Raises:
            CarmeError: It cannot be opened, or a newer version of Carme wrote it.
        """
        return await self._run(self._open)

    async def close(self) -> None:
        """Close the file, all writes done."""
        await self._run(self._close)
        self._thread.shutdown()

    async def write(self, changes: Changes) -> bool:
        """Keep these changes. Returns when these and all earlier ones would survive the broker's end.

        Returns:
            Whether they would: a full disk must not end the broker, and the caller tries again.
        """
        try:
            await self._run(lambda: self._write(changes))
        except sqlite3.Error as error:
            _log.error("%s cannot be written: %s.", self._file, error)
            return False
        return True

    async def _run(self, work: Callable[[], _T]) -> _T:
        # When the broker ends it cancels what waits. A write that the thread has not begun would be dropped
        # with it, and its changes no longer count as unsaved; so it is done all the same, before the close.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _open(self) -> Stored:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open_file = file = sqlite3.connect(self._file)
            # A commit is there for the next process at once; only the end of the host could undo it.
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            (version,) = file.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise CarmeError(
                    _("{file} was written by a newer version of Carme.", file=self._file),
                    _("Install that version again, or move the file away."),
                    code="state",
                )
            file.executescript(f"{_TABLES} PRAGMA user_version = {_VERSION};")
            sessions = file.execute("SELECT job_id, facts FROM sessions").fetchall()
            estimates = file.execute(
                "SELECT job_id, earliest, latest, kept, judged FROM estimates ORDER BY judged"
            ).fetchall()
            records = file.execute("SELECT key, record FROM jobs").fetchall()
            now = datetime.now(UTC).isoformat()
            file.execute("INSERT INTO recorded SELECT ? WHERE NOT EXISTS (SELECT 1 FROM recorded)", (now,))
            file.commit()
            (since,) = file.execute("SELECT since FROM recorded").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise CarmeError(
                _("{file} cannot be opened: {error}.", file=self._file, error=error),
                _("Check that its folder is writable and the disk is not full; move a damaged file away."),
                code="state",
            ) from None
        return Stored(
            list(self._read(Facts, sessions)),
            list(map(_estimate, estimates)),
            list(self._read(Record, records)),
            datetime.fromisoformat(since),
        )

    def _read(self, model: type[_Model], rows: list[tuple[int | str, str]]) -> Iterable[_Model]:
        for job, text in rows:
            try:
                yield model.model_validate_json(text)
            except ValidationError as error:
                _log.error("What %s says about job %s is left out: %s", self._file, job, error)

    def _write(self, changes: Changes) -> None:
        assert self._open_file is not None
        rows = [(facts.job.id, facts.model_dump_json()) for facts in changes.sessions]
        estimates = [
            (
                estimate.job_id,
                *(moment.isoformat() for moment in estimate.forecast),
                estimate.correct,
                estimate.number,
            )
            for estimate in changes.estimates
        ]
        with self._open_file as file:
            file.executemany("INSERT OR REPLACE INTO sessions VALUES (?, ?)", rows)
            file.executemany("DELETE FROM sessions WHERE job_id = ?", [(each,) for each in changes.forgotten])
            file.executemany("INSERT OR REPLACE INTO estimates VALUES (?, ?, ?, ?, ?)", estimates)
            file.executemany("DELETE FROM estimates WHERE job_id = ?", [(each,) for each in changes.dropped])
            file.executemany(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?)",
                [(record.key, record.model_dump_json()) for record in changes.records],
            )
            file.executemany("DELETE FROM jobs WHERE key = ?", [(key,) for key in changes.unrecorded])

    def _close(self) -> None:
        if self._open_file is not None:
            self._open_file.close()


def _estimate(row: tuple[int, str, str, int | None, int | None]) -> Estimate:
    job_id, earliest, latest, saved, number = row
    reported = Range(datetime.fromisoformat(earliest), datetime.fromisoformat(latest))
    return Estimate(job_id, reported, None if saved is None else bool(saved), number)
