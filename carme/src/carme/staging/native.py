"""The compiled part of copying, the folder `native`, where it was built; else the rest does the same."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, addressof, byref, c_char, c_char_p, c_int, c_int32, c_int64, c_uint32, c_void_p

from carme.errors import InvalidRequest
from carme.staging.options import Counts, Options
from carme.translation import message as _

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from carme.staging.attributes import AttributeCopier

__all__ = ["FILE_NAME", "ChangedFolder", "Entries", "Entry", "Native", "chosen", "hasher", "library"]

#: What both sides send each other; raised with every change of it.
INTERFACE = 7
#: The library lies beside this file. It needs nothing of Python, so one serves all its versions.
FILE_NAME = f"copying-{os.uname().machine}.so"

_VERIFY = {"none": 0, "read": 1, "device": 2}
_TRANSFER_MODES = {"plain": 0, "early": 1, "direct": 2}
_GROUPS = 1024
#: The longest record of an entry, in bytes.
_RECORD = 258
#: A walk's findings take at most so much memory at a time, in bytes.
_ITEMS_SIZE = 32 << 20
#: A walk leaves folders with more entries than this to others.
_MAX_ENTRIES = 1 << 16
#: Copying returns after so many milliseconds, so that what was done can be reported.
_TIME_LIMIT = 200

_CHANGED, _CORRUPT = -1, -2


def chosen(engine: str) -> str:
    """What copies when that engine is requested: `native` or `python`.

    Raises:
        InvalidRequest: The compiled part is requested and is not there.
    """
    there = library() is not None
    if engine == "native" and not there:
        raise InvalidRequest(
            _(
                "The compiled part of copying was not built for this host ({machine}).",
                machine=os.uname().machine,
            ),
            _("Install a C compiler and then Carme again, or use the engine auto."),
            field="engine",
        )
    return "native" if there and engine != "python" else "python"


class _CopyOptions(ctypes.Structure):
    """How to copy: `struct copy_options`."""

    _fields_ = (
        ("hash", c_void_p),
        ("verify", c_int32),
        ("attributes", c_int32),
        ("unit", c_int64),
        ("user", c_uint32),
        ("group", c_uint32),
        ("plain", c_int32),
        ("group_count", c_int32),
        ("groups", c_uint32 * _GROUPS),
    )


class _Counts(ctypes.Structure):
    """What was done and what is left: `struct counts`."""

    _fields_ = (("files", c_int64), ("bytes", c_int64), ("left", c_int64), ("names", c_int64))


def library() -> ctypes.CDLL | None:
    """The library; None where it was not built, or not for this host."""
    try:
        loaded = ctypes.CDLL(os.path.join(os.path.dirname(__file__), FILE_NAME), use_errno=True)
        if loaded.carme_interface() != INTERFACE:
            return None
    except (OSError, AttributeError):
        return None
    options, counts = POINTER(_CopyOptions), POINTER(_Counts)
    for name, result, arguments in (
        ("carme_open", c_void_p, [c_int]),
        ("carme_close", None, [c_void_p]),
        ("carme_entries", c_int64, [c_void_p, c_void_p, c_int64, c_int64]),
        ("carme_copy", c_int64, [options, c_int, c_int, c_void_p, c_int64, c_char_p, c_int64, counts]),
        ("carme_compare", None, [options, c_int, c_int, c_void_p, c_int64, counts]),
        ("carme_walk", c_void_p, [options, c_int, c_int, c_int64, c_int64, c_int]),
        ("carme_walk_on", c_int64, [c_void_p, c_int, c_int, c_int64, c_void_p, c_int64, counts]),
        ("carme_walk_end", None, [c_void_p]),
        ("carme_room", c_int64, [c_int]),
        ("carme_reserve", None, [c_int, c_int64]),
        (
            "carme_transfer",
            c_int,
            [c_int, c_int, c_int64, c_int64, c_int, c_void_p, c_int, c_int, c_void_p],
        ),
        ("carme_same", c_int, [c_int, c_int, c_int64, c_int64]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def hasher() -> int | None:
    """Where the function XXH3_128bits is, in the package xxhash or in the system's library; None: nowhere."""
    # Not imported where nothing is hashed.
    from importlib.machinery import PathFinder

    candidates = ["libxxhash.so.0"]
    if package := PathFinder.find_spec("xxhash"):
        # The package's own library has its functions, and is compiled for this processor's kind at least.
        inner = PathFinder.find_spec("xxhash._xxhash", package.submodule_search_locations)
        candidates[:0] = [inner.origin] if inner and inner.origin else []
    for candidate in candidates:
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(candidate).XXH3_128bits, c_void_p).value
    return None


#: An entry of a folder: `f` for a file, `d` for a folder, `o` for anything else, `?` for what the folder does
#: not say, `n` for a file that has to be copied; and its name.
Entry = tuple[str, str]


