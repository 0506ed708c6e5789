"""Batches that steps read from a file, which the kernel has in memory (warm) or not (cold)."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from carme_runtime.compare.errors import CompareError

if TYPE_CHECKING:
    import numpy as np

#: Where steps take their batches from.
MEMORY, WARM, COLD = "memory", "warm", "cold"
INPUTS = (MEMORY, WARM, COLD)
_FORGETTING = 5.0  # seconds, in which the kernel lets a file go from memory that it can let go
_PIECE = 1 << 20  # bytes


class Batches(Protocol):
    """The batches of a rank by their number: an array, or what reads one."""

    def __getitem__(self, number: int, /) -> np.ndarray:
        """The batch of this number."""
        ...


class Stored:
    """Batches in a file that nobody else sees; it is gone when this process ends.

    Args:
        values: (batches, samples, ...).
        folder: Where the file lies, on the disk that is measured.
        is_cold: Whether each step reads the file from that disk, or from the kernel's memory.

    Raises:
        CompareError: The file system keeps its files in memory, so none can be read cold.
    """

    def __init__(self, values: np.ndarray, folder: Path, is_cold: bool) -> None:
        self._shape, self._kind, self._is_cold = values.shape[1:], values.dtype, is_cold
        self._size, self._folder = values.nbytes, folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this)
        try:
            for batch in values:
                self._write(memoryview(batch.tobytes()))
            os.fsync(self._file.fileno())  # what is not on the disk yet cannot leave the memory
            self.before_step()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int, /) -> np.ndarray:
        """Read a batch."""
        import numpy as np

        values = np.empty(self._shape, self._kind)
        rest, place = values.reshape(-1).data.cast("B"), number * values.nbytes
        while rest:
            count = os.preadv(self._file.fileno(), [rest], place)
            if not count:
                raise CompareError(f"A file of the comparison in {self._folder} became shorter.")
            rest, place = rest[count:], place + count
        return values

    def before_turn(self) -> None:
        """Have the kernel read all of it, unless steps are to find it cold."""
        if not self._is_cold:
            piece = memoryview(bytearray(_PIECE))
            for place in range(0, self._size, _PIECE):
                os.preadv(self._file.fileno(), [piece], place)

    def before_step(self) -> None:
        """Have the kernel let go of all of it, if steps are to find it cold. Raises CompareError."""
        if not self._is_cold:
            return
        end = time.monotonic() + _FORGETTING
        while True:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not self.is_in_memory:
                return
            if time.monotonic() > end:
                raise CompareError(
                    f"The file system of {self._folder} keeps files in memory, so none can be read cold.",
                    "Choose a folder on a disk with --output, or use --input warm.",
                )

    @property
    def is_in_memory(self) -> bool:
        """Whether the kernel has any page of the file in memory."""
        pages = (ctypes.c_ubyte * -(-self._size // mmap.PAGESIZE))()
        with mmap.mmap(self._file.fileno(), self._size) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(first))
            del first  # a map that something points into cannot be closed
            if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(self._size), pages):
                return True  # nobody knows
        return any(page & 1 for page in bytes(pages))

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _write(self, rest: memoryview) -> None:
        while rest:
            rest = rest[self._file.write(rest) :]


def check_folder(folder: Path) -> None:
    """Raise CompareError where files in a folder cannot be read cold."""
    import numpy as np

    Stored(np.zeros((1, mmap.PAGESIZE), np.uint8), folder, is_cold=True).close()
