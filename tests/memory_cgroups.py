"""Memory cgroups without swap, of version 1 or 2: the kernel ends what takes more."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import new_cgroup


class MemoryCgroup:
    """A child of the cgroup of the tests."""

    def __init__(self, folder: Path, is_v2: bool) -> None:
        self.folder, self._is_v2 = folder, is_v2

    def limit(self, size: int, *, swaps: bool = False) -> None:
        """Limit it to `size` bytes; with `swaps` the rest goes to the machine's swap, if it has any."""
        if swaps:
            (self.folder / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(str(size))
            return
        names = ("memory.max",) if self._is_v2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # where the kernel does not count swap
                (self.folder / name).write_text(str(size))
        swap = ("memory.swap.max", "0") if self._is_v2 else ("memory.swappiness", "0")
        with contextlib.suppress(OSError):
            (self.folder / swap[0]).write_text(swap[1])

    def enter(self) -> None:
        """Join the group; to be called at the beginning of a child process."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        name = "memory.peak" if self._is_v2 else "memory.max_usage_in_bytes"
        return int((self.folder / name).read_text())


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A new memory cgroup.

    Raises:
        OSError: The machine allows none.
    """
    with new_cgroup("memory", "memory.max") as (folder, is_v2):
        yield MemoryCgroup(folder, is_v2)


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    """A new memory cgroup; skips the test if the machine allows none."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_cgroup())
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        yield group
