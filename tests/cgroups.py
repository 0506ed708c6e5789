"""Cgroups of version 1 or 2 for processes of tests and benchmarks."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
TIDY_SECONDS = 60
#: In which a process gets its part of a core: the kernel counts in ticks of 4 ms.
PERIOD_US = 10_000


@contextlib.contextmanager
def new_cgroup(controller: str, file_of_v2: str) -> Iterator[tuple[Path, bool]]:
    """A child of the cgroup of this process: its folder, and whether it is of version 2.

    Args:
        controller: What it limits.
        file_of_v2: A file that it has in version 2, where this controller is delegated.

    Raises:
        OSError: The machine allows none.
    """
    is_v2 = not (ROOT / controller).is_dir()
    mount = ROOT if is_v2 else ROOT / controller
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    wanted = "" if is_v2 else controller
    own = next((line.split(":", 2)[2] for line in lines if wanted in line.split(":")[1].split(",")), "/")
    parent = mount / own.strip("/")
    if not parent.is_dir():
        parent = mount
    folder = parent / f"carme-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    if is_v2 and not (folder / file_of_v2).exists():
        folder.rmdir()
        raise OSError(f"the {controller} controller is not delegated")
    try:
        yield folder, is_v2
    finally:
        end = time.monotonic() + TIDY_SECONDS
        while folder.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # its last process has just ended
                folder.rmdir()
            time.sleep(0.05)


@contextlib.contextmanager
def part_of_a_core(part: float) -> Iterator[Callable[[], None]]:
    """A cgroup whose processes together compute for this part of the time of one core.

    Yields:
        What a child process calls at its beginning, so that it belongs there.

    Raises:
        OSError: The machine allows none.
    """
    with new_cgroup("cpu", "cpu.max") as (folder, is_v2):
        quota = round(part * PERIOD_US)
        if is_v2:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        yield enter
