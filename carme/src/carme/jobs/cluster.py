"""One look at the whole cluster."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Partition(_FrozenModel):
    """A queue of the cluster; `max_minutes` is None without a limit.

    `groups`, `accounts`, `qos`: whose jobs it takes, of Unix groups, of accounts, and with which quality of
    service; empty: everybody's. `refused_accounts`, `refused_qos`: whose it does not take.
    `hidden`: Slurm shows it only to requests for all of them.
    `suspends`: Slurm itself suspends jobs in it in favour of others.
    """

    name: str
    state: str = "UP"
    default: bool = False
    max_minutes: int | None = None
    node_names: list[str] = []
    groups: list[str] = []
    accounts: list[str] = []
    refused_accounts: list[str] = []
    qos: list[str] = []
    refused_qos: list[str] = []
    hidden: bool = False
    suspends: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether it names whose jobs it takes."""
        return bool(self.groups or self.accounts or self.qos)

    def refuses_account(self, account: str) -> bool:
        """Whether it takes no jobs of an account. Slurm does not look at refusals where it has a list."""
        return account not in self.accounts if self.accounts else account in self.refused_accounts

    def refuses_qos(self, qos: str) -> bool:
        """Whether it takes no jobs with a quality of service."""
        return qos not in self.qos if self.qos else qos in self.refused_qos


#: Flags of a node that power saving has switched off, or is switching (sinfo(1)).
_SWITCHED = {"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"}


class Node(_FrozenModel):
    """A compute node. Memory in MiB; GPUs by type (`gpu` where Slurm knows no type).

    `address`: where Slurm reaches it, if not at its name (NodeAddr). The broker keeps it to itself.
    """

    name: str
    address: str = Field(default="", exclude=True)
    state: str = "IDLE"
    cpus: int
    cpus_used: int = 0
    memory_mb: int
    memory_used_mb: int = 0
    gpus: dict[str, int] = {}
    gpus_used: dict[str, int] = {}
    available: bool = True
    reason: str = ""
    features: list[str] = []

    @property
    def is_switched_on(self) -> bool:
        """Whether it is on. One that power saving has switched off may be available all the same."""
        return _SWITCHED.isdisjoint(self.state.split("+"))


class Cluster(_FrozenModel):
    """All partitions and nodes, and when Slurm reported them (UTC)."""

    taken: datetime
    partitions: list[Partition] = []
    nodes: list[Node] = []

    def members(self, partitions: str) -> list[Node]:
        """The nodes of these partitions, whose names are joined by commas."""
        requested = set(partitions.split(","))
        names = {
            name
            for partition in self.partitions
            if partition.name in requested
            for name in partition.node_names
        }
        return [node for node in self.nodes if node.name in names]

    def limited_to(self, partitions: list[Partition]) -> "Cluster":
        """The cluster with these of its partitions and their nodes alone; itself where these are all."""
        if len(partitions) == len(self.partitions):
            return self
        names = {name for partition in partitions for name in partition.node_names}
        nodes = [node for node in self.nodes if node.name in names]
        return self.model_copy(update={"partitions": partitions, "nodes": nodes})


class Licence(_FrozenModel):
    """So many places of a licence that Slurm hands out."""

    name: str
    total: int
    used: int = 0
    reserved: int = 0


class Reservation(_FrozenModel):
    """Nodes kept for somebody from `start` to `end` (UTC); processors and GPUs are over all of its nodes.

    `maintenance`: Slurm's flag MAINT is set.
    """

    name: str
    start: datetime
    end: datetime
    node_names: list[str] = []
    users: list[str] = []
    accounts: list[str] = []
    cpus: int = 0
    gpus: int = 0
    maintenance: bool = False
