"""The file that blocks are written to when memory is short.

It has no name: when the process ends, in whatever way, the kernel frees it. It is read and written past the
page cache, which would be memory again.
"""

import contextlib
import ctypes
import errno
import glob
import mmap
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.logs import log
from carme_runtime.out_of_core.extents import Extents
from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.profile import TRANSFER, record

ALIGNMENT = 4096  # bytes; of memory, offsets and lengths, for every disk and file system that we know
PIECE = 8 << 20  # bytes of one system call
_GROWTH = 64 << 20  # bytes
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_OF_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "beegfs", "ceph", "gpfs", "lustre", "virtiofs")
_PROBE = 16 << 20  # bytes that the measurement writes and reads, so often:
_PROBES = 3
_PROBE_SECONDS = 2.0  # after which a slow disk is known well enough
_SLOW = 50 << 20  # bytes in a second; less than an old hard disk has
_NAME = ".carme-spill-"
_MOUNTS = Path("/proc/self/mountinfo")


class SpillFile:
    """The file, and which parts of it are free.

    Args:
        folder: Where it lies.

    Raises:
        CarmeRuntimeError: The folder cannot be used; the text says why.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        _check(self.folder)
        self._file = _open_unnamed(self.folder)
        self._extents = Extents()
        self.write_rate = self.read_rate = 0.0  # bytes in a second

    @property
    def size(self) -> int:
        """Bytes that it takes from the disk."""
        return self._extents.size

    @property
    def used(self) -> int:
        """Bytes of it that are given out."""
        return self._extents.size - self._extents.free

    def take(self, length: int) -> int:
        """The offset of a part of this length, which the disk is sure to have.

        Raises:
            CarmeRuntimeError: The disk is full.
        """
        offset = self._extents.take(length)
        if offset is not None:
            return offset
        shortage = self._extents.shortage(length)
        for growth in (max(shortage, _GROWTH), shortage):
            try:
                os.posix_fallocate(self._file, self._extents.size, growth)
            except OSError as error:
                if growth == shortage:
                    raise self._no_room(error, shortage) from None
                continue
            self._extents.grow(growth)
            break
        offset = self._extents.take(length)
        assert offset is not None
        return offset

    def give(self, offset: int, length: int) -> None:
        """Take a part back."""
        self._extents.give(offset, length)

    def write(self, address: int, length: int, offset: int) -> None:
        """Write memory to the file. It may be called by several threads.

        Raises:
            OSError: As the kernel reports it.
        """
        began = time.perf_counter()
        self._move(os.pwritev, address, length, offset, "nothing could be written")
        record(TRANSFER, "spill", began, length)

    def read(self, address: int, length: int, offset: int) -> None:
        """Read memory from the file. It may be called by several threads.

        Raises:
            OSError: As the kernel reports it.
        """
        began = time.perf_counter()
        self._move(os.preadv, address, length, offset, "the file is shorter than it was")
        record(TRANSFER, "fetch", began, length)

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        address: int,
        length: int,
        offset: int,
        problem: str,
    ) -> None:
        """Have the kernel move all bytes, in as many calls as that takes; `problem`: why one moved none."""
        view = memoryview((ctypes.c_char * length).from_address(address))
        while length > 0:
            count = call(self._file, [view], offset)
            if count <= 0:
                raise OSError(errno.EIO, problem)
            view, offset, length = view[count:], offset + count, length - count

    def measure(self) -> None:
        """Find out how fast the disk is, in a part of the file that is free again afterwards."""
        offset = self.take(_PROBE)
        with mmap.mmap(-1, _PROBE) as memory:
            memory.write(b"\xa5" * _PROBE)
            place = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(place)
            try:
                self.write_rate = _rate(self.write, address, offset)
                self.read_rate = _rate(self.read, address, offset)
            except OSError as error:
                raise self.broken(error) from None
            finally:
                del place
        self.give(offset, _PROBE)
        if min(self.write_rate, self.read_rate) < _SLOW:
            log.warning(
                "The disk of the spill folder '%s' is slow: it takes %s/s and gives %s/s. Name a folder on a "
                "faster one, or each step waits for it.",
                self.folder,
                show_size(self.write_rate),
                show_size(self.read_rate),
            )

    def broken(self, error: OSError) -> CarmeRuntimeError:
        """What to say when the disk failed."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._no_room(error, PIECE)
        return CarmeRuntimeError(
            f"The spill folder '{self.folder}' failed: {os.strerror(error.errno or errno.EIO)}.",
            "What is in memory is unharmed, what is in that folder may be lost: go on from your last "
            "checkpoint, with another folder.",
        )

    def close(self) -> None:
        """Give the disk its room back."""
        os.close(self._file)

    def _no_room(self, error: OSError, more: int) -> CarmeRuntimeError:
        reason = "is over its quota" if error.errno == errno.EDQUOT else "is full"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            reason = f"gives no more room ({os.strerror(error.errno or errno.EIO)})"
        return CarmeRuntimeError(
            f"The disk of the spill folder '{self.folder}' {reason}: it holds "
            f"{show_size(self._extents.size)} of this process and {show_size(more)} more are needed.",
            "Free some room there, or name another folder.",
        )


