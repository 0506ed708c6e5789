"""OTF2 archives, for Vampir and other readers of OTF2: definitions here, events in the core.

Each rank is a location group, each of its threads a location; what runs beside other things in one thread,
such as firings, has locations of its own. Collectives and messages name the communicator (a group of
ranks), one-sided operations a window (a segment). Times are those of each node, with the offsets of its
clock, which readers apply.
"""

import contextlib
import ctypes
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carme_runtime import __version__
from carme_runtime.collectives.core import load
from carme_runtime.traces.errors import TraceError
from carme_runtime.traces.kinds import CATEGORIES, Kind
from carme_runtime.traces.libotf2 import Library
from carme_runtime.traces.recordings import Recording

NAME = "traces"  # what tools expect: traces.otf2
_WRITE, _POSIX, _NONE = 0, 1, 1  # modes, substrates, compressions
_EVENT_CHUNK, _DEFINITION_CHUNK = 1 << 20, 4 << 20
_UINT64, _UNDEFINED = 4, 2**32 - 1
_USER, _MPI, _GASPI = 1, 4, 11  # paradigms
_CPU_THREAD, _PROCESS = 1, 1
_COMM_LOCATIONS, _COMM_GROUP = 4, 5
_CODE, _COLLECTIVE, _MESSAGE, _RMA, _TASK, _WAIT, _INPUT = 4, 26, 28, 29, 20, 22, 30  # roles of regions
_ROLES = {
    Kind.WAITING: _WAIT, Kind.LOADING: _INPUT, Kind.FIRING: _TASK, Kind.TRANSFER: _INPUT,
    Kind.COLLECTIVE: _COLLECTIVE, Kind.SEND: _MESSAGE, Kind.RECEIVE: _MESSAGE,
}  # fmt: skip
_ATTRIBUTES = {
    "stage": "of the pipeline", "micro-batch": "of the step", "message": "its number between two ranks",
    "notification": "its number in the window", "bytes": "that moved",
}  # fmt: skip

_PreFlush = ctypes.CFUNCTYPE(
    ctypes.c_uint8, ctypes.c_void_p, ctypes.c_uint8, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_bool
)
_flush = _PreFlush(lambda data, kind, location, caller, final: 1)


class _FlushCallbacks(ctypes.Structure):
    _fields_ = (("before", _PreFlush), ("after", ctypes.c_void_p))


@dataclass
class _Location:
    number: int
    process: int
    name: str
    events: int
    clocks: list[tuple[int, int, int]]


@dataclass
class _Process:
    number: int
    rank: int
    start: int
    host: str
    name: str
    groups: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


