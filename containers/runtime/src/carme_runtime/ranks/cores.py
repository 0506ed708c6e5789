"""The cores of a node in an order in which neighbours share most."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")


def in_order(cores: Iterable[int], system: Path = SYSTEM) -> list[int]:
    """By NUMA node, socket and physical core: a part of the list has its memory near, and cores for itself.

    Linux may number the second threads of all cores after the first ones, and sockets in turns.
    """

    def place(core: int) -> tuple[int, int, int, int]:
        topology = system / f"cpu{core}" / "topology"
        return (
            min(numa_nodes([core], system), default=0),
            _number(topology / "physical_package_id"),
            _number(topology / "core_id"),
            core,
        )

    return sorted(cores, key=place)


def numa_nodes(cores: Iterable[int], system: Path = SYSTEM) -> set[int]:
    """The NUMA nodes of `cores`; none where the kernel does not report."""
    return {int(path.name[4:]) for core in cores for path in (system / f"cpu{core}").glob("node[0-9]*")}


def _number(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
