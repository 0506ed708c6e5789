"""What ranks compare of a buffer besides its size and the core's type: its shape, as the caller sees it."""

import zlib
from functools import lru_cache

_LONGEST = 48  # characters: the core compares 64 bytes of a label


@lru_cache(maxsize=4096)
def shape(dimensions: tuple[int, ...]) -> str:
    """A shape as a word of a label. Empty where the number of elements says all.

    Dimensions of length 1 do not count: a number and a vector of one element are alike.
    """
    long = [length for length in dimensions if length != 1]
    return short(str(long)) if len(long) > 1 else ""


def combined(parts: list[str]) -> str:
    """The forms of several buffers as one."""
    return parts[0] if len(set(parts)) == 1 else short(" ".join(part or "-" for part in parts))


def short(text: str) -> str:
    """The text itself, or its beginning and a number that stands for all of it."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 12]}...#{zlib.crc32(text.encode()):08x}"


@lru_cache(maxsize=4096)
def row(dimensions: tuple[int, ...]) -> str:
    """The shape of one row of a tensor whose first dimension is of no matter."""
    return short(str([length for length in dimensions[1:] if length != 1]))
