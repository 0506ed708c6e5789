"""What the servers of sessions can report to the hub, each about itself alone."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from carme.jobs.requests import MAXIMUM_MINUTES

__all__ = ["Activity", "Extend", "Marks", "Moment", "Ready", "Report"]

#: A moment in seconds since 1970.
Moment = Annotated[float, Field(ge=0, le=4e9)]


class Report(BaseModel):
    """What a server can say: nothing but what is named."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Marks(Report):
    """When the job reached the steps of its start that only it can know."""

    prolog: Moment | None = None
    container: Moment | None = None
    listening: Moment | None = None


class Ready(Report):
    """Where a server listens, and all else that it can say then."""

    port: Annotated[int, Field(ge=1024, le=65535)]
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]{1,253}$")]
    pid: Annotated[int, Field(ge=1)]
    marks: Marks = Marks()


class Activity(Report):
    """When kernels, terminals, GPUs and ranks were last busy; None for what cannot be known."""

    busy_since_last: bool
    kernels: Moment | None
    terminals: Moment | None
    gpus: Moment | None
    ranks: Moment | None
    first_page: Moment | None = None


class Extend(Report):
    """How much more time the session shall have."""

    minutes: Annotated[int, Field(ge=1, le=MAXIMUM_MINUTES)]
