"""What the check of a site starts its session with, read from the site where nobody names it."""

from __future__ import annotations

from dataclasses import dataclass

from carme.config import Settings
from carme.errors import InvalidRequest
from carme.jobs import Access, Cluster, Partition, usable
from carme.jobs.access import partition_refusal

#: Nodes of the session, and GPUs on each of them, where the site has as many.
NODES, GPUS = 2, 2


@dataclass(frozen=True)
class SessionSize:
    """Where the session runs, who pays, and how large it is; an account of None leaves that to Slurm."""

    partition: str
    account: str | None
    nodes: int
    gpus_per_node: int


@dataclass(frozen=True)
class Wanted:
    """What whoever starts the check has named; None: as the site has it."""

    partition: str | None = None
    account: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None


def session_size(wanted: Wanted, cluster: Cluster, access: Access, settings: Settings) -> SessionSize:
    """The session for a check as this user.

    The partition is the site's default one, else Slurm's, else the first that takes the user's jobs and has
    a node at work. The account is the site's where the user may use it, else the user's own.

    Raises:
        InvalidRequest: No partition with a node at work takes the user's jobs, or not the one that is named.
    """
    accounts = (
        [wanted.account] if wanted.account else [settings.slurm.default_account, *access.accounts, None]
    )
    for partition in _candidates(wanted, cluster, access, settings):
        at_work = [node for node in cluster.members(partition.name) if node.available]
        account = next(
            (one for one in accounts if partition_refusal(partition, access, one, None) is None), _NONE
        )
        if account == _NONE or not at_work or partition.state != "UP":
            continue
        # Nodes with most GPUs come first: a partition may have some without.
        sizes = sorted((sum(node.gpus.values()) for node in at_work), reverse=True)
        nodes = wanted.nodes or min(NODES, len(sizes))
        gpus = min(GPUS, *sizes[:nodes], sizes[0])
        return SessionSize(
            partition.name,
            account or None,
            nodes,
            gpus if wanted.gpus_per_node is None else wanted.gpus_per_node,
        )
    which = f"The partition {wanted.partition}" if wanted.partition else "No partition"
    does = "does not take" if wanted.partition else "takes"
    payer = f" in the account {wanted.account}" if wanted.account else ""
    raise InvalidRequest(
        f"{which} {does} jobs of {access.user}{payer} and has a node at work.",
        "'sinfo' and 'sacctmgr show user NAME withassoc' say what there is; name --partition and --account.",
    )


#: Stands for no account at all, as None leaves the account to Slurm.
_NONE = "\0"


def _candidates(wanted: Wanted, cluster: Cluster, access: Access, settings: Settings) -> list[Partition]:
    if wanted.partition:
        return [one for one in cluster.partitions if one.name == wanted.partition]
    site = settings.slurm.default_partition
    found = usable(cluster, access, [settings.slurm.default_account or ""]).partitions
    return sorted(found, key=lambda one: (one.name != site, not one.default))
