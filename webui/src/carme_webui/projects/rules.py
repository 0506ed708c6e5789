"""What a project's limits forbid a session or a job, checked before Slurm lets it wait for ever."""

from django.utils.translation import gettext as _

from carme.errors import CarmeError, InvalidRequest
from carme.jobs import JobRequest, SessionOptions, minutes_text
from carme.translation import message
from carme.wording import listing, number
from carme_webui.cluster import cluster_cache
from carme_webui.projects.models import Project

__all__ = ["check_project", "refused_partitions", "refused_words"]


def check_project(request: SessionOptions | JobRequest, project: Project, partition: str) -> None:
    """See that a project may ever run this.

    Raises:
        InvalidRequest: With the field, what the project allows.
    """
    name, gpus = project.name, request.nodes * request.gpus_per_node

    if project.partitions and partition not in project.partitions:
        raise InvalidRequest(
            message(
                "The project {project!r} may use {partitions}, not {partition!r}.",
                project=name,
                partitions=listing(project.partitions),
                partition=partition,
            ),
            message("Choose one of its partitions, or choose another project."),
            field="partition",
        )
    if project.minutes and request.minutes > project.minutes:
        raise InvalidRequest(
            message(
                "In the project {project!r} a job may run for {minutes} at most.",
                project=name,
                minutes=minutes_text(project.minutes),
            ),
            message("Ask for less time, or choose another project."),
            field="minutes",
        )
    if project.nodes is not None and request.nodes > project.nodes:
        raise InvalidRequest(
            message(
                "The project {project!r} may use {nodes} at a time.",
                project=name,
                nodes=number(project.nodes, "node"),
            ),
            message("Ask for fewer, or choose another project."),
            field="nodes",
        )
    if gpus:
        _check_gpus(request.gpu_type, gpus, project)


def _check_gpus(gpu_type: str | None, gpus: int, project: Project) -> None:
    """See that a project may ever use these GPUs."""
    name = project.name
    most = project.gpu_types.get(gpu_type) if gpu_type else None
    if most is not None and gpus > most:
        raise InvalidRequest(
            message(
                "The project {project!r} may use {gpus} of type {gpu_type} at a time.",
                project=name,
                gpus=number(most, "GPU"),
                gpu_type=gpu_type,
            ),
            message("Ask for fewer, or another type, or choose another project."),
            field="gpu_type",
        )
    if project.gpu_types and not gpu_type:
        raise InvalidRequest(
            message(
                "The project {project!r} may not use all types of GPUs, so one must be named.", project=name
            ),
            message("Choose a type, or choose another project."),
            field="gpu_type",
        )
    if project.gpus is not None and gpus > project.gpus:
        raise InvalidRequest(
            message(
                "The project {project!r} may use {gpus} at a time; {wanted} were requested.",
                project=name,
                gpus=number(project.gpus, "GPU"),
                wanted=gpus,
            ),
            message("Ask for fewer, or choose another project."),
            field="gpus_per_node",
        )
    if project.gpu_hours is not None and project.use.gpu_hours >= project.gpu_hours:
        raise InvalidRequest(
            message(
                "The project {project!r} has used up its {hours}.",
                project=name,
                hours=number(project.gpu_hours, "GPU-hour"),
            ),
            message("Ask an administrator for more, or choose another project."),
            field="account",
        )


def refused_partitions(project: Project) -> list[str]:
    """The partitions that the project may use and in which Slurm lets no job of its account start."""
    try:
        return [] if project.closed else project.refused_by(cluster_cache.cluster())
    except CarmeError:
        return []


def refused_words(project: Project) -> str:
    """A sentence about them; empty without any."""
    names = refused_partitions(project)
    if not names:
        return ""
    return _(
        "These partitions do not take jobs of the account %(account)s: %(names)s. An administrator of Slurm "
        "can add it to their AllowAccounts."
    ) % {"account": project.account, "names": listing(names)}
