"""What is still to be done, however much it is."""

from __future__ import annotations

import os
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from carme.staging.entries import Task

__all__ = ["Queue"]

#: So many folders wait in memory; more go to a file.
HELD = 100_000


class Queue:
    """Tasks that wait. Folders come last, the newest of them first, so that few of them wait at a time."""

    def __init__(self) -> None:
        self.first: deque[Task] = deque()
        self.batches: deque[Task] = deque()
        self._folders: list[tuple[str, bool]] = []
        self._spool: BinaryIO | None = None
        self._blocks: list[int] = []

    def folders(self, found: list[tuple[str, bool]]) -> None:
        """Add folders."""
        self._folders += found
        while len(self._folders) > 2 * HELD:
            import pickle
            import tempfile

            self._spool = self._spool or tempfile.TemporaryFile()  # noqa: SIM115 - until the run ends
            self._blocks.append(self._spool.seek(0, os.SEEK_END))
            pickle.dump(self._folders[:HELD], self._spool)
            del self._folders[:HELD]

    def take(self, workers: int) -> list[Task]:
        """What one worker is given next; empty when nothing waits."""
        for tasks in (self.first, self.batches):
            if tasks:
                return [tasks.popleft()]
        if not self._folders and self._blocks:
            import pickle

            assert self._spool is not None
            place = self._blocks.pop()
            self._spool.seek(place)
            self._folders = pickle.load(self._spool)
            self._spool.truncate(place)
        # Several at a time while there are many, one at a time towards the end, so that all end together.
        count = max(1, min(64, len(self._folders) // (3 * workers)))
        taken = self._folders[-count:]
        del self._folders[-count:]
        return [("folder", *each) for each in reversed(taken)]
