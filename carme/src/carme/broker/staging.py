"""Stage-in jobs, which copy another job's data before it begins, and the nodes that have it already."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from carme.config import Settings
from carme.errors import InvalidRequest
from carme.jobs import Cluster, Job, JobRequest, Share, Stage
from carme.launch.exits import DATA_LINE
from carme.launch.spec import StageSpec
from carme.slurm import Order, UnixAccount
from carme.translation import message as _

__all__ = [
    "booked_stage_in_order",
    "check_stages",
    "constraint",
    "data_features",
    "is_stage_in_of",
    "preference",
    "progress_line",
    "stage_in_order",
    "stage_specs",
]

STAGING_NAME = "stage-"
#: The feature of nodes on which a job can have a BeeOND; the prolog looks for it in what the job asks for.
BEEOND = "beeond"
#: What copying gets on each node: it mostly waits for disks and the network.
CPUS, MEMORY_MB = 2, 1024


def check_stages(request: JobRequest, settings: Settings) -> None:
    """Refuse what no node can do. Raises InvalidRequest."""
    if settings.staging.scratch is None and any(stage.target == "scratch" for stage in request.stage):
        raise InvalidRequest(
            _("This site has no scratch for staging."), _("Stage to 'local' or 'ram' instead."), field="stage"
        )
    if settings.staging.beeond is None and any(stage.target == "beeond" for stage in request.stage):
        raise InvalidRequest(
            _("This site has no BeeOND for staging."),
            _("Stage to 'local' or 'scratch' instead."),
            field="stage",
        )


def constraint(request: JobRequest) -> str:
    """The feature that nodes must have; they run this job alone, as it has all of their disk."""
    return BEEOND if any(stage.target == "beeond" for stage in request.stage) else ""


def stage_in_order(order: Order, owner: UnixAccount, cluster: Cluster, minutes: int) -> Order | None:
    """The job that brings the data of an order; None where the next one on some nodes finds it there already.

    Args:
        order: What is to run when the data is there.
        owner: Whose job it is.
        cluster: The nodes, with the copies that they have.
        minutes: The longest that copying may take, and that Slurm lets a job of the order's owner run.
    """
    stages = [stage for stage in order.request.stage if stage.is_ahead]
    if not stages:
        return None
    local = [stage for stage in stages if stage.target == "local"]
    wanted = {stage.feature(owner.uid) for stage in local}
    members = next(
        (partition.node_names for partition in cluster.partitions if partition.name == order.partition), []
    )
    staged = [
        node
        for node in cluster.nodes
        if node.name in members and node.available and wanted <= set(node.features)
    ]
    if len(local) == len(stages) and len(staged) >= order.request.nodes:
        return None
    nodes = order.request.nodes if local else 1
    return _data_only_order(order, f"{STAGING_NAME}{order.key[:12]}", stages, nodes, minutes, cluster)


def booked_stage_in_order(
    order: Order, node_names: Sequence[str], owner: UnixAccount, cluster: Cluster
) -> Order | None:
    """The job that brings data to nodes that are booked; None where all of them have it already.

    Args:
        order: What says which data, and how long it may take.
        node_names: The nodes.
        owner: Whose job it is.
        cluster: The nodes, with the copies that they have.
    """
    stages = [stage for stage in order.request.stage if stage.is_ahead]
    local = {stage.feature(owner.uid) for stage in stages if stage.target == "local"}
    staged = {node.name for node in cluster.nodes if local <= set(node.features)}
    if all(stage.target == "local" for stage in stages) and staged >= set(node_names):
        return None
    nodes = tuple(node_names) if local else ()
    staging_order = _data_only_order(
        order, order.request.name, stages, len(nodes) or 1, order.request.minutes, cluster
    )
    return replace(staging_order, node_names=nodes)


def _data_only_order(
    order: Order, name: str, stages: list[Stage], nodes: int, minutes: int, cluster: Cluster
) -> Order:
    """A job that brings data, and does nothing else; its partition, account and quality of service are those
    of the order."""
    members = next(
        (partition.node_names for partition in cluster.partitions if partition.name == order.partition), []
    )
    cpus = min([CPUS, *(node.cpus for node in cluster.nodes if node.name in members)])
    return replace(
        order,
        key=secrets.token_hex(16),
        constraint="",
        request=JobRequest(
            name=name,
            kind="batch",
            command=["-"],  # none: it ends when the data is there
            nodes=nodes,
            minutes=minutes,
            qos=order.request.qos,
            reservation=order.request.reservation,
        ),
        share=Share(cpus=cpus, memory_mb=MEMORY_MB),
        spec=order.spec._replace(
            kind="batch",
            image=None,
            command=[],
            nodes=nodes,
            cpus=cpus,
            gpus=0,
            gpu_type=None,
            stage=stage_specs(stages),
            results=None,
            array=False,
        ),
    )


def stage_specs(stages: Iterable[Stage]) -> list[StageSpec]:
    """What `carme-job` needs to know of what is copied."""
    return [StageSpec(stage.source, stage.target, stage.name, stage.version, stage.key) for stage in stages]


def preference(order: Order, owner: UnixAccount, cluster: Cluster) -> str:
    """The features of nodes that have the data, as far as any node has; empty when none does."""
    known = {feature for node in cluster.nodes for feature in node.features}
    return "&".join(feature for feature in data_features(order, owner) if feature in known)


def data_features(order: Order, owner: UnixAccount) -> list[str]:
    """The features of nodes that have all of the data."""
    return sorted({stage.feature(owner.uid) for stage in order.request.stage if stage.target == "local"})


def is_stage_in_of(stage_in: Job, job: Job) -> bool:
    """Whether a job brings the data of another one."""
    return (
        job.key is not None
        and stage_in.user == job.user
        and stage_in.key is not None
        and stage_in.name == f"{STAGING_NAME}{job.key[:12]}"
    )


def progress_line(log: str) -> str:
    """The last progress message about data in a log, without its prefix and without a full stop."""
    lines = [line for line in log.splitlines() if line.startswith(DATA_LINE)]
    words = lines[-1].removeprefix(DATA_LINE).partition(": ")[2] if lines else ""
    return "".join(letter for letter in words if letter.isprintable())[:120].rstrip(". ")
