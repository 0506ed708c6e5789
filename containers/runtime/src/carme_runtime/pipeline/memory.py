"""How much memory each rank of a job may take."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from carme_runtime.out_of_core import pages

_CGROUPS, _OWN, _HOST = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
# What is left free for what grows after the look: other processes of the job, and libraries.
_MARGIN, _LEAST_MARGIN = 0.05, 32 << 20


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
    limits = [limit for limit, _ in _groups(cgroups, own)]
    limits += [*_limits_of_slurm(environment), *_of_host(host, "MemTotal:")]
    return min(limits) // _ranks(environment) if limits else None


def free_memory_of_rank(
    held: int = 0,
    environment: Mapping[str, str] = os.environ,
    cgroups: Path = _CGROUPS,
    own: Path = _OWN,
    host: Path = _HOST,
) -> int | None:
    """Bytes that each rank on this node may use for a stage.

    What all processes of the job take already is subtracted, such as a session's server and kernel, and a
    margin. A limit that only Slurm's variables name says nothing of others: this process alone is subtracted.

    Args:
        held: Bytes of this process that the stage replaces: the whole model's.
        environment: See `memory_of_rank`, as the following ones.
        cgroups: The same.
        own: The same.
        host: The same.

    Returns:
        At least 1; None where nothing says it.
    """
    ranks = _ranks(environment)
    free = [(limit - used) // ranks + held for limit, used in _groups(cgroups, own)]
    free += [available // ranks + held for available in _of_host(host, "MemAvailable:")]
    taken = max(pages.resident() - held, 0)
    free += [limit // ranks - taken for limit in _limits_of_slurm(environment)]
    if not free:
        return None
    least = min(free)
    return max(least - max(int(_MARGIN * least), _LEAST_MARGIN), 1)


def _ranks(environment: Mapping[str, str]) -> int:
    return max(int(environment.get("LOCAL_WORLD_SIZE", "1")), 1)


def _groups(cgroups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of the process's control group and those around it, in version 1 and 2."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                root, names = cgroups, ("memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                continue
            group = _mounted(root, PurePosixPath(path))
            for folder in [group, *group.parents]:
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    yield int((folder / names[0]).read_text()), _used(folder, *names[1:])
                if folder == root:
                    break


def _mounted(root: Path, path: PurePosixPath) -> Path:
    """Where a group is mounted: in a container its path may be the host's, and the mount a part of it."""
    parts = path.parts[1:]
    begin = next((place for place, part in enumerate(parts) if (root / part).is_dir()), len(parts))
    return root.joinpath(*parts[begin:])


def _used(folder: Path, name: str, prefix: str) -> int:
    """Bytes that a group takes, without copies of files that no process has mapped: those go on request."""
    try:
        used = int((folder / name).read_text())
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        content = {words[0].removeprefix(prefix): int(words[1]) for words in lines if len(words) == 2}
    except (OSError, ValueError):
        return 0
    if prefix:  # version 1 names each figure twice, and those of groups within the group have the prefix
        content["file_mapped"] = content.get("mapped_file", 0)
    files = content.get("active_file", 0) + content.get("inactive_file", 0)
    # Shared memory that is mapped counts as mapped files, too, and nothing says how much: as if it were none.
    mapped = min(content.get("file_mapped", 0), files)
    return max(used - (files - mapped), 0)


def _limits_of_slurm(environment: Mapping[str, str]) -> Iterator[int]:
    with contextlib.suppress(KeyError, ValueError):
        if node := int(environment["SLURM_MEM_PER_NODE"]):
            yield node << 20
    with contextlib.suppress(KeyError, ValueError):
        yield int(environment["SLURM_MEM_PER_CPU"]) * int(environment["SLURM_CPUS_ON_NODE"]) << 20


def _of_host(host: Path, name: str) -> Iterator[int]:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        line = next(line for line in host.read_text().splitlines() if line.startswith(name))
        yield int(line.split()[1]) << 10