class Archive:
    """An archive that is being written.

    Args:
        folder: Where it is to be.
        ranks: How many there were.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.events = self.records = 0
        self._otf2, self._core, self._ranks = Library(), load(), ranks
        self._functions = self._otf2.addresses()
        self._processes: list[_Process] = []
        self._locations: list[_Location] = []
        self._regions: dict[tuple[int, str], int] = {}
        self._communicators: dict[tuple[int, int], int] = {}  # by start and key
        self._members: dict[tuple[int, int], tuple[int, ...]] = {}
        self._windows: dict[tuple[int, int], int] = {}  # by start and segment
        self._strings: dict[str, int] = {"": 0}
        self._first, self._last = 2**63, 0
        open_, path = self._otf2.call, str(folder).encode()
        chunks = (_EVENT_CHUNK, _DEFINITION_CHUNK)
        self._archive = open_("Archive_Open", path, NAME.encode(), _WRITE, *chunks, _POSIX, _NONE)
        self._callbacks = _FlushCallbacks(_flush, None)
        self._call("Archive_SetFlushCallbacks", ctypes.addressof(self._callbacks), None)
        self._call("Archive_SetSerialCollectiveCallbacks")
        self._call("Archive_SetCreator", f"carme-runtime {__version__}".encode())
        self._call("Archive_OpenEvtFiles")
        self._attributes = self._otf2.call("AttributeList_New")

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._otf2.call(name, self._archive, *arguments)

    def add(self, recording: Recording) -> None:
        """Write the events of a process. Raises TraceError."""
        process = self._process(recording)
        for thread, blocks in sorted(recording.blocks.items()):
            events = self._core.Otf2Thread(blocks)
            numbers = self._numbers(recording, process, events)
            self._first = min(self._first, recording.corrected(events.first))
            self._last = max(self._last, recording.corrected(events.last))
            self.records += events.records
            for lane in range(events.lanes):
                number = process.number << 32 | thread << 8 | lane
                writer = self._call("Archive_GetEvtWriter", number)
                try:
                    count = events.write(lane, writer, self._attributes, self._functions, numbers)
                except RuntimeError as error:
                    self._otf2.fail(int(str(error)))
                    raise
                self._call("Archive_CloseEvtWriter", writer)
                name = recording.threads.get(thread, f"thread {thread}")
                name += f", lane {lane + 1}" if lane else ""
                self._locations.append(
                    _Location(number, process.number, name, count, _clocks(recording, events))
                )
                self.events += count

    def _process(self, recording: Recording) -> _Process:
        rank, start = recording.rank, recording.start
        name = f"rank {rank}" + (f", start {start + 1}" if start else "")
        if any((known.rank, known.start) == (rank, start) for known in self._processes):
            name += f", process {recording.header['pid']}"
        host = str(recording.header["host"])
        process = _Process(len(self._processes), rank, start, host, name, recording.groups)
        self._processes.append(process)
        return process

    def _numbers(self, recording: Recording, process: _Process, events: Any) -> Any:
        """What the core needs to know of the definitions."""
        regions = {}
        for kind, name in events.regions:
            known = (kind, recording.names.get(name, f"name {name}"))
            regions[kind, name] = self._regions.setdefault(known, len(self._regions))
        communicators = {}
        for number, (key, ranks) in recording.groups.items():
            self._members[process.start, key] = ranks
            of = (process.start, key)
            communicators[number] = self._communicators.setdefault(of, len(self._communicators))
        windows = {
            segment: self._windows.setdefault((process.start, segment), len(self._windows))
            for segment in events.segments
        }
        attributes = tuple(range(len(_ATTRIBUTES)))
        return self._core.Otf2Numbers(regions, communicators, windows, attributes, 0)

    def close(self) -> None:
        """Write the definitions. Raises TraceError."""
        self._otf2.call("AttributeList_Delete", self._attributes)
        self._add_missing()
        self._call("Archive_CloseEvtFiles")
        self._call("Archive_OpenDefFiles")
        for location in self._locations:
            writer = self._call("Archive_GetDefWriter", location.number)
            for at, offset, took in location.clocks:
                self._otf2.call("DefWriter_WriteClockOffset", writer, at, offset, took / 2)
            self._call("Archive_CloseDefWriter", writer)
        self._call("Archive_CloseDefFiles")
        writer = self._call("Archive_GetGlobalDefWriter")
        for name, arguments in self._definitions():
            self._otf2.call(f"GlobalDefWriter_Write{name}", writer, *arguments)
        self._call("Archive_CloseGlobalDefWriter", writer)
        self._call("Archive_Close")

    def _add_missing(self) -> None:
        """Ranks that left nothing have a place without events: they are members of communicators."""
        for start in sorted({process.start for process in self._processes} or {0}):
            present = {process.rank for process in self._processes if process.start == start}
            named = {rank for (of, _), ranks in self._members.items() if of == start for rank in ranks}
            for rank in sorted((named | (set(range(self._ranks)) if not start else set())) - present):
                process = _Process(len(self._processes), rank, start, "?", f"rank {rank} (left no trace)")
                self._processes.append(process)
                number = process.number << 32
                self._call("Archive_CloseEvtWriter", self._call("Archive_GetEvtWriter", number))
                self._locations.append(_Location(number, process.number, "main thread", 0, []))

    def _text(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _definitions(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """All global definitions, in the order in which they refer to each other."""
        first, length = min(self._first, self._last), max(self._last - self._first, 0) + 1
        yield "ClockProperties", (1_000_000_000, first, length, time.time_ns())
        definitions = [*self._places(), *self._regions_defined(), *self._communicators_defined()]
        for text, number in self._strings.items():
            yield "String", (number, text.encode())
        yield from definitions

    def _places(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        hosts = {host: 1 + n for n, host in enumerate(dict.fromkeys(p.host for p in self._processes))}
        yield "SystemTreeNode", (0, self._text("job"), self._text("machine"), _UNDEFINED)
        for host, number in hosts.items():
            yield "SystemTreeNode", (number, self._text(host), self._text("node"), 0)
        for process in self._processes:
            name, node = self._text(process.name), hosts[process.host]
            yield "LocationGroup", (process.number, name, _PROCESS, node, _UNDEFINED)
        for location in self._locations:
            name = self._text(location.name)
            yield "Location", (location.number, name, _CPU_THREAD, location.events, location.process)

    def _regions_defined(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for number, (name, description) in enumerate(_ATTRIBUTES.items()):
            yield "Attribute", (number, self._text(name), self._text(description), _UINT64)
        for (kind, name), number in self._regions.items():
            shown = f"wait: {name}" if kind == Kind.WAITING else name
            role, text = _ROLES.get(Kind(kind), _RMA if kind >= Kind.PUT else _CODE), self._text(shown)
            paradigm = _GASPI if kind >= Kind.PUT else _MPI if kind >= Kind.COLLECTIVE else _USER
            description = self._text(CATEGORIES[Kind(kind)])
            yield "Region", (number, text, text, description, role, paradigm, 0, 0, 0, 0)
        # Sums of each location since its begin: OTHER, ACCUMULATED_START, UINT64, decimal.
        for number, (name, unit) in enumerate((("bytes", "B"), ("waiting", "ns"))):
            scope = "that this thread has sent or moved" if number == 0 else "of this thread"
            description = self._text(scope)
            member = (number, self._text(name), description, 0, 0, _UINT64, 1, 0, self._text(unit))
            yield "MetricMember", member
        yield "MetricClass", (0, 2, ctypes.addressof(_members(0, 1, kind=ctypes.c_uint32)), 1, 2)

    def _communicators_defined(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        mains: dict[int, int] = {}  # the first location of each process
        for location in self._locations:
            mains.setdefault(location.process, location.number)
        processes = [process for process in self._processes if process.number in mains]
        place = {process.number: n for n, process in enumerate(processes)}
        yield self._group(0, "ranks", _COMM_LOCATIONS, [mains[process.number] for process in processes])
        next_number = 1
        for (start, key), number in self._communicators.items():
            ranks = self._members[start, key]
            members = [place[self._of(rank, start, key)] for rank in ranks]
            name = "all ranks" if len(ranks) == self._ranks else f"ranks {_ranks_text(ranks)}"
            yield self._group(next_number, "", _COMM_GROUP, members)
            yield "Comm", (number, self._text(name), next_number, _UNDEFINED, 0)
            next_number += 1
        comms = len(self._communicators)
        for start in sorted({start for start, _ in self._windows}):
            ranks = sorted({process.rank for process in processes if process.start == start})
            yield self._group(next_number, "", _COMM_GROUP, [place[self._of(r, start, None)] for r in ranks])
            yield "Comm", (comms, self._text("one-sided"), next_number, _UNDEFINED, 0)
            for (of, segment), number in self._windows.items():
                if of == start:
                    yield "RmaWin", (number, self._text(f"segment {segment}"), comms, 0)
            next_number, comms = next_number + 1, comms + 1

    def _of(self, rank: int, start: int, key: int | None) -> int:
        """The process that is a rank; where several are, one that knows the group."""
        found = [p for p in self._processes if (p.rank, p.start) == (rank, start)]
        knowing = [p for p in found if key in {known for known, _ in p.groups.values()}]
        return (knowing or found)[0].number

    def _group(self, number: int, name: str, kind: int, members: list[int]) -> tuple[str, tuple[Any, ...]]:
        array = _members(*members)
        at = ctypes.addressof(array)
        return "Group", (number, self._text(name), kind, _MPI, 0, len(members), at)


_arrays: list[Any] = []  # arrays whose addresses libotf2 gets


def _members(*values: int, kind: Any = ctypes.c_uint64) -> Any:
    _arrays.append((kind * max(len(values), 1))(*values))
    return _arrays[-1]


def _clocks(recording: Recording, events: Any) -> list[tuple[int, int, int]]:
    """Offsets from the first event to the last: what reads OTF2 corrects between two of them only."""
    clocks = [(local, offset + recording.shift, took) for local, offset, took in recording.offsets()]
    if not clocks:
        shift = recording.shift
        return [(events.first, shift, 0), (events.last + 1, shift, 0)] if shift else []
    (begin, first, took), (end, last, took_last) = clocks[0], clocks[-1]
    before = [(events.first, first, took)] if events.first < begin else []
    after = max(events.last, end) + 1
    return [*before, *clocks, (after, last, took_last)]


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"


def write(folder: Path, recordings: Iterator[Recording], ranks: int) -> tuple[int, int]:
    """Make an archive in a new folder; how many records and events are in it.

    Raises:
        TraceError: The folder exists, there is no libotf2, or it could not write. Nothing is left then.
    """
    if folder.exists():
        raise TraceError(f"{folder} exists, and an archive is a new folder.", "Name another, or remove it.")
    try:
        archive = Archive(folder, ranks)
        for recording in recordings:
            archive.add(recording)
        archive.close()
    except BaseException:  # whatever ends it: an archive in part is none
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        raise
    finally:
        _arrays.clear()
    return archive.records, archive.events
