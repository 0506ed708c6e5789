"""The record of what happened to a run's tokens, on disk.

A frame is a length, a checksum and a pickled list of entries; tokens are numbered in the order of the
entries. What a killed coordinator has not written whole was never done: its tasks run again.
"""

import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carme_runtime.petri.activation import Token
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.frames import bytes_of, encode_frame, frames_of, unusable_journal
from carme_runtime.petri.range_files import Description

#: Entries: (PUT, place, data), (START, (numbers of tokens)), (FIRE, (numbers), ((place, data), ...)),
#: (RANGES, (fields of descriptions), (names of those deleted)), (HOMES, name, nodes that have it),
#: and first in a file (BEGIN, header, next number, [(place, number, attempts, data), ...]).
BEGIN, PUT, START, FIRE, RANGES, HOMES = range(6)

_FORMAT = 3
#: Format 1 had no ranges, format 2 had them on one node.
_READABLE = (1, 2, _FORMAT)
#: Seconds between commits to the disk.
COMMIT_SECONDS = 0.01

_open_here: set[str] = set()


@dataclass
class State:
    """What a journal says.

    Attributes:
        tokens: With the number of their place, by their own numbers.
        next_number: Of the next token.
        ranges: Those that tasks have allocated which have ended well.
        homes: The nodes that have them.
        memory: Where they lie: the `identity` of the run, and its `spills`.
        cut: What was not written whole.
    """

    tokens: dict[int, tuple[int, Token]] = field(default_factory=dict)
    next_number: int = 1
    ranges: dict[str, Description] = field(default_factory=dict)
    homes: dict[str, list[str]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    cut: bytes = b""


class Journal:
    """The journal of one folder, which no other coordinator can have at the same time.

    Args:
        folder: Of the run.
        header: What is written of its net.
        initial: The tokens of a new run, with their places.
        spills: Folders for ranges.

    Raises:
        PetriError: Another program has it, the folder cannot be used, or the journal is of another net.
    """

    def __init__(
        self,
        folder: Path,
        header: dict[str, Any],
        initial: list[tuple[int, bytes]],
        spills: Iterable[Path] = (),
    ) -> None:
        self.folder = folder
        # What it holds when it is opened.
        self.state = State(
            {n: (place, Token(n, data)) for n, (place, data) in enumerate(initial, 1)}, 1 + len(initial)
        )
        self._file = folder / "journal"
        self._lock = -1
        self._path = str(folder.resolve())
        self._take_lock()
        try:
            self.resumed = self._file.exists()
            if self.resumed:
                self.state = read(self._file, header)
                if self.state.cut:
                    # A write that was under way; kept, to be examined.
                    (folder / "journal.cut").write_bytes(self.state.cut)
            memory = self.state.memory
            earlier = [each for each in memory.get("spills", []) if Path(each) not in spills]
            self.state.memory = {
                "identity": memory.get("identity") or secrets.token_hex(8),
                "spills": [*map(str, spills), *earlier],
            }
            self._begin(header)
        except BaseException:
            self._free_lock()
            raise
        #: Whether what is written is committed to the disk; not for a run that nobody is to resume.
        self.commits = True
        self._dirty = threading.Event()
        self._closed = False
        self._sync_error: OSError | None = None
        self._syncer = threading.Thread(target=self._sync_in_time, name="carme-petri-journal", daemon=True)
        self._syncer.start()

    def write(self, entries: list[Any]) -> None:
        """Append entries: from here on a death of this program cannot undo them.

        Raises:
            PetriError: The disk is full or fails; nothing of them stays.
        """
        if self._sync_error is not None:
            raise unusable_journal(self.folder, self._sync_error)
        frame = encode_frame(entries)
        try:
            written = os.write(self._descriptor, frame)
            while written < len(frame):
                written += os.write(self._descriptor, frame[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise unusable_journal(self.folder, error) from error
        self._size += len(frame)
        if self.commits:
            self._dirty.set()

    def sync(self) -> None:
        """Return when all that was written is on the disk.

        Raises:
            PetriError: The disk fails.
        """
        if not self.commits:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise unusable_journal(self.folder, error) from error

    def close(self) -> None:
        """Commit, and let others have it."""
        if not self._closed:
            self._closed = True
            self._dirty.set()
            self._syncer.join()
            os.close(self._descriptor)
            self._free_lock()

    def descriptors(self) -> list[int]:
        """What a child must not keep."""
        return [self._descriptor, self._lock]

    def _begin(self, header: dict[str, Any]) -> None:
        """Start a new file with the marking, in the place of the old one."""
        state = self.state
        snapshot = [(place, t.number, t.attempts, t.data) for place, t in state.tokens.values()]
        memory = state.memory | {"ranges": [each.fields() for each in state.ranges.values()]}
        memory["homes"] = state.homes
        begin = {**header, "memory": memory, "format": _FORMAT}
        new = self.folder / "journal.new"
        try:
            self._descriptor = os.open(
                new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            self._size = 0
            frame = encode_frame([(BEGIN, begin, state.next_number, snapshot)])
            while self._size < len(frame):
                self._size += os.write(self._descriptor, frame[self._size :])
            os.fsync(self._descriptor)
            new.rename(self._file)
            directory = os.open(self.folder, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        except OSError as error:
            raise unusable_journal(self.folder, error) from error

    def _sync_in_time(self) -> None:
        while True:
            self._dirty.wait()
            self._dirty.clear()
            try:
                if self.commits:
                    os.fdatasync(self._descriptor)
            except OSError as error:
                self._sync_error = error
            if self._closed:
                return
            threading.Event().wait(COMMIT_SECONDS)

    def _take_lock(self) -> None:
        refusal = PetriError(
            f"The run in {self.folder} has a coordinator already.",
            "Attach to that one, or end its program before you resume the run here.",
        )
        if self._path in _open_here:
            raise refusal
        try:
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable_journal(self.folder, error) from error
        try:
            # Not flock: that lock would live on in the workers.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise refusal from None
            raise unusable_journal(self.folder, error) from error
        _open_here.add(self._path)

    def _free_lock(self) -> None:
        _open_here.discard(self._path)
        os.close(self._lock)


def read(file: Path, header: dict[str, Any] | None = None) -> State:
    """What a journal says; the places of its tokens are numbered as in `header`, or else as in the journal.

    Raises:
        PetriError: It is damaged, of a net with other places, or another user's.
    """
    data = bytes_of(file)
    state, places, offset = State(), {}, 0
    for entries, end in frames_of(data):
        for entry in entries:
            if entry[0] == BEGIN:
                places = _places(file, entry[1], header or entry[1])
                state.next_number = entry[2]
                state.tokens = {
                    n: (places[place], Token(n, d, attempts)) for place, n, attempts, d in entry[3]
                }
                state.memory = dict(entry[1].get("memory") or {})
                state.ranges = {each[0]: Description(*each) for each in state.memory.pop("ranges", [])}
                state.homes = {name: [each.node] for name, each in state.ranges.items()}
                state.homes |= state.memory.pop("homes", {})
            else:
                _replay(state, entry, places)
        offset = end
    if not offset:
        raise PetriError(f"The journal in {file.parent} is damaged: it has no beginning.", "Start a new run.")
    state.cut = data[offset:]
    return state


def _replay(state: State, entry: tuple[Any, ...], places: dict[int, int]) -> None:
    kind, first, *rest = entry
    tokens: list[tuple[int, bytes]] = []
    if kind == PUT:
        tokens = [(first, rest[0])]
    elif kind == START:
        for taken in first:
            state.tokens[taken][1].attempts += 1
    elif kind == RANGES:
        ranges = {each[0]: Description(*each) for each in first}
        state.ranges |= ranges
        state.homes |= {name: [each.node] for name, each in ranges.items()}
        for name in rest[0]:
            state.ranges.pop(name, None)
            state.homes.pop(name, None)
    elif kind == HOMES:
        state.homes[first] = list(rest[0])
    else:
        for taken in first:
            del state.tokens[taken]
        tokens = rest[0]
    for place, data in tokens:
        state.tokens[state.next_number] = (places[place], Token(state.next_number, data))
        state.next_number += 1


def _places(file: Path, old: dict[str, Any], new: dict[str, Any]) -> dict[int, int]:
    """The places' numbers now, by those in the journal."""
    if old.get("format") not in _READABLE:
        raise PetriError(
            f"The journal in {file.parent} has format {old.get('format')}; this carme_runtime reads "
            f"up to {_FORMAT}.",
            "Use the version that wrote it.",
        )
    for name in old["places"]:
        if name not in new["places"]:
            raise PetriError(
                f"The run in {file.parent} has a place {name}, which net {new['net']} lacks.",
                "Resume it with the net that it was started with; bodies of transitions may differ.",
            )
    return {index: new["places"].index(name) for index, name in enumerate(old["places"])}
