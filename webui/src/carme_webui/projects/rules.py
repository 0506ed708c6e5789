"""What a project's limits forbid a session or a job, said before Slurm lets it wait for ever."""

from django.utils.translation import gettext as _

from carme.errors import CarmeError, InvalidRequest
from carme.jobs import JobRequest, SessionOptions, minutes_text
from carme.wording import listing, number
from carme_webui.cluster import picture
from carme_webui.projects.models import Project

__all__ = ["check_project", "refused_partitions", "refused_words"]


def check_project(request: SessionOptions | JobRequest, project: Project, partition: str) -> None:
    """See that a project may ever run this.

    Raises:
        InvalidRequest: With the field, what the project allows.
    """
    name, gpus = project.name, request.nodes * request.gpus_per_node

    def refuse(field: str, sentence: str, remedy: str) -> None:
        raise InvalidRequest(f"{sentence}.", f"{remedy}, or choose another project.", field=field)

    if project.partitions and partition not in project.partitions:
        refuse(
            "partition",
            f"The project {name!r} may use {listing(project.partitions)}, not {partition!r}",
            "Choose one of its partitions",
        )
    if project.minutes and request.minutes > project.minutes:
        refuse(
            "minutes",
            f"In the project {name!r} a job may run for {minutes_text(project.minutes)} at most",
            "Ask for less time",
        )
    if project.nodes is not None and request.nodes > project.nodes:
        refuse(
            "nodes",
            f"The project {name!r} may use {number(project.nodes, 'node')} at a time",
            "Ask for fewer",
        )
    most = project.gpu_types.get(request.gpu_type) if request.gpu_type else None
    if gpus and most is not None and gpus > most:
        refuse(
            "gpu_type",
            f"The project {name!r} may use {number(most, 'GPU')} of type {request.gpu_type} at a time",
            "Ask for fewer, or another type",
        )
    if gpus and project.gpu_types and not request.gpu_type:
        refuse(
            "gpu_type",
            f"The project {name!r} may not use all types of GPUs, so one must be named",
            "Choose a type",
        )
    if project.gpus is not None and gpus > project.gpus:
        refuse(
            "gpus_per_node",
            f"The project {name!r} may use {number(project.gpus, 'GPU')} at a time; {gpus} were asked for",
            "Ask for fewer",
        )
    if gpus and project.gpu_hours is not None and project.use.gpu_hours >= project.gpu_hours:
        refuse(
            "account",
            f"The project {name!r} has used up its {number(project.gpu_hours, 'GPU-hour')}",
            "Ask an administrator for more",
        )


def refused_partitions(project: Project) -> list[str]:
    """The partitions that the project may use and in which Slurm lets no job of its account start."""
    try:
        return [] if project.closed else project.refused_by(picture.cluster())
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