class Entries:
    """Some of a folder's entries, as the library has them: each its letter, its name and a zero."""

    def __init__(self, records: bytes) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records.count(b"\0")

    def __iter__(self) -> Iterator[Entry]:
        for record in self.records.split(b"\0")[:-1]:
            yield chr(record[0]), os.fsdecode(record[1:])

    @classmethod
    def files(cls, names: list[str]) -> Entries:
        """Files of these names."""
        return cls(b"".join(b"f" + os.fsencode(name) + b"\0" for name in names))

    def of(self, kind: str) -> Entries:
        """Those with that letter."""
        records = self.records.split(b"\0")[:-1]
        first = ord(kind)
        return Entries(b"".join(record + b"\0" for record in records if record[0] == first))

    def begun_at(self, number: int) -> Entries:
        """The same ones, from that one on, and those before it at the end."""
        records = self.records.split(b"\0")[:-1]
        return Entries(b"".join(record + b"\0" for record in records[number:] + records[:number]))


class ChangedFolder:
    """A folder in which something has changed.

    `entries`: those of it to compare; None: all, and the folders below. `parts`: these are not all.
    `surplus`: the destination has entries there that the source has not; that is all that it reports then.
    """

    def __init__(
        self, path: str, entries: Entries | None, parts: bool = False, surplus: bool = False
    ) -> None:
        self.path, self.entries, self.parts, self.surplus = path, entries, parts, surplus


def _findings(items: bytes, batch: int) -> list[ChangedFolder]:
    """What `struct walk` reports."""
    found = []
    place = 0
    while place < len(items):
        kind, end = items[place], items.index(b"\0", place)
        path = os.fsdecode(items[place + 1 : end])
        # Records begin with a letter and end with a zero each, so that two zeros are the end.
        begin, place = end + 1, items.index(b"\0\0", end) + 1
        records = items[begin:place]
        place += 1
        if kind == ord("F"):
            found.append(ChangedFolder(path, None))
        elif kind == ord("G"):
            found.append(ChangedFolder(path, None, surplus=True))
        elif kind == ord("R"):
            found.append(ChangedFolder(path, Entries(records)))
        else:
            each = [record + b"\0" for record in records.split(b"\0")[:-1]]
            found += [
                ChangedFolder(path, Entries(b"".join(each[first : first + batch])), parts=True)
                for first in range(0, max(1, len(each)), batch)
            ]
    return found


