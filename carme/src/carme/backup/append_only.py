"""Files that may be added to only, as the audit log is (`chattr +a`): nobody replaces one, not even root."""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

from carme.errors import CarmeError

__all__ = ["replaceable"]

# Of linux/fs.h: the numbers of `ioctl` hold the size of a C long.
_LONG = struct.calcsize("l")
_GET_FLAGS = 0x80006601 | _LONG << 16
_SET_FLAGS = 0x40006602 | _LONG << 16
_APPEND_ONLY = 0x20


def _is_append_only(name: str, folder: int) -> bool:
    """Whether a regular file is marked so; `folder` is the descriptor of the folder in which it lies.

    False where the file is not there, or its file system knows no marks.
    """
    with contextlib.suppress(OSError):
        descriptor = _open(name, folder)
        try:
            return bool(_flags(descriptor) & _APPEND_ONLY)
        finally:
            os.close(descriptor)
    return False


@contextlib.contextmanager
def replaceable(name: str, folder: int, aside: str = "") -> Iterator[None]:
    """Lift the mark of a file, and give it to what has its name afterwards. Without a mark nothing is done.

    Args:
        name: Of the file.
        folder: The descriptor of the folder in which it lies.
        aside: What the file may be called afterwards; that gets the mark again, too.

    Raises:
        CarmeError: Root may not lift it, as in a container without CAP_LINUX_IMMUTABLE.
    """
    if not _is_append_only(name, folder):
        yield
        return
    try:
        _mark(name, folder, False)
    except OSError as error:
        raise CarmeError(
            f"{name} is append-only, and that attribute cannot be removed: {error.strerror}.",
            f"Run this where root may remove it, or use 'chattr -a {name}' in its folder first.",
        ) from None
    try:
        yield
    finally:
        for each in filter(None, (name, aside)):
            with contextlib.suppress(FileNotFoundError):
                _mark(each, folder, True)


def _open(name: str, folder: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


def _flags(descriptor: int) -> int:
    # The kernel writes an int, although its number names a long.
    return struct.unpack_from("i", fcntl.ioctl(descriptor, _GET_FLAGS, bytes(_LONG)))[0]


def _mark(name: str, folder: int, on: bool) -> None:
    descriptor = _open(name, folder)
    try:
        flags = _flags(descriptor)
        wanted = flags | _APPEND_ONLY if on else flags & ~_APPEND_ONLY
        fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("i", wanted).ljust(_LONG, b"\0"))
    finally:
        os.close(descriptor)
