"""Memory cgroups without swap, of version 1 or 2: the kernel ends what takes more."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
TIDY_SECONDS = 60


class MemoryCgroup:
    """A child of the cgroup of the tests."""

    def __init__(self, folder: Path, is_v2: bool) -> None:
        self.folder, self._is_v2 = folder, is_v2

    def limit(self, size: int, *, swaps: bool = False) -> None:
        """Let it take `size` bytes; with `swaps` the rest goes to the machine's swap, if it has any."""
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
        """For the beginning of a child process."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        name = "memory.peak" if self._is_v2 else "memory.max_usage_in_bytes"
        return int((self.folder / name).read_text())


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """A new one.

    Raises:
        OSError: The machine allows none.
    """
    is_v2 = not V1.is_dir()
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    controller = "" if is_v2 else "memory"
    own = next((line.split(":", 2)[2] for line in lines if controller in line.split(":")[1].split(",")), "/")
    parent = (V2 if is_v2 else V1) / own.strip("/")
    if not parent.is_dir():
        parent = V2 if is_v2 else V1
    folder = parent / f"carme-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    if is_v2 and not (folder / "memory.max").exists():
        folder.rmdir()
        raise OSError("the memory controller is not delegated")
    try:
        yield MemoryCgroup(folder, is_v2)
    finally:
        end = time.monotonic() + TIDY_SECONDS
        while folder.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # its last process has just ended
                folder.rmdir()
            time.sleep(0.05)


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    """A new one; where the machine allows none the test is skipped."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(memory_cgroup())
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        yield made
