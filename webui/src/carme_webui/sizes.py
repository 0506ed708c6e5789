"""Sizes in words: in units of 1024 bytes, as Slurm counts, with the decimal mark of the reader."""

from django.utils.formats import number_format

from carme import wording

__all__ = ["memory_words", "size_words"]


def size_words(count: float) -> str:
    """A number of bytes: `976.6 MiB`, `16 GiB`."""
    value, unit = wording.in_units(count)
    return f"{number_format(value, 0 if value == int(value) else 1)}\xa0{unit}"


def memory_words(mib: float) -> str:
    """An amount of memory in MiB: `512 MiB`, `62.5 GiB`."""
    return size_words(mib * (1 << 20))
