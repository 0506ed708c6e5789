"""What GPI-2's own launcher passes to its ranks."""

from collections.abc import Sequence


def variables(rank: int, size: int, hosts: Sequence[str], machines: str) -> dict[str, str]:
    """What GPI-2 reads when it starts; `machines`: a file with the hosts of all ranks, one a line."""
    return {
        "GASPI_RANK": str(rank),
        "GASPI_NRANKS": str(size),
        "GASPI_SOCKET": str(hosts[:rank].count(hosts[rank])),
        "GASPI_MASTER": hosts[0],
        "GASPI_MFILE": machines,
    }
