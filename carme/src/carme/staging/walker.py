"""What copying and comparing have in common: the report of a worker, and its walk through folders."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from carme.staging import tree
from carme.staging.attributes import AttributeCopier
from carme.staging.entries import (
    BLOCK,
    FULL,
    READ,
    Batch,
    Task,
    fill,
    kind,
)
from carme.staging.limits import Pace
from carme.staging.native import Native, library
from carme.staging.options import Counts, Options, Problem

if TYPE_CHECKING:
    from carme.staging.digests import Digest


@dataclass
class Report:
    """What a worker has done and found since its last report.

    `folders` are those found below, with whether they are new at the destination; `batches` parts of very
    large folders; `large` files to be copied in parts; `failed` those with a part that could not
    be copied, with the reason; `links` names of files that have several; `waiting` folders whose times must
    be set at the end.
    """

    counts: Counts = field(default_factory=Counts)
    folders: list[tuple[str, bool]] = field(default_factory=list)
    batches: list[Task] = field(default_factory=list)
    large: list[tuple[str, str, bool]] = field(default_factory=list)
    parts: list[tuple[str, int, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    links: list[tuple[int, int, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    actions: list[tuple[str, str]] = field(default_factory=list)
    digests: list[tuple[str, int, str]] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    stop: str = ""
    done: bool = False


class Stop(Exception):
    """The run cannot go on; says why."""


class SourceChanged(Exception):
    """The source is not what it was when it was begun to be read."""


class CorruptCopy(Exception):
    """What was read back is not what was written."""


class Walker:
    """What copying and comparing have in common.

    Args:
        source: Descriptor of the source's folder.
        destination: Descriptor of the destination's folder.
        options: How to copy.
        digest: Makes a digest.
        share: Called to find out whether a batch of a very large folder should be left to other workers.
        paces: The limits on bytes and on operations.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        options: Options,
        digest: Callable[[], Digest],
        share: Callable[[], bool],
        paces: tuple[Pace, Pace],
    ) -> None:
        self.source, self.destination = source, destination
        self.options = options
        self.digest = digest
        self.share = share
        self.bandwidth, self.operations = paces
        self.report = Report()
        #: Reports what is done, at once or if that was not done for a while.
        self.flush: Callable[[], None] = lambda: None
        self.flush_if_due: Callable[[], None] = lambda: None
        self.buffers = bytearray(BLOCK), bytearray(BLOCK)
        self.native: Native | None = None
        # Reading should not count as an access; only owners may ask for that.
        self._read = READ | os.O_NOATIME

    def compiled(self, copier: AttributeCopier, unit: int) -> Native | None:
        """The compiled part for this walk, where it is there and wanted."""
        loaded = library() if self.options.engine != "python" else None
        return loaded and Native.make(loaded, self.options, copier, unit)

    @contextlib.contextmanager
    def entries(self, folder: int) -> Iterator[Callable[[int], Batch]]:
        """What reads an open folder's entries: at most so many at a time, none at the end.

        Raises:
            OSError: It cannot be read.
        """
        if self.native:
            with self.native.entries(folder) as read:
                yield read
            return
        with os.scandir(folder) as found:
            yield lambda most: [(kind(entry), entry.name) for entry in itertools.islice(found, most)]

    def same_contents(self, original: int, copy: int, start: int, end: int) -> bool:
        """Whether a range of two open files is the same."""
        if self.native and not self.options.bandwidth:
            return self.native.same(original, copy, start, end)
        first, second = self.buffers
        while start < end:
            want = min(BLOCK, end - start)
            if want != len(first):
                first, second = bytearray(want), bytearray(want)
            self.bandwidth.take(want)
            if fill(original, first, start) != want or fill(copy, second, start) != want or first != second:
                return False
            start += want
        return True

    def open_source(self, name: str, folder: int) -> int:
        """A source file for reading; a FIFO or device that took its place does not block."""
        try:
            return os.open(name, self._read, dir_fd=folder)
        except PermissionError:
            return os.open(name, READ, dir_fd=folder)

    def problem(self, path: str, why: str | OSError) -> None:
        """Report what could not be done.

        Raises:
            Stop: The destination takes no more.
        """
        self.report.problems.append(Problem(path, reason_of(why)))
        self.report.counts.problems += 1

    def fail(self, path: str, why: str | OSError) -> None:
        """Report that a large file failed. It is a problem once, however many of its parts say so.

        Raises:
            Stop: The destination takes no more.
        """
        self.report.failed.append((path, reason_of(why)))


def reason_of(why: str | OSError) -> str:
    if isinstance(why, str):
        return why
    if why.errno in FULL:
        raise Stop(tree.reason(why)) from None
    return tree.reason(why)
