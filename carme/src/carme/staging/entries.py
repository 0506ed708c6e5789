"""Entries of folders and ranges of open files, by system calls."""

from __future__ import annotations

import errno
import operator
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from carme.staging import tree
from carme.staging.native import Entries, Entry

if TYPE_CHECKING:
    pass

#: Files up to this size are read in one go; in bytes.
SMALL = 1 << 20
#: What is read in one go of larger ones; in bytes. It stays in the processor's cache until it is read back.
BLOCK = 256 << 10
#: What the compiled part copies of a large file before it is reported, in bytes.
STEP = 16 << 20

#: The destination takes no more: going on would only make a long list of the same error.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
FICLONE = 0x40049409

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Task = tuple[Any, ...]
#: Some of a folder's entries.
Batch = Entries | list[Entry]


def join(path: str, name: str) -> str:
    """The path of an entry of a folder."""
    return f"{path}/{name}" if path else name


def kind(entry: os.DirEntry[str]) -> str:
    """The letter of an entry, see `Entry`; asking the file system for no more than the folder says."""
    if entry.is_symlink():
        return "o"
    if entry.is_dir(follow_symlinks=False):
        return "d"
    return "f" if entry.is_file(follow_symlinks=False) else "o"


def kind_of(status: os.stat_result) -> str:
    if stat.S_ISDIR(status.st_mode):
        return "d"
    return "f" if stat.S_ISREG(status.st_mode) else "o"


def statuses(folder: int | None, names: list[str]) -> list[os.stat_result | None]:
    """The status of each name in a folder; None for what is not there.

    The process goes into the folder: with plain names, and without a loop of Python where all are there, that
    takes half the time.
    """
    if folder is None:
        return [None] * len(names)
    os.fchdir(folder)
    try:
        return list(map(os.lstat, names))
    except OSError:
        return [status_of(name) for name in names]


size_of = operator.attrgetter("st_size")
_links = operator.attrgetter("st_nlink")
_changed = operator.attrgetter("st_ctime_ns")
_attributes = operator.attrgetter("st_mode", "st_size", "st_mtime_ns", "st_uid", "st_gid")
_modes = operator.attrgetter("st_mode")


def all_unchanged(sources: list[os.stat_result | None], copies: list[os.stat_result | None]) -> bool:
    """Whether all are files that have not changed, as they mostly have not; without a loop of Python."""
    if not sources or None in copies or None in sources:
        return False
    return (
        max(map(_links, sources)) == 1
        and max(map(_changed, sources)) <= min(map(_changed, copies))
        and all(map(stat.S_ISREG, set(map(_modes, sources))))
        and all(map(operator.eq, map(_attributes, sources), map(_attributes, copies)))
    )


def status_of(name: str) -> os.stat_result | None:
    try:
        return os.lstat(name)
    except FileNotFoundError:
        return None


def rotated(batch: Batch, turn: float) -> Batch:
    """The same entries, begun at another one."""
    if isinstance(batch, Entries):
        return batch.begun_at(int(turn * len(batch)))
    begin = int(turn * len(batch))
    return batch[begin:] + batch[:begin]


def create(name: str, mode: int, folder: int) -> int:
    """A new file; what an interrupted run has left under that name is removed."""
    try:
        return os.open(name, WRITE, mode, dir_fd=folder)
    except FileExistsError:
        tree.remove(folder, name)
        return os.open(name, WRITE, mode, dir_fd=folder)


def same_file(before: os.stat_result, after: os.stat_result) -> bool:
    return (
        before.st_mtime_ns == after.st_mtime_ns
        and before.st_size == after.st_size
        and before.st_ctime_ns == after.st_ctime_ns
    )


def identity_of(status: os.stat_result) -> str:
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_dev}:{status.st_ino}"


def data_ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges that hold data, not holes."""
    while start < end:
        try:
            begin = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        if begin >= end:
            return
        start = min(end, os.lseek(descriptor, begin, os.SEEK_HOLE))
        yield begin, start


def fill(descriptor: int, block: bytearray, place: int) -> int:
    """Read as much as the block holds; how much there was."""
    size_read = os.preadv(descriptor, [block], place)
    while 0 < size_read < len(block):
        more = os.preadv(descriptor, [memoryview(block)[size_read:]], place + size_read)
        if not more:
            break
        size_read += more
    return size_read


def write(descriptor: int, block: bytearray, place: int) -> None:
    written = os.pwrite(descriptor, block, place)
    while written < len(block):
        written += os.pwrite(descriptor, memoryview(block)[written:], place + written)


def drop_cached(descriptor: int, start: int, size: int) -> None:
    """Have it on the device, and no longer in this host's memory."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
