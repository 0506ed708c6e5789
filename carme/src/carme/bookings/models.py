"""What a user wants to book, and what Slurm is to keep for it."""

import re
from datetime import datetime, timedelta
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from carme.accounts import is_account_name
from carme.jobs.requests import Word
from carme.translation import message as _

__all__ = ["MAINTENANCE_PATTERN", "NAME_PATTERN", "YEARS", "BookingRequest", "ReservationSpec", "Window"]

#: Reservations of Slurm with such names are Carme's; all others are the administrators' own.
NAME_PATTERN = r"carme-[0-9a-f]{12}"
#: The same of those in which administrators maintain nodes.
MAINTENANCE_PATTERN = r"carme-maintenance-[0-9a-f]{12}"

MAXIMUM_MINUTES = 366 * 1440
#: Outside of these years zones and sums of times are not to be trusted.
YEARS = range(1971, 2200)


def _user(text: str) -> str:
    if not is_account_name(text):
        raise ValueError(_("holds {name!r}, which is not a user name", name=text[:40]))
    return text


def _name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(_("must be 'carme-' and 12 hexadecimal digits"))
    return text


def _moment(moment: datetime) -> datetime:
    if moment.year not in YEARS:
        raise ValueError(_("must lie in the years {first} to {last}", first=YEARS[0], last=YEARS[-1]))
    if moment.microsecond:
        raise ValueError(_("must be a whole second"))
    return moment


User = Annotated[str, AfterValidator(_user)]
Moment = Annotated[AwareDatetime, AfterValidator(_moment)]


class BookingRequest(BaseModel):
    """Nodes that somebody wants: so many with so many GPUs of a type each, from `start` for `minutes`.

    Nodes are booked whole, with their processors and memory: Slurm keeps parts of nodes only where it knows
    which processors belong to which GPU, and all of a node's processors elsewhere, so that what is left of
    the node is of no use to others. `users` may use the booking besides its owner. `node_names` must be among
    its nodes; the site chooses the others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: Word
    gpu_type: Word
    gpus_per_node: int = Field(ge=1, le=1024)
    nodes: int = Field(default=1, ge=1, le=100_000)
    node_names: list[Word] = Field(default=[], max_length=1000)
    start: Moment
    minutes: int = Field(ge=1, le=MAXIMUM_MINUTES)
    title: str = Field(default="", max_length=80)
    users: list[User] = Field(default=[], max_length=100)
    # The name of a project, if it is for that: then all of its members may use it.
    project: str = Field(default="", max_length=32)

    @property
    def end(self) -> datetime:
        """When it is over."""
        return self.start + timedelta(minutes=self.minutes)

    @property
    def gpus(self) -> int:
        """GPUs on all nodes together."""
        return self.nodes * self.gpus_per_node

    @property
    def gpu_hours(self) -> float:
        """What it costs."""
        return self.gpus * self.minutes / 60


class _Reserved(BaseModel):
    """Nodes that a reservation of Slurm keeps for a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_names: list[Word] = Field(min_length=1, max_length=10_000)
    start: Moment
    end: Moment

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end <= self.start:
            raise ValueError(_("must end after it starts"))
        if len(set(self.node_names)) < len(self.node_names):
            raise ValueError(_("names a node twice"))
        return self


class ReservationSpec(_Reserved):
    """What Slurm is to keep for a booking: these nodes, whole, for users or for a project's account.

    `name` is the reservation's, see NAME_PATTERN.
    """

    name: Annotated[str, AfterValidator(_name)]
    partition: Word
    users: list[User] = Field(default=[], max_length=101)
    # Of a project: anyone who is in it, with jobs that it pays.
    accounts: list[Word] = Field(default=[], max_length=1)

    @model_validator(mode="after")
    def _check_holders(self) -> Self:
        if bool(self.users) == bool(self.accounts):
            raise ValueError(_("must be for users, or for an account"))
        return self


class Window(_Reserved):
    """A time in which administrators have nodes for themselves: no job starts that would still run then.

    `name` is the reservation's, see MAINTENANCE_PATTERN.
    """

    name: str = Field(pattern=rf"^{MAINTENANCE_PATTERN}$")
