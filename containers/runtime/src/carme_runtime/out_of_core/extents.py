"""Which parts of the spill file are free."""

from bisect import bisect_left, insort


class Extents:
    """Gives out parts of a file and takes them back; what is free and adjacent becomes one part.

    Parts come from the first place that is large enough, so that the file stays short.
    """

    def __init__(self) -> None:
        self.size = 0  # of the file
        self._free: list[tuple[int, int]] = []  # offset and length, by offset

    def take(self, length: int) -> int | None:
        """The offset of a part of this length; None when the file must grow first, see `grow`."""
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (offset + length, free - length)
                return offset
        return None

    def shortage(self, length: int) -> int:
        """How many bytes the file must grow by for a part of this length that is not to be had now."""
        last = self._free[-1] if self._free else (0, 0)
        at_end = last[1] if sum(last) == self.size else 0
        return max(length - at_end, 0)

    def grow(self, length: int) -> None:
        """The file has this many bytes more."""
        self._insert(self.size, length)
        self.size += length

    def give(self, offset: int, length: int) -> None:
        """Take a part back."""
        self._insert(offset, length)

    @property
    def free(self) -> int:
        """Bytes that are free."""
        return sum(length for _, length in self._free)

    def _insert(self, offset: int, length: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            before = self._free.pop(index)
            offset, length = before[0], before[1] + length
        insort(self._free, (offset, length))