class Native:
    """The library, for one way to copy.

    Args:
        loaded: From `library`.
        verify: As in Options.
        attributes: As in Options.
        unit: Times at the destination count in so many nanoseconds.
        user: This process' user.
        group: Its group.
        groups: Those that it may give files to.
        hash: Hash contents with xxh3, and compare what is read back with that; else byte by byte.
    """

    @classmethod
    def make(cls, loaded: ctypes.CDLL, options: Options, copier: AttributeCopier, unit: int) -> Native:
        """The library for what was requested and what this process may do; `unit` as above."""
        return cls(
            loaded,
            verify=options.verify,
            attributes=options.attributes,
            unit=unit,
            user=copier.user,
            group=copier.group,
            groups=copier.groups,
            hash=options.hash in ("", "xxh3"),
        )

    def __init__(
        self,
        loaded: ctypes.CDLL,
        *,
        verify: str,
        attributes: bool,
        unit: int,
        user: int,
        group: int,
        groups: set[int],
        hash: bool,
    ) -> None:
        self._loaded = loaded
        given = sorted(groups)[:_GROUPS]
        self._room: mmap.mmap | None = None
        self._hash = hash
        #: Whether it can copy for this process.
        self.copies = len(given) == len(groups)
        self._options = _CopyOptions(
            None, _VERIFY[verify], attributes, unit, user, group, 0, len(given), (c_uint32 * _GROUPS)(*given)
        )

    def _hashing(self) -> int | None:
        """What hashes, found when it is first wanted."""
        if self._hash:
            self._hash, self._options.hash = False, hasher()
        return self._options.hash

    @contextlib.contextmanager
    def entries(self, folder: int) -> Iterator[Callable[[int], Entries]]:
        """What reads a folder's entries: at most so many at a time, none at its end.

        Raises:
            OSError: It cannot be read.
        """
        opened = self._loaded.carme_open(folder)
        if not opened:
            raise _error(ctypes.get_errno())
        room = ctypes.create_string_buffer(0)

        def read(most: int) -> Entries:
            nonlocal room
            if len(room) < most * _RECORD:
                room = ctypes.create_string_buffer(most * _RECORD)
            length = self._loaded.carme_entries(opened, room, len(room), most)
            if length < 0:
                raise _error(-length)
            return Entries(ctypes.string_at(room, length))

        try:
            yield read
        finally:
            self._loaded.carme_close(opened)

    def walk(
        self, source: int, target: int, threads: int, most: int, batch: int, enough: int, surplus: bool
    ) -> Iterator[tuple[Counts, list[ChangedFolder]]]:
        """Walk through both trees and find what has changed.

        Args:
            source: One tree's top.
            target: The other's.
            threads: How many look at once.
            most: So many at most, while they have to wait for what they look at.
            batch: So many entries are compared in one go.
            enough: With so many bytes of findings walk no further; what was not walked through is found, too.
            surplus: Find folders with entries that the source has not, too.

        Yields:
            Some times a second the numbers of compared entries that are the same, and of those that are not.

        Raises:
            OSError: There is no memory.
        """
        loaded = self._loaded
        walk = loaded.carme_walk(byref(self._options), source, target, batch, _MAX_ENTRIES, surplus)
        if not walk:
            raise _error(ctypes.get_errno())
        found = 0
        try:
            with mmap.mmap(-1, _ITEMS_SIZE) as room:
                start = c_char.from_buffer(room)
                try:
                    while True:
                        counts = _Counts()
                        length = loaded.carme_walk_on(
                            walk, threads, most, _TIME_LIMIT, addressof(start), _ITEMS_SIZE, byref(counts)
                        )
                        same = Counts(counts.names, unchanged=counts.files, bytes_unchanged=counts.bytes)
                        yield same, _findings(room[:length], batch) if length else []
                        if not counts.left:
                            return
                        found += length
                        if found >= enough or not (length or counts.names):
                            threads = 0
                finally:
                    del start
        finally:
            loaded.carme_walk_end(walk)

    def unchanged(self, source: int, target: int, entries: Entries) -> tuple[Entries, int, int]:
        """The entries that are not files which have not changed; how many have not, and their bytes.

        Those whose contents have to be copied come back with the letter `n`.
        """
        room, counts = ctypes.create_string_buffer(entries.records, len(entries.records)), _Counts()
        self._loaded.carme_compare(byref(self._options), source, target, room, len(room), byref(counts))
        return Entries(ctypes.string_at(room, counts.left)), counts.files, counts.bytes

    def copy(
        self,
        source: int,
        target: int,
        entries: Entries,
        writing: bytes | None,
        plain: bool,
        notify: Callable[[int, int], None],
    ) -> Entries:
        """Copy those that are small and plain files.

        Args:
            source: The folder that they are in.
            target: The folder that they come into. It gives its files no ACL.
            entries: Files among them have the letter `f` or `n`.
            writing: Their names, each with a zero, until they are complete; None: their own at once.
            plain: New files in `target` belong to this process' user and group.
            notify: Called with how many were copied and their bytes, some times a second.

        Returns:
            Those that were not copied.

        Raises:
            OSError: There is no memory.
        """
        self._options.plain = plain
        self._hashing()
        rest, records = [], entries.records
        while records:
            room, counts = ctypes.create_string_buffer(records, len(records)), _Counts()
            done = self._loaded.carme_copy(
                byref(self._options), source, target, room, len(records), writing, _TIME_LIMIT, byref(counts)
            )
            if done < 0:
                raise _error(-done)
            rest.append(ctypes.string_at(room, counts.left))
            records = records[done:]
            writing = writing and writing[counts.names :]
            notify(counts.files, counts.bytes)
        return Entries(b"".join(rest))

    def reserve(self, file: int, size: int) -> None:
        """Have the blocks of a file kept for it, as far as that can be; in bytes."""
        self._loaded.carme_reserve(file, size)

    def transfer(
        self,
        original: int,
        copy: int,
        start: int,
        end: int,
        *,
        compare: bool,
        mode: Literal["plain", "early", "direct"],
        threads: int = 1,
    ) -> bool | None:
        """Copy a range of a file.

        Args:
            original: The file.
            copy: The copy.
            start: Where the range begins; in bytes.
            end: Where it ends.
            compare: Read back what was written, and compare.
            mode: `direct` goes past this host's memory to the device and back where the file system lets that
                be; `early`, and `direct` where it cannot be, have the device begin to write it.
            threads: So many go past memory at once, 16 at most; the same with every call.

        Returns:
            Whether what was read back was the same; None if the file is shorter.

        Raises:
            OSError: It cannot be read or written.
        """
        if self._room is None:
            # Begins on a page, as direct transfers want it.
            self._room = mmap.mmap(-1, self._loaded.carme_room(threads))
        place = addressof(c_char.from_buffer(self._room))
        outcome = self._loaded.carme_transfer(
            original, copy, start, end, compare, self._hashing(), _TRANSFER_MODES[mode], threads, place
        )
        if outcome > 0:
            raise _error(outcome)
        return {0: True, _CHANGED: None, _CORRUPT: False}[outcome]

    def same(self, original: int, copy: int, start: int, end: int) -> bool:
        """Whether a range of two files is the same.

        Raises:
            OSError: One of them cannot be read.
        """
        outcome = self._loaded.carme_same(original, copy, start, end)
        if outcome < 0:
            raise _error(-outcome)
        return bool(outcome)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
