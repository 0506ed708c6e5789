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
        folder = system / f"cpu{core}"
        nodes = [int(path.name[4:]) for path in folder.glob("node[0-9]*")]
        topology = folder / "topology"
        return (
            min(nodes, default=0),
            _number(topology / "physical_package_id"),
            _number(topology / "core_id"),
            core,
        )

    return sorted(cores, key=place)


def _number(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return 0
