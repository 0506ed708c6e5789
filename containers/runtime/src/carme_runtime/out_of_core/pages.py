"""Memory as the kernel sees it: what this process takes, and pages that go back to it at once."""

import contextlib
import ctypes
import errno
import os
import re
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")
# Numbers of the kernel's mman.h and prctl.h, and of glibc's malloc.h.
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_DOFORK = 4, 10, 11
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4
_MAPPED = 2  # the flag in the head of a chunk of glibc's that is a mapping of its own
_FLAGS = 7
_SLACK = 64 << 10  # bytes that such a chunk may be larger than what was requested
_LARGEST_HOLE, _MOST_HOLES = 1 << 30, 4096  # bytes, and so many
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATM, _STATUS, _CLEAR = "/proc/self/statm", "/proc/self/status", "/proc/self/clear_refs"
_MAPPINGS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ \S+ +(.*)")
_OF_MAPPING = ("Rss", "Anonymous", "Swap")

_table: int | None = None  # the open one of `_STATM`

_c = ctypes.CDLL(None, use_errno=True)
for _name in ("madvise", "mprotect"):
    getattr(_c, _name).argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_c.malloc.argtypes, _c.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_c.free.argtypes, _c.free.restype = (ctypes.c_void_p,), None


def map_large_blocks(threshold: int) -> bool:
    """Let malloc give each block from `threshold` bytes on a mapping of its own; False where it cannot.

    A block's pages can then be taken from it, and go back to the kernel as soon as it is freed.
    """
    try:
        return bool(_c.mallopt(_M_MMAP_THRESHOLD, threshold) and _c.mallopt(_M_MMAP_MAX, 1 << 20))
    except AttributeError:
        return False


def trim() -> None:
    """Give what malloc has free back to the kernel, as far as the C library can."""
    with contextlib.suppress(AttributeError):
        _c.malloc_trim(0)


def fill_heap(smallest: int) -> list[int]:
    """Take what malloc has free in its heap in parts of `smallest` bytes or more, which it would use first.

    Nothing is written there, so it takes no memory. `free` gives it back.

    Returns:
        The addresses.
    """
    trim()
    taken: list[int] = []
    size = _LARGEST_HOLE
    while size >= smallest and len(taken) < _MOST_HOLES:
        address = _c.malloc(size)
        if address and not is_mapping(address, size):
            taken.append(address)
            continue
        _c.free(address)
        size //= 2
    return taken


def free(addresses: list[int]) -> None:
    """Give back what `fill_heap` took."""
    for address in addresses:
        _c.free(address)


def is_mapping(address: int, length: int) -> bool:
    """Whether what malloc gave out at this address is a mapping of its own: see its head."""
    head = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
    return bool(head & _MAPPED) and length <= head & ~_FLAGS <= length + _SLACK


def inner_pages(address: int, length: int) -> tuple[int, int]:
    """The address and the length of the whole pages that lie in this memory."""
    begin = -(-address // PAGE) * PAGE
    return begin, max((address + length) // PAGE * PAGE - begin, 0)


def drop(address: int, length: int) -> None:
    """Give the pages back to the kernel. Reading them from now on ends the process: it would be zeros."""
    _call("madvise", address, length, _MADV_DONTNEED)
    _call("mprotect", address, length, _PROT_NONE)


def open_again(address: int, length: int) -> None:
    """Let dropped pages be written and read again."""
    _call("mprotect", address, length, _PROT_READ_WRITE)


def keep_from_children(address: int, length: int, keep: bool) -> None:
    """Whether processes that are forked get no copy of the pages, which would keep them in memory."""
    _call("madvise", address, length, _MADV_DONTFORK if keep else _MADV_DOFORK)


def avoid_huge_pages() -> bool:
    """Keep the kernel from making huge pages unasked; True if that is to be taken back.

    Dropping a part of a huge page gives nothing back until the kernel splits it.
    """
    try:
        always = "[always]" in _HUGE.read_text()
    except OSError:
        return False
    return always and _c.prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0 and _disable_huge_pages(True)


def allow_huge_pages() -> None:
    """Take `avoid_huge_pages` back."""
    _disable_huge_pages(False)


def resident() -> int:
    """Bytes of memory that this process takes: all of its pages, and their tables."""
    return _taken()[1]


def of_files() -> int:
    """Those bytes of `resident` that are pages of files, such as of libraries."""
    return _taken()[2]


def _taken() -> list[int]:
    """Bytes by the kernel's table of this process; it stays open, as this is requested again and again."""
    global _table
    if _table is None:
        _table = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
    return [int(field) * PAGE for field in os.pread(_table, 100, 0).split()[:3]]


def _forget_table() -> None:
    """A child has a table of its own."""
    global _table
    if _table is not None:
        os.close(_table)
        _table = None


os.register_at_fork(after_in_child=_forget_table)


def drop_library_pages() -> None:
    """Take the pages of the program and its libraries from this process; what is used comes back at once.

    Most of them were used while the libraries were loaded, and never after. They stay in the page cache,
    which the kernel empties itself when memory is short. Mappings that the process may write, or in which it
    has pages of its own, such as those that the loader relocated, are left alone: these would be lost.
    """
    for address, length in _clean_mappings():
        with contextlib.suppress(OSError):  # it is locked in memory
            _call("madvise", address, length, _MADV_DONTNEED)


def _clean_mappings() -> list[tuple[int, int]]:
    """Where read-only mappings of programs and libraries begin, and their lengths."""
    try:
        text = _MAPPINGS.read_text(errors="replace")
    except OSError:  # a kernel without this file
        return []
    clean: list[tuple[str, int, int]] = []
    executable: set[str] = set()  # data files that a program maps are none of ours
    path, rights, begin, end = "", "", 0, 0
    taken: dict[str, int] = {}
    for line in text.splitlines():
        if (mapping := _MAPPING.fullmatch(line)) is not None:
            begin, end = int(mapping[1], 16), int(mapping[2], 16)
            rights, path, taken = mapping[3], mapping[4], {}
            if rights[2] == "x":
                executable.add(path)
            continue
        key, _, value = line.partition(":")
        if key in _OF_MAPPING:
            taken[key] = int(value.split()[0]) << 10
        elif key == "VmFlags":  # the last line of each mapping
            is_read_only = rights[1] == "-" and rights[3] == "p" and path.startswith("/")
            if is_read_only and set(taken) == set(_OF_MAPPING) and not taken["Anonymous"] + taken["Swap"]:
                clean.append((path, begin, end - begin))
    return [(begin, length) for path, begin, length in clean if path in executable]


def forget_peak() -> None:
    """Let `peak` count from now on."""
    with open(_CLEAR, "wb", buffering=0) as file:  # noqa: PTH123
        file.write(b"5")


def peak() -> int:
    """The most bytes that this process has taken since `forget_peak`."""
    return _status(b"VmHWM:")


def page_tables() -> int:
    """Bytes of the tables of this process's pages, which its limit counts as well."""
    return _status(b"VmPTE:")


def _status(key: bytes) -> int:
    with open(_STATUS, "rb", buffering=0) as file:  # noqa: PTH123
        text = file.read(8192)
    return int(text.partition(key)[2].split(None, 1)[0]) << 10


def _disable_huge_pages(disable: bool) -> bool:
    return _c.prctl(_PR_SET_THP_DISABLE, int(disable), 0, 0, 0) == 0


def _call(name: str, address: int, length: int, argument: int) -> None:
    if getattr(_c, name)(address, length, argument) != 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, f"{name}: {os.strerror(number)}")
