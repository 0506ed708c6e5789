"""Commands that undo what tests change on the demo, kept in a file for the case that the run is killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["UndoJournal"]

#: The host, then the program and its arguments.
Command = Sequence[str]


class UndoJournal:
    """The journal of one process, which holds a lock on its file until it ends, however it ends.

    A new journal first undoes what processes that have ended left.

    Args:
        folder: Where the journals of all processes lie.
        run: Runs a command on a host, and ignores how it ends.
    """

    def __init__(self, folder: Path, run: Callable[[Command], object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        #: What this journal undid when it began.
        self.recovered: list[Command] = []
        self._number = 0
        # Between a file's creation and its lock nobody else may look.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in sorted(folder.glob("*.jsonl")):
                self._recover(path, run)
            path = folder / f"{secrets.token_hex(8)}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def undoing(self, run: Callable[[Command], object], commands: Sequence[Command]) -> Iterator[None]:
        """Run commands at the end; where this process is killed or one of them fails, the next journal does.

        Args:
            run: Runs a command on a host, and raises where it fails.
            commands: In the order in which they run. They can run twice, and before what they undo.
        """
        self._number += 1
        number = self._number
        self._write({"begin": number, "commands": [list(command) for command in commands]})
        try:
            yield
        finally:
            for command in commands:
                run(command)
            self._write({"end": number})

    def _write(self, entry: dict[str, object]) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def _recover(self, path: Path, run: Callable[[Command], object]) -> None:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # its process is at work
            pending: dict[int, list[Command]] = {}
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the line that was being written; what it would undo had not begun
                if "end" in entry:
                    pending.pop(entry["end"], None)
                else:
                    pending[entry["begin"]] = entry["commands"]
        for commands in reversed(pending.values()):
            for command in commands:
                run(command)
                self.recovered.append(command)
        path.unlink()
