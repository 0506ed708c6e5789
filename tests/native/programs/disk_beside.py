"""Reads and writes of a file past the page cache that nothing waits for but the end of a step.

What is read comes to pages that the kernel gives anew, as those of a block that had left memory.
"""

import ctypes
import mmap
import threading
from pathlib import Path

from carme_runtime.out_of_core import pages
from carme_runtime.out_of_core.spill import PIECE, SpillFile

_THREADS = 4  # as many as move blocks
_REGION = 1 << 30  # bytes of the file that the transfers go around in


class DiskBeside:
    """Moves so many bytes in each step, as threads of a memory limit would if they never waited.

    Args:
        folder: Where the file lies.
        block: Bytes of a block, which several system calls move where it is large.
        read: Bytes that a step reads.
        written: Bytes that a step writes.
    """

    def __init__(self, folder: Path, block: int, read: int, written: int) -> None:
        self._file = SpillFile(folder)
        self._piece = piece = min(block, PIECE)
        reads, writes = -(-read // piece), -(-written // piece)
        # Writes are spread evenly over the step.
        moments = [((i + 0.5) / reads, False) for i in range(reads)]
        moments += [((i + 0.5) / writes, True) for i in range(writes)]
        self._kinds = [is_write for _, is_write in sorted(moments)]
        self._pieces = max(min(_REGION, max(read, written)) // piece, _THREADS)
        self._begin = self._file.take(self._pieces * piece)
        self._buffers = [mmap.mmap(-1, piece) for _ in range(_THREADS)]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self._buffers]
        for buffer in self._buffers:
            buffer.write(b"\xa5" * piece)
        # What was never written is read without the disk.
        for place in range(self._pieces):
            self._file.write(self._addresses[0], piece, self._begin + place * piece)
        self._threads: list[threading.Thread] = []
        self._failures: list[OSError] = []

    def start(self) -> None:
        """Begin the transfers of a step."""
        self._threads = [threading.Thread(target=self._move, args=(number,)) for number in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait until all of them have ended.

        Raises:
            OSError: One failed.
        """
        for thread in self._threads:
            thread.join()
        for failure in self._failures:
            raise failure

    def _move(self, number: int) -> None:
        try:
            address = self._addresses[number]
            for index in range(number, len(self._kinds), _THREADS):
                offset = self._begin + index % self._pieces * self._piece
                if self._kinds[index]:
                    self._file.write(address, self._piece, offset)
                    continue
                pages.drop(address, self._piece)
                pages.open_again(address, self._piece)
                self._file.read(address, self._piece, offset)
        except OSError as error:
            self._failures.append(error)
