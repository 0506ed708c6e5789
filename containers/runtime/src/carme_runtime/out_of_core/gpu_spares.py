"""Pinned memory of the host that has no block any more, and waits for one of the same size."""

from typing import Generic, TypeVar

Memory = TypeVar("Memory")
Event = TypeVar("Event")


class Spares(Generic[Memory, Event]):
    """Memory by its size. What a whole step did not need is let go, so that varying shapes do not pile it up.

    A step that goes as the last one went finds in it what the last one left. PyTorch's allocator of pinned
    memory takes what is let go when the copies from it are over, and rounds sizes up, so that other sizes
    find it there: its memory has a bound, which that of spares of every size has not.
    """

    def __init__(self) -> None:
        # With what must pass before it is written.
        self._of_size: dict[int, list[tuple[Memory, Event | None]]] = {}
        self._fewest: dict[int, int] = {}  # that there were of a size at a time since the step began
        self.bytes = 0

    def add(self, size: int, memory: Memory, over: Event | None) -> None:
        """Memory that nobody uses when `over` has passed.

        Args:
            size: Bytes.
            memory: They.
            over: The last copy from it; None when there was none.
        """
        self._fewest.setdefault(size, 0)
        self._of_size.setdefault(size, []).append((memory, over))
        self.bytes += size

    def take(self, size: int) -> tuple[Memory, Event | None] | None:
        """Memory of so many bytes, and what must pass before it is written; None when there is none."""
        waiting = self._of_size.get(size)
        if not waiting:
            return None
        taken = waiting.pop()
        self._fewest[size] = min(self._fewest[size], len(waiting))
        self.bytes -= size
        return taken

    def end_step(self) -> None:
        """Let go what has been here since the step began."""
        for size, waiting in list(self._of_size.items()):
            unneeded = self._fewest[size]
            del waiting[:unneeded]  # the last ones are those that are taken
            self.bytes -= unneeded * size
            self._fewest[size] = len(waiting)
            if not waiting:
                del self._of_size[size], self._fewest[size]

    def clear(self) -> None:
        """Let everything go."""
        self._of_size.clear()
        self._fewest.clear()
        self.bytes = 0
