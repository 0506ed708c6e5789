"""Recordings: the files that the recorder leaves, one of each process.

A file is the word CARMEEV1 and blocks: a type, a number and a size (uint32, uint32, uint64, little-endian),
then so many bytes. A process that was killed may leave a last block that is not whole: its
whole events count.
"""

import bisect
import json
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from carme_runtime.traces.errors import TraceError
from carme_runtime.traces.kinds import Kind

SUFFIX = ".events"
_MAGIC = b"CARMEEV1"
_HEAD = struct.Struct("<IIQ")
_RECORD = struct.Struct("<qqQQIIiHH")
RECORD_BYTES = _RECORD.size
_HEADER, _EVENTS, _STRING, _GROUP, _THREAD, _CLOCK, _END = range(7)
_KIND = 22  # the kind's place in a record, in numbers of 2 bytes
_WORKERS = 1 << 20  # threads from here on are workers of Petri nets
_FIRST_NAME = 15  # the names before it are the core's


@dataclass(frozen=True)
class Event:
    """One event.

    Args:
        thread: Its thread's number.
        kind: See `kinds.Kind`.
        name: What happened.
        begin, end: Nanoseconds of this process's monotonic clock.
        size: Bytes, where some moved.
        extra: What else there is: received bytes, tag and number of a message, a micro-batch.
        object: A group, a segment or a stage.
        peer: A member of the group, or a rank; -1: none.
    """

    thread: int
    kind: int
    name: str
    begin: int
    end: int
    size: int
    extra: int
    object: int
    peer: int


@dataclass
class Recording:
    """What one process has left.

    Args:
        about: Its rank, the number of ranks, `start` (how often ranks were started before), host and process;
            `boot` distinguishes what monotonic clocks count from, and `unix` is what has to be added to this
            clock for nanoseconds since 1970.
        names, threads: By number.
        groups: Their keys, which are the same on all members, and their ranks.
        clocks: Local times, what has to be added for the first rank's clock, and how long learning that took.
        blocks: Records by thread, as they are in the file.
        shift: What has to be added besides for the clock of the whole trace.
        written, dropped: How many events are in it and how many had no room; of one that was killed: 0.
        ended: Whether the process wrote its end.
    """

    path: Path
    header: dict[str, Any]
    names: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    groups: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    clocks: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[int, list[bytes]] = field(default_factory=dict)
    shift: int = 0
    written: int = 0
    dropped: int = 0
    ended: bool = False

    @property
    def rank(self) -> int:
        """Of the process."""
        return int(self.header["rank"])

    @property
    def start(self) -> int:
        """How often the run's ranks had been started before."""
        return int(self.header["start"])

    def events(self) -> Iterator[Event]:
        """All events, of one thread after the other, in the order of their ends."""
        for thread, blocks in self.blocks.items():
            for block in blocks:
                for begin, end, size, extra, name, number, peer, kind, _ in _RECORD.iter_unpack(block):
                    called = self.names.get(name, "?")
                    yield Event(thread, kind, called, begin, end, size, extra, number, peer)

    def offsets(self) -> list[tuple[int, int, int]]:
        """The clocks that count: where an answer took long, it says little."""
        if not self.clocks:
            return []
        least = min(took for _, _, took in self.clocks)
        return sorted(clock for clock in self.clocks if clock[2] <= 2 * least)

    def corrected(self, at: int) -> int:
        """A local time by the clock of the first rank: between two measured offsets the line counts."""
        clocks = self.offsets()
        if not clocks:
            return at + self.shift
        after = bisect.bisect_left(clocks, (at,))
        if after in (0, len(clocks)):
            return at + clocks[min(after, len(clocks) - 1)][1] + self.shift
        (begin, first, _), (end, last, _) = clocks[after - 1], clocks[after]
        return at + first + (last - first) * (at - begin) // (end - begin) + self.shift


def read(path: Path, most: int | None = None) -> Recording:
    """What a process has left.

    Args:
        path: Of its file.
        most: Events of it, about; 0: none, but its threads. None: all.

    Raises:
        TraceError: It is not a recording.
        OSError: It cannot be read.
    """
    recording = _head(path)
    with path.open("rb") as file:
        file.seek(len(_MAGIC))
        for kind, number, data in _blocks(file, most):
            _take(recording, kind, number, data)
    _part_firings(recording)
    return recording


