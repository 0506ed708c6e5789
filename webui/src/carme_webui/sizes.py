"""Sizes in words: in units of 1024 bytes, as Slurm counts, with the decimal mark of the reader."""

from django.utils.formats import number_format

from carme import wording

__all__ = ["gib", "memory_words", "size_words"]


def size_words(count: float) -> str:
    """A number of bytes: `976.6 MiB`, `16 GiB`."""
    number, unit = wording.size(count).split()
    return f"{_number(float(number))}\xa0{unit}"


def memory_words(mib: float) -> str:
    """An amount of memory in MiB: `512 MiB`, `62.5 GiB`."""
    return size_words(mib * (1 << 20))


def gib(mib: float) -> str:
    """The number of GiB in so many MiB, where the unit stands elsewhere: `62.5`."""
    return _number(mib / 1024)


def _number(value: float) -> str:
    rounded = round(value, 1)
    return number_format(rounded, 0 if rounded == int(rounded) else 1)
