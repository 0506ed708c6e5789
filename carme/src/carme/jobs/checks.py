"""Whether the cluster can ever give what a request asks for."""

from typing import NamedTuple

from carme.config import Settings
from carme.errors import InvalidRequest
from carme.images import ImageCatalogue
from carme.jobs.access import Access, check_limits, partition_refusal
from carme.jobs.cluster import Cluster, Node, Partition
from carme.jobs.requests import JobRequest, SessionOptions
from carme.jobs.times import minutes_text
from carme.scaling.predictions import check_efficiency
from carme.translation import message as _
from carme.wording import listing, number

# What a job without GPUs gets when it does not say.
CPUS_WITHOUT_GPU = 1
MEMORY_MB_WITHOUT_GPU = 2048


class Share(NamedTuple):
    """Processors and memory (MiB) on each node."""

    cpus: int
    memory_mb: int


def check(
    request: JobRequest | SessionOptions,
    cluster: Cluster,
    images: ImageCatalogue,
    settings: Settings,
    access: Access | None = None,
) -> None:
    """Refuse what can never start; what merely has to wait passes.

    Args:
        access: What Slurm lets the user use; None: that is not known.

    Raises:
        InvalidRequest: With the field, what is allowed, and what to ask for.
    """
    # A user's own image is checked where the job starts, as that user.
    if request.image is not None and request.image_file is None:
        images.get(request.image)
    partition = partition_of(request, cluster, settings)
    limit = settings.session_policy(partition.name).maximum_minutes
    if _is_session(request) and request.minutes > limit:
        what = _("A session in partition {partition_name!r}", partition_name=partition.name)
        own = settings.partitions.get(partition.name)
        raise _too_long(what if own and own.maximum_minutes else _("A session"), limit, request.minutes)
    check_access(request, partition, cluster, settings, access)
    if partition.max_minutes is not None and request.minutes > partition.max_minutes:
        raise _too_long(
            _("A job in partition {partition_name!r}", partition_name=partition.name),
            partition.max_minutes,
            request.minutes,
        )
    nodes = _nodes(partition, cluster)
    if request.nodes > len(nodes):
        raise InvalidRequest(
            _(
                "The partition {partition_name!r} has {nodes}; {nodes_2} were requested.",
                partition_name=partition.name,
                nodes=number(len(nodes), "node"),
                nodes_2=request.nodes,
            ),
            _("Ask for {range}.", range=_range(1, len(nodes))) if nodes else _("Choose another partition."),
            field="nodes",
        )
    _check_gpus(request, partition, nodes)
    _check_size(request, partition, _fitting(request, nodes))
    check_efficiency(request.prediction, settings)


def check_access(
    request: JobRequest | SessionOptions,
    partition: Partition,
    cluster: Cluster,
    settings: Settings,
    access: Access | None,
) -> None:
    """Refuse what Slurm would take, and let wait for ever: not this account, group or quality of service.

    Raises:
        InvalidRequest: With the field, and what the partition takes.
    """
    account = request.account or settings.slurm.default_account
    # Of who is not known, what the request itself names can be checked all the same.
    known = access or Access(user="")
    refused = partition_refusal(partition, known, account, request.qos, cluster.partitions)
    if refused is not None:
        raise refused
    check_limits(request, partition, known, account)


def share(request: JobRequest, cluster: Cluster, settings: Settings) -> Share:
    """What the request gets on each node.

    What it does not name follows from its share of the GPUs: half of a node's GPUs come with half of its
    processors and memory, on the smallest node that fits. Without GPUs it is one processor and 2 GiB.
    """
    nodes = _fitting(request, _nodes(partition_of(request, cluster, settings), cluster))
    if request.gpus_per_node == 0:
        cpus = CPUS_WITHOUT_GPU
        memory = min([MEMORY_MB_WITHOUT_GPU, *(node.memory_mb for node in nodes)])
    else:
        parts = [(node, request.gpus_per_node / sum(node.gpus.values())) for node in nodes]
        cpus = max(1, min(int(node.cpus * part) for node, part in parts))
        memory = max(1, min(int(node.memory_mb * part) for node, part in parts))
    return Share(request.cpus_per_node or cpus, request.memory_mb_per_node or memory)


def partition_of(request: JobRequest | SessionOptions, cluster: Cluster, settings: Settings) -> Partition:
    """The partition that the request names, else the site's default, else Slurm's."""
    known = {partition.name: partition for partition in cluster.partitions}
    name = request.partition or settings.slurm.default_partition
    if name is None:
        name = next((partition.name for partition in cluster.partitions if partition.default), "")
        if not name:
            raise InvalidRequest(
                _("The cluster has no default partition; there are: {known}.", known=listing(known)),
                _("Name one of these."),
                field="partition",
            )
    if name not in known:
        raise InvalidRequest(
            _("There is no partition {name!r}; there are: {known}.", name=name, known=listing(known)),
            _("Choose one of these.") if known else _("Ask an administrator whether Slurm runs."),
            field="partition",
        )
    return known[name]