def _part_firings(recording: Recording) -> None:
    """Give firings that name their worker a thread of that worker's, in the order of their begins."""
    parted: dict[int, list[bytes]] = {}
    for thread, blocks in recording.blocks.items():
        for place, block in enumerate(blocks):
            if Kind.FIRING not in memoryview(block).cast("H")[_KIND :: RECORD_BYTES // 2].tolist():
                continue
            left: list[bytes] = []
            for at in range(0, len(block), RECORD_BYTES):
                record = block[at : at + RECORD_BYTES]
                *_, worker, _, kind, _ = _RECORD.unpack(record)
                of_worker = kind == Kind.FIRING and worker
                (parted.setdefault(worker, []) if of_worker else left).append(record)
            recording.blocks[thread][place] = b"".join(left)
    for worker, records in sorted(parted.items()):
        recording.threads[_WORKERS + worker] = recording.names.get(worker, f"worker {worker}")
        recording.blocks[_WORKERS + worker] = [b"".join(records)]


def read_all(folder: Path) -> Iterator[Recording]:
    """The recordings of a folder that hold something, one after the other, by starts and ranks.

    Their clocks lead to that of the first one: where a process was not compared with it, or with a rank 0 on
    its node, the clocks of the systems say how.
    """
    heads = sorted(
        (_head(path) for path in folder.glob(f"*{SUFFIX}")),
        key=lambda each: (each.start, each.rank, each.header["pid"]),
    )
    for head in heads:
        recording = read(head.path)
        if recording.blocks:
            recording.shift = _shift(recording, heads)
            yield recording


def _shift(recording: Recording, heads: list[Recording]) -> int:
    """From the clock to which a recording's offsets lead, or its own, to that of the first recording."""
    of = recording
    if recording.clocks:  # they lead to rank 0 of its start
        of = next((each for each in heads if (each.start, each.rank) == (recording.start, 0)), recording)
    own, first = of.header, heads[0].header
    if own["boot"] == first["boot"] or None in (own["unix"], first["unix"]):
        return 0
    return own["unix"] - first["unix"]


def _head(path: Path) -> Recording:
    """What a recording says of its process, and no events."""
    header = {"rank": 0, "size": 1, "start": 0, "host": "?", "pid": 0, "boot": "", "unix": None}
    recording = Recording(path, header)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise TraceError(f"{path} is not a recording of carme_runtime.", "Name the folder of a run.")
        for kind, number, data in _blocks(file):
            _take(recording, kind, number, data)
            break
    return recording


def _blocks(file: BinaryIO, most: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Blocks of a file; once there are `most` events, others are not read: their blocks are empty."""
    events = 0
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        kind, number, size = _HEAD.unpack(head)
        if kind == _EVENTS and most is not None and events >= most:
            file.seek(size, os.SEEK_CUR)
            yield kind, number, b""
            continue
        events += size // RECORD_BYTES if kind == _EVENTS else 0
        data = file.read(size)
        if len(data) < size:
            data = data[: len(data) // RECORD_BYTES * RECORD_BYTES] if kind == _EVENTS else b""
            if data:
                yield kind, number, data
            return
        yield kind, number, data


def _take(recording: Recording, kind: int, number: int, data: bytes) -> None:
    if kind == _EVENTS:
        recording.blocks.setdefault(number, []).extend([data] if data else [])
    elif kind == _STRING:
        recording.names[number] = data.decode(errors="replace")
    elif kind == _GROUP:
        count = len(data) // 4 - 2
        key, *ranks = struct.unpack(f"<Q{count}I", data)
        recording.groups[number] = (key, tuple(ranks))
    elif kind == _THREAD:
        recording.threads[number] = data.decode(errors="replace")
    elif kind == _CLOCK:
        recording.clocks.append(struct.unpack("<qqq", data))
    elif kind == _HEADER:
        recording.header |= json.loads(data)
    elif kind == _END:
        recording.written, recording.dropped = struct.unpack("<QQ", data)
        recording.ended = True


class Plain:
    """The recorder where carme_runtime was installed without its core: in Python, and slower.

    Its functions are those of the core's recorder.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        self._left = self._written = self._dropped = self._error = 0

    def recorder_start(self, path: str, header: str, limit: int) -> int:
        """Begin a file; an errno, 0: done."""
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(number, "wb")
            self._file.write(_MAGIC + _block(_HEADER, 0, header.encode()))
        except OSError as error:
            return error.errno or 1
        self._left = limit
        return 0

    def recorder_stop(self) -> tuple[int, int, int]:
        """Events that were written, those that were dropped, and an errno."""
        with self._lock:
            if self._file:
                self._put(_block(_END, 0, struct.pack("<QQ", self._written, self._dropped)))
                try:
                    self._file.close()
                except OSError as error:
                    self._error = error.errno or 1
                self._file = None
        return self._written, self._dropped, self._error

    def recorder_name(self, text: str) -> int:
        """The number of a name."""
        with self._lock:
            if text not in self._names:
                self._names[text] = _FIRST_NAME + len(self._names)
                self._put(_block(_STRING, self._names[text], text.encode()))
            return self._names[text]

    def recorder_name_thread(self, native: int, text: str) -> None:
        """Nothing: threads are numbered."""

    def recorder_add(
        self, kind: int, name: int, begin: int, end: int, size: int, extra: int, number: int
    ) -> None:
        """Keep an event."""
        record = _RECORD.pack(begin, end, size, extra, name, number, -1, kind, 0)
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            data = _block(_EVENTS, thread, record)
            if len(data) > self._left or not self._put(data):
                self._dropped += 1
                return
            self._left -= len(data)
            self._written += 1

    def _put(self, data: bytes) -> bool:
        if self._file is None or self._error or os.getpid() != self._process:
            return False
        try:
            self._file.write(data)
        except OSError as error:
            self._error = error.errno or 1
            return False
        return True


def _block(kind: int, number: int, data: bytes) -> bytes:
    return _HEAD.pack(kind, number, len(data)) + data
