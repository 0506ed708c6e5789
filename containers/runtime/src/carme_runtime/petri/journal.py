"""The record of what happened to a run's tokens, on disk.

A frame is a length, a checksum and a pickled list of entries; tokens are numbered in the order of the
entries. What a killed coordinator has not written whole was never done: its tasks run again.
"""

import errno
import fcntl
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from carme_runtime.petri.activation import Token
from carme_runtime.petri.errors import PetriError

#: Entries: (PUT, place, data), (START, (numbers of tokens)), (FIRE, (numbers), ((place, data), ...)),
#: and first in a file (BEGIN, header, next number, [(place, number, attempts, data), ...]).
BEGIN, PUT, START, FIRE = range(4)

_HEAD = struct.Struct("<QI")
_FORMAT = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Seconds between commits to the disk.
COMMIT_SECONDS = 0.01

_open_here: set[str] = set()


class Journal:
    """The journal of one folder, which no other coordinator can have at the same time.

    Raises:
        PetriError: Another program has it, the folder cannot be used, or the journal is of another net.
    """

    def __init__(self, folder: Path, header: dict[str, Any], initial: list[tuple[int, bytes]]) -> None:
        self.folder = folder
        self.next_number = 1 + len(initial)
        # What it holds when it is opened, with places.
        self.tokens = {n: (place, Token(n, data)) for n, (place, data) in enumerate(initial, 1)}
        self._file = folder / "journal"
        self._lock = -1
        self._here = str(folder.resolve())
        self._take_lock()
        try:
            self.resumed = self._file.exists()
            if self.resumed:
                self.tokens, self.next_number, cut = read(self._file, header)
                if cut:
                    # A write that was under way; kept for who wants to see it.
                    (folder / "journal.cut").write_bytes(cut)
            self._begin(header)
        except BaseException:
            self._free_lock()
            raise
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
            raise _failed(self.folder, self._sync_error)
        frame = _frame(entries)
        try:
            written = os.write(self._descriptor, frame)
            while written < len(frame):
                written += os.write(self._descriptor, frame[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise _failed(self.folder, error) from error
        self._size += len(frame)
        self._dirty.set()

    def sync(self) -> None:
        """Return when all that was written is on the disk.

        Raises:
            PetriError: The disk fails.
        """
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _failed(self.folder, error) from error

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
        snapshot = [(place, t.number, t.attempts, t.data) for place, t in self.tokens.values()]
        new = self.folder / "journal.new"
        try:
            self._descriptor = os.open(
                new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            self._size = 0
            frame = _frame([(BEGIN, {**header, "format": _FORMAT}, self.next_number, snapshot)])
            while self._size < len(frame):
                self._size += os.write(self._descriptor, frame[self._size :])
            os.fsync(self._descriptor)
            new.rename(self._file)
            directory = os.open(self.folder, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        except OSError as error:
            raise _failed(self.folder, error) from error

    def _sync_in_time(self) -> None:
        while True:
            self._dirty.wait()
            self._dirty.clear()
            try:
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
        if self._here in _open_here:
            raise refusal
        try:
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _failed(self.folder, error) from error
        try:
            # Not flock: that lock would live on in the workers.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise refusal from None
            raise _failed(self.folder, error) from error
        _open_here.add(self._here)

    def _free_lock(self) -> None:
        _open_here.discard(self._here)
        os.close(self._lock)


def read(file: Path, header: dict[str, Any]) -> tuple[dict[int, tuple[int, Token]], int, bytes]:
    """The tokens of a journal with their places, the next number, and what was not written whole.

    Raises:
        PetriError: It is damaged, or of a net with other places.
    """
    data = _bytes_of(file)
    tokens: dict[int, tuple[int, Token]] = {}
    number, offset, places = 1, 0, {}
    for entries, end in _frames(data):
        for entry in entries:
            if entry[0] == BEGIN:
                places = _places(file, entry[1], header)
                number = entry[2]
                tokens = {n: (places[place], Token(n, d, attempts)) for place, n, attempts, d in entry[3]}
            elif entry[0] == PUT:
                tokens[number] = (places[entry[1]], Token(number, entry[2]))
                number += 1
            elif entry[0] == START:
                for taken in entry[1]:
                    tokens[taken][1].attempts += 1
            else:
                for taken in entry[1]:
                    del tokens[taken]
                for place, given in entry[2]:
                    tokens[number] = (places[place], Token(number, given))
                    number += 1
        offset = end
    if not offset:
        raise PetriError(f"The journal in {file.parent} is damaged: it has no beginning.", "Start a new run.")
    return tokens, number, data[offset:]


def header_of(file: Path) -> dict[str, Any]:
    """What a journal says of its net.

    Raises:
        PetriError: It is damaged.
    """
    for entries, _ in _frames(_bytes_of(file)):
        return entries[0][1]
    raise PetriError(f"The journal in {file.parent} is damaged: it has no beginning.", "Start a new run.")


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _failed(file.parent, error) from error


def _frame(entries: list[Any]) -> bytes:
    payload = pickle.dumps(entries, 5)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(data: bytes) -> Iterable[tuple[list[Any], int]]:
    offset = 0
    while offset + _HEAD.size <= len(data):
        size, check = _HEAD.unpack_from(data, offset)
        payload = data[offset + _HEAD.size : offset + _HEAD.size + size]
        if len(payload) < size or zlib.crc32(payload) != check:
            return
        offset += _HEAD.size + size
        yield pickle.loads(payload), offset


def _places(file: Path, old: dict[str, Any], new: dict[str, Any]) -> dict[int, int]:
    """The places' numbers now, by those in the journal."""
    if old.get("format") != _FORMAT:
        raise PetriError(
            f"The journal in {file.parent} has format {old.get('format')}; this carme_runtime reads "
            f"{_FORMAT}.",
            "Use the version that wrote it.",
        )
    for name in old["places"]:
        if name not in new["places"]:
            raise PetriError(
                f"The run in {file.parent} has a place {name}, which net {new['net']} lacks.",
                "Resume it with the net that it was started with; bodies of transitions may differ.",
            )
    return {index: new["places"].index(name) for index, name in enumerate(old["places"])}


def _failed(folder: Path, error: OSError) -> PetriError:
    if error.errno in _FULL:
        return PetriError(
            f"The disk under the journal in {folder} is full; the run stands as it was last written.",
            "Free some room and resume it.",
        )
    return PetriError(
        f"The journal in {folder} cannot be used: {error.strerror or error}.",
        "See that the folder is there and yours, and resume the run.",
    )