def _rate(transfer: Callable[[int, int, int], None], address: int, offset: int) -> float:
    """Bytes in a second of a transfer to or from the file, whose part is written before it is read."""
    begin, moved = time.perf_counter(), 0
    for _ in range(_PROBES):
        for start in range(0, _PROBE, PIECE):
            transfer(address + start, PIECE, offset + start)
            moved += PIECE
        if time.perf_counter() - begin > _PROBE_SECONDS:
            break
    return moved / (time.perf_counter() - begin)


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise CarmeRuntimeError(
            f"The spill folder '{folder}' does not exist." if not folder.exists()
            else f"'{folder}' is not a folder.",
            "Name a folder on a local disk.",
        )  # fmt: skip
    if (kind := file_system(folder)) in _IN_MEMORY:
        raise CarmeRuntimeError(
            f"The spill folder '{folder}' is memory itself ({kind}), so nothing would be gained.",
            "Name a folder on a disk.",
        )
    if kind in _OF_NETWORKS or kind.startswith("fuse."):
        log.warning(
            "The spill folder '%s' is on a file system of the network (%s), which you share with others and "
            "which may be slow. Name a folder on a local disk.",
            folder,
            kind,
        )


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty when the kernel does not say.

    Of an overlay, as containers have them, that of the layer which is written to, as far as it can be seen.
    """
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, source = line.partition(" - ")
        if fields.split()[2] == number:
            kind, *rest = source.split(" ")  # what it is mounted from may be empty
            options = rest[-1] if rest else ""
            upper = re.search(r"(?:^|,)upperdir=([^,]+)", options) if kind == "overlay" else None
            below = Path(_plain(upper[1])) if upper else None
            return file_system(below) if below and _is_seen(below) and below != folder else kind
    return ""


def _is_seen(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # below one that is closed to this user
        return False


def _plain(path: str) -> str:
    """A path of the kernel's table, which has numbers in place of spaces and the like."""
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), path)


def _open_unnamed(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise _refused(folder, error) from None
    # A file system without unnamed files: the name is there for a moment only.
    _remove_names(folder)
    name = folder / f"{_NAME}{socket.gethostname()}-{secrets.token_hex(8)}"
    try:
        file = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        name.unlink(missing_ok=True)
        raise _refused(folder, error) from None
    name.unlink(missing_ok=True)  # another process may have removed it meanwhile
    return file


def _remove_names(folder: Path) -> None:
    """What processes of this user have left on this host that were killed in that moment.

    A living one keeps its open file. On another host it would lose it, where NFS lies below.
    """
    for left in folder.glob(f"{_NAME}{glob.escape(socket.gethostname())}-*"):
        with contextlib.suppress(OSError):  # gone
            if left.lstat().st_uid == os.geteuid():
                left.unlink()


def _refused(folder: Path, error: OSError) -> CarmeRuntimeError:
    if error.errno == errno.EINVAL:
        return CarmeRuntimeError(
            f"The file system of the spill folder '{folder}' cannot be read past the page cache (O_DIRECT).",
            "Name a folder on a local disk.",
        )
    return CarmeRuntimeError(
        f"The spill folder '{folder}' cannot be written: {os.strerror(error.errno or errno.EIO)}.",
        "Name a folder that you may write to.",
    )