def _is_session(request: JobRequest | SessionOptions) -> bool:
    return isinstance(request, SessionOptions) or request.kind == "session"


def _nodes(partition: Partition, cluster: Cluster) -> list[Node]:
    names = set(partition.node_names)
    return [node for node in cluster.nodes if node.name in names]


def _gpus(node: Node, kind: str | None) -> int:
    return node.gpus.get(kind, 0) if kind else sum(node.gpus.values())


def _fitting(request: JobRequest | SessionOptions, nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if _gpus(node, request.gpu_type) >= request.gpus_per_node]


def _check_gpus(request: JobRequest | SessionOptions, partition: Partition, nodes: list[Node]) -> None:
    kind, requested = request.gpu_type, request.gpus_per_node
    if kind is not None:
        _check_gpu_type(kind, requested, partition, nodes)
    if requested == 0:
        return
    most = max(_gpus(node, kind) for node in nodes)
    wanted = number(requested, "GPU")
    if kind:
        wanted = _("{count} of type {kind}", count=wanted, kind=kind)
    if most == 0:
        raise InvalidRequest(
            _(
                "The nodes of partition {partition_name!r} have no GPUs; {requested} were requested.",
                partition_name=partition.name,
                requested=requested,
            ),
            _("Ask for 0 GPUs, or choose another partition."),
            field="gpus_per_node",
        )
    if requested > most:
        raise InvalidRequest(
            _(
                "A node has at most {gpus} of type {kind}; {requested} were requested.",
                gpus=number(most, "GPU"),
                kind=kind,
                requested=requested,
            )
            if kind
            else _(
                "A node has at most {gpus}; {requested} were requested.",
                gpus=number(most, "GPU"),
                requested=requested,
            ),
            _("Ask for {range}.", range=_range(1, most)),
            field="gpus_per_node",
        )
    fitting = len(_fitting(request, nodes))
    if request.nodes > fitting:
        raise InvalidRequest(
            _(
                "The partition {partition!r} has {nodes} with {gpus}; {wanted} were requested.",
                partition=partition.name,
                nodes=number(fitting, "node"),
                gpus=wanted,
                wanted=request.nodes,
            ),
            _("Ask for {range}, or for fewer GPUs on each.", range=_range(1, fitting)),
            field="nodes",
        )


def _check_gpu_type(kind: str, requested: int, partition: Partition, nodes: list[Node]) -> None:
    kinds = sorted({kind for node in nodes for kind in node.gpus})
    if kind not in kinds:
        raise InvalidRequest(
            _(
                "The partition {partition_name!r} has no GPUs of type {kind}; its types are: {kinds}.",
                partition_name=partition.name,
                kind=kind,
                kinds=listing(kinds),
            ),
            _("Choose one of these, or leave the type open.") if kinds else _("Leave the GPU type open."),
            field="gpu_type",
        )
    if requested == 0:
        raise InvalidRequest(
            _("You chose the GPU type {kind} but requested no GPU.", kind=kind),
            _("Ask for at least 1 GPU, or leave the type open."),
            field="gpus_per_node",
        )


def _check_size(request: JobRequest | SessionOptions, partition: Partition, nodes: list[Node]) -> None:
    cpus, memory = request.cpus_per_node or 0, request.memory_mb_per_node or 0
    most_cpus = max(node.cpus for node in nodes)
    if cpus > most_cpus:
        raise InvalidRequest(
            _(
                "A node of partition {partition_name!r} has at most {processors}; {cpus} were requested.",
                partition_name=partition.name,
                processors=number(most_cpus, "processor"),
                cpus=cpus,
            ),
            _("Ask for {range}.", range=_range(1, most_cpus)),
            field="cpus_per_node",
        )
    most_memory = max(node.memory_mb for node in nodes)
    if memory > most_memory:
        raise InvalidRequest(
            _(
                "A node of partition {partition_name!r} has at most {most_memory} MiB of memory; "
                "{memory} MiB were requested.",
                partition_name=partition.name,
                most_memory=most_memory,
                memory=memory,
            ),
            _("Ask for at most {most_memory} MiB.", most_memory=most_memory),
            field="memory_mb_per_node",
        )
    fitting = sum(node.cpus >= cpus and node.memory_mb >= memory for node in nodes)
    if request.nodes > fitting:
        raise InvalidRequest(
            _(
                "The partition {partition_name!r} has {nodes} with so many GPUs, processors and so much "
                "memory; {nodes_2} were requested.",
                partition_name=partition.name,
                nodes=number(fitting, "node"),
                nodes_2=request.nodes,
            ),
            _("Ask for fewer nodes, or for less on each."),
            field="nodes",
        )


def _too_long(what: str, limit: int, requested: int) -> InvalidRequest:
    return InvalidRequest(
        _(
            "{what} lasts at most {limit}, not {asked}.",
            what=what,
            limit=minutes_text(limit),
            asked=minutes_text(requested),
        ),
        _("Ask for at most {limit}.", limit=minutes_text(limit)),
        field="minutes",
    )


def _range(least: int, most: int) -> str:
    return _("{least} to {most}", least=least, most=most) if most > least else str(least)
