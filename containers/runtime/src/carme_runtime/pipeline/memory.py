"""How much memory each rank of a job may take."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_CGROUPS, _OWN, _HOST = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")


def memory_of_rank(
    environment: Mapping[str, str] = os.environ,
    cgroups: Path = _CGROUPS,
    own: Path = _OWN,
    host: Path = _HOST,
) -> int | None:
    """Bytes for each rank on this node: of the job's limit, or the host's memory if that is less.

    Args:
        environment: Of the rank. Slurm and the launcher set what counts.
        cgroups: Where control groups are mounted.
        own: The file that names those of this process.
        host: The kernel's file of the host's memory.

    Returns:
        None where nothing says it.
    """
    limits = [*_limits_of_cgroups(cgroups, own), *_limits_of_slurm(environment), *_memory_of_host(host)]
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return min(limits) // max(ranks, 1) if limits else None


def _limits_of_cgroups(cgroups: Path, own: Path) -> Iterator[int]:
    """Of the process's control group and those around it, in version 1 and 2."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                root, name = cgroups, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = cgroups / "memory", "memory.limit_in_bytes"
            else:
                continue
            # In a container the path may be the host's; the limit is then at the mount itself.
            group = root / path.lstrip("/")
            for folder in [group, *group.parents]:
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    yield int((folder / name).read_text())
                if folder == root:
                    break


def _limits_of_slurm(environment: Mapping[str, str]) -> Iterator[int]:
    with contextlib.suppress(KeyError, ValueError):
        if node := int(environment["SLURM_MEM_PER_NODE"]):
            yield node << 20
    with contextlib.suppress(KeyError, ValueError):
        yield int(environment["SLURM_MEM_PER_CPU"]) * int(environment["SLURM_CPUS_ON_NODE"]) << 20


def _memory_of_host(host: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        line = next(line for line in host.read_text().splitlines() if line.startswith("MemTotal:"))
        yield int(line.split()[1]) << 10
