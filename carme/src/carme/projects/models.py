"""What Slurm is to grant a project, and what it grants and has counted."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from carme.bookings.models import User
from carme.errors import InvalidRequest
from carme.jobs.requests import MAXIMUM_MINUTES, Word
from carme.translation import message as _

__all__ = [
    "ACCOUNT_PATTERN",
    "NAME_PATTERN",
    "ORGANISATION",
    "Grant",
    "ProjectAccount",
    "Use",
    "account_of",
]

#: A project's name, as its members write it.
NAME_PATTERN = r"[a-z][a-z0-9-]{0,31}"
#: Accounts of Slurm with such names are Carme's, if they also belong to ORGANISATION.
ACCOUNT_PATTERN = rf"carme-{NAME_PATTERN}"
ORGANISATION = "carme-project"

MOST = 1_000_000


def account_of(project: str) -> str:
    """The account in Slurm of a project.

    Raises:
        InvalidRequest: That is not a project's name.
    """
    if not re.fullmatch(NAME_PATTERN, project):
        raise InvalidRequest(
            _(
                "{project!r} is not a valid name of a project: one has up to 32 lower-case letters, digits "
                "and hyphens and begins with a letter.",
                project=project[:40],
            ),
            _("See your projects in the portal."),
            field="project",
        )
    return f"carme-{project}"


def _account(text: str) -> str:
    if not re.fullmatch(ACCOUNT_PATTERN, text):
        raise ValueError("must be 'carme-' and the name of a project")
    return text


Account = Annotated[str, AfterValidator(_account)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class Grant(BaseModel):
    """What an account may use, and who may use it. None, or a type that is not named: no limit.

    Attributes:
        account: Its name in Slurm.
        members: Users who may run jobs in it; empty: nobody.
        partitions: Those in which they may; empty: all.
        gpus, nodes, jobs: What all of its running jobs together may use, and how many may run.
        gpu_types: How many GPUs of a type they may use; 0: none.
        minutes: How long one job may run.
        gpu_hours: What it may use in all, as far as Slurm remembers (`PriorityDecayHalfLife`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    account: Account
    members: list[User] = Field(default=[], max_length=5000)
    partitions: list[Word] = Field(default=[], max_length=100)
    gpus: Count | None = None
    gpu_types: dict[Word, Count] = Field(default={}, max_length=100)
    nodes: Count | None = None
    jobs: Count | None = None
    minutes: int | None = Field(default=None, ge=1, le=MAXIMUM_MINUTES)
    gpu_hours: Count | None = None


class Use(BaseModel):
    """What an account's jobs use now, and the GPU-hours that Slurm has counted."""

    model_config = ConfigDict(frozen=True)

    gpus: int = 0
    nodes: int = 0
    jobs: int = 0
    gpu_hours: float = 0.0


class ProjectAccount(BaseModel):
    """An account as Slurm has it.

    Attributes:
        members: Who may use it, and in which partitions; an empty name stands for all of them.
        stopped: Those whose jobs go on, while Slurm takes no new ones of theirs.
        resources: Limits on what all running jobs together use, by Slurm's names.
        gpu_minutes: What it may use in all.
    """

    model_config = ConfigDict(frozen=True)

    account: str
    members: dict[str, list[str]] = {}
    stopped: list[str] = []
    resources: dict[str, int] = {}
    jobs: int | None = None
    minutes: int | None = None
    gpu_minutes: int | None = None
    use: Use = Use()
