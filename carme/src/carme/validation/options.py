"""What the check of a site starts its session with, read from the site where nobody names it."""

from __future__ import annotations

from dataclasses import dataclass

from carme.config import Settings
from carme.errors import InvalidRequest
from carme.jobs import Access, Cluster, Node, Partition, usable
from carme.jobs.access import partition_refusal
from carme.wording import listing

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
class CheckOptions:
    """What was named when the check was started; None: as the site has it."""

    partition: str | None = None
    account: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a size that no session has."""
        if (self.nodes is not None and self.nodes < 1) or (self.gpus_per_node or 0) < 0:
            raise InvalidRequest(
                "A session has 1 node or more, and 0 GPUs or more on each of them.",
                "Name such numbers as --nodes and --gpus, or leave these out.",
            )


def session_size(wanted: CheckOptions, cluster: Cluster, access: Access, settings: Settings) -> SessionSize:
    """The session for a check as this user.

    The partition is the site's default one, else Slurm's, else the first that takes the user's jobs and has
    a node at work. The account is the site's where the user may use it, else the user's own. Nodes that power
    saving has switched off take minutes to start: they count where no other one is at work.

    Raises:
        InvalidRequest: No partition with a node at work takes the user's jobs, or not the one that is named.
    """
    accounts = (
        [wanted.account] if wanted.account else [settings.slurm.default_account, *access.accounts, None]
    )
    refusals: list[InvalidRequest] = []
    idle: InvalidRequest | None = None
    for partition in _candidates(wanted, cluster, access, settings):
        available = [node for node in cluster.members(partition.name) if node.available]
        at_work = [node for node in available if node.is_switched_on] or available
        tried = [(each, partition_refusal(partition, access, each, None)) for each in accounts]
        # Where none is taken, the last one's refusal: it is that of the user's own default account.
        account, refusal = next((pair for pair in tried if pair[1] is None), tried[-1])
        if (why := _idle(partition, at_work)) is not None:
            idle = why
            continue
        if refusal is not None:
            refusals.append(refusal)
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
    if refusals:
        raise refusals[0]
    if idle is not None and wanted.partition:
        raise idle
    at_work = " that has a node at work" if idle is not None else ""
    raise InvalidRequest(f"No partition{at_work} takes jobs of {access.user}.", _REMEDY)


_REMEDY = "'sinfo' and 'sacctmgr show user NAME withassoc' say what there is; name --partition and --account."


def _idle(partition: Partition, at_work: list[Node]) -> InvalidRequest | None:
    """Why a partition starts nobody's jobs now; None: it does."""
    if partition.state != "UP":
        return InvalidRequest(
            f"The partition {partition.name!r} starts no jobs: its state is {partition.state}.", _REMEDY
        )
    if not at_work:
        return InvalidRequest(f"The partition {partition.name!r} has no node at work.", _REMEDY)
    return None


def _candidates(
    wanted: CheckOptions, cluster: Cluster, access: Access, settings: Settings
) -> list[Partition]:
    if wanted.partition:
        named = [partition for partition in cluster.partitions if partition.name == wanted.partition]
        if not named:
            names = [partition.name for partition in cluster.partitions if not partition.hidden]
            raise InvalidRequest(
                f"There is no partition {wanted.partition!r}; there are: {listing(names)}.", _REMEDY
            )
        return named
    site = settings.slurm.default_partition
    found = usable(cluster, access, [settings.slurm.default_account or ""]).partitions
    return sorted(found, key=lambda each: (each.name != site, not each.default))
