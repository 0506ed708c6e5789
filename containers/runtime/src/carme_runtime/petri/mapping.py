"""Files of ranges mapped into this process, and let go of."""

import contextlib
import fcntl
import mmap
import os
import sys
from typing import Any

from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.range_files import Description


def bytes_for(description: Description, content: Any) -> memoryview:
    """The bytes of what a range is to hold. Raises PetriError where they are not as many."""
    numpy = sys.modules.get("numpy")  # else it is not an array of its
    try:
        if numpy and isinstance(content, numpy.ndarray) and content.flags.c_contiguous:
            content = content.reshape(-1).view("u1")  # buffers do not know all of NumPy's types
        data = memoryview(content).cast("B")
    except (TypeError, ValueError):
        raise PetriError(
            f"The content of range {description.name} does not lie in one piece.", "Give a copy of it."
        ) from None
    if len(data) != description.size:
        raise PetriError(
            f"The content of range {description.name} has {len(data)} bytes, and it is to hold "
            f"{description.size}.",
            "Give its shape and type.",
        )
    return data


def unlock_in(file: int, process: int) -> None:
    """Let others delete or move a range whose last array is gone; what was forked meanwhile must not."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def identity_of(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def unmap(mappings: list[mmap.mmap]) -> None:
    """End mappings, unless somebody still has arrays of them."""
    while mappings:
        with contextlib.suppress(BufferError):
            mappings.pop().close()
