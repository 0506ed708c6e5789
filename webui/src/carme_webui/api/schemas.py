"""What the API takes, and how its answers (`carme.api`) are made."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

from django.db.models import Model, QuerySet
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter

from carme.api import (
    App,
    ArrayOut,
    BookingOut,
    ImageBuild,
    JobOut,
    Overview,
    ProjectOut,
    SessionOut,
    SupplyOut,
)
from carme.bookings import YEARS, BookingRequest, BookingState
from carme.jobs import Cluster, JobState, Node, Partition, SessionOptions, arrays
from carme.sessions import SessionState
from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.bookings.data import stages_of
from carme_webui.bookings.models import Booking
from carme_webui.caches import derived
from carme_webui.cluster import supplies
from carme_webui.images.models import OwnImage
from carme_webui.jobs.arrays import FAILURES, progress_of, states_of
from carme_webui.jobs.models import Job
from carme_webui.jobs.submissions import Staged
from carme_webui.projects.models import Project
from carme_webui.projects.rules import refused_partitions
from carme_webui.sessions import models as sessions

__all__ = [
    "Body",
    "BookingChange",
    "BookingIn",
    "Decision",
    "Extension",
    "JobSearch",
    "Moment",
    "Offer",
    "OfferAnswer",
    "Paging",
    "Second",
    "SessionPlan",
    "SessionSearch",
    "SessionStart",
    "Text",
    "Words",
    "array_out",
    "booking_out",
    "image_out",
    "job_out",
    "overview_of",
    "page_of",
    "project_out",
    "session_out",
]


def _moment(moment: datetime) -> datetime:
    if moment.year not in YEARS:
        raise ValueError(f"must lie in the years {YEARS[0]} to {YEARS[-1]}")
    return moment


def _plain(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    return text


#: With its offset from UTC, like 2026-11-22T08:00:00+01:00.
Moment = Annotated[AwareDatetime, AfterValidator(_moment)]
#: One that Slurm can keep.
Second = Annotated[Moment, AfterValidator(lambda moment: moment.replace(microsecond=0))]
#: Several lines.
Text = Annotated[str, AfterValidator(_plain)]
Words = Annotated[str, Field(max_length=200), AfterValidator(_plain)]


class Body(BaseModel):
    """The JSON of a request: a field that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Paging(BaseModel):
    """Which part of a list."""

    limit: int = Field(default=50, ge=1, le=200, description="how many at most")
    cursor: Annotated[str, Field(pattern=r"^[0-9]{1,18}$")] | None = Field(
        default=None, description="'next' of the part before"
    )


def page_of(rows: "QuerySet[Any]", paging: Paging, shown: Any) -> dict[str, Any]:
    """A part of `rows`, newest first: one query, however far back it is.

    Args:
        shown: Makes what is sent of a row.
    """
    rows = rows.order_by("-pk")
    if paging.cursor:
        rows = rows.filter(pk__lt=int(paging.cursor))
    found: list[Model] = list(rows[: paging.limit + 1])
    more = len(found) > paging.limit
    found = found[: paging.limit]
    return {"items": [shown(row) for row in found], "next": str(found[-1].pk) if more else None}


# --- sessions --------------------------------------------------------------------------------------------


class SessionSearch(Paging):
    """Which sessions."""

    state: SessionState | None = None
    active: bool | None = Field(default=None, description="those that are not over, or those that are")


class SessionStart(SessionOptions):
    """What to start. With a `name` of your own making (`s` and 8 letters or digits) it may be sent twice."""

    name: str | None = Field(default=None, pattern=rf"^{sessions.NAME_PATTERN}$")
    stage: Staged = Field(default=[])  # pyright: ignore[reportIncompatibleVariableOverride]


class Extension(Body):
    """How much longer."""

    minutes: int = Field(ge=1, le=366 * 1440)


# --- jobs ------------------------------------------------------------------------------------------------


class JobSearch(Paging):
    """Which jobs."""

    q: Words = Field(default="", description="part of the name, or the number")
    state: Literal["", "pending", "running", "completed", "cancelled", "failed"] = ""
    kind: Literal["", "batch", "session", "other"] = ""
    partition: Words = ""
    since: Moment | None = Field(default=None, description="submitted at this moment or later")
    until: Moment | None = Field(default=None, description="submitted before this moment")
    array: int | None = Field(default=None, ge=1, lt=10**18, description="tasks of the array of this number")


# --- bookings --------------------------------------------------------------------------------------------


class BookingIn(BookingRequest):
    """Nodes that you want, whole: so many with so many GPUs of a type each, from `start` for `minutes`."""


class BookingChange(Body):
    """What is to be other than it was; what is left out stays."""

    partition: str | None = None
    gpu_type: str | None = None
    gpus_per_node: int | None = None
    nodes: int | None = None
    start: Moment | None = None
    minutes: int | None = None
    title: str | None = None
    users: list[str] | None = None


class SessionPlan(Body):
    """The session that starts in a booking's first minute; `image` null: none does.

    What `stage` names is brought to the booked nodes before.
    """

    image: Words | None
    stage: Staged = []
    results: str | None = Field(default=None, max_length=4096)


class Offer(Body):
    """Who may take a booking over; null: nobody any more."""

    user: Words | None


class OfferAnswer(Body):
    """Whether I take over what was offered to me."""

    accept: bool


class Decision(Body):
    """An administrator's answer to a booking that waits for approval; its owner gets the `reason`."""

    approve: bool
    reason: Words = ""


def session_out(row: "sessions.Session", apps: list[App] | None = None) -> SessionOut:
    """What is sent of a session."""
    reported = row.last_reported
    same = ("name", "title", "ending", "label", "job_id", "created", "changed")
    return SessionOut(
        **{name: getattr(row, name) for name in same},
        explanation=translated(row.explanation),
        state=SessionState(row.state),
        options=row.requested_options,
        node_list=reported.node_list if reported else "",
        ends=reported.ends if reported and not row.is_over else None,
        stops_idle=reported.stops_idle if reported and not row.is_over else None,
        apps=apps or [],
    )


def job_out(row: Job) -> JobOut:
    """What is sent of a job, or of a whole array for the row that has its `progress`."""
    sent = JobOut.model_validate(row)
    progress = row.progress
    if progress is None:
        return sent.model_copy(update={"explanation": translated(row.explanation)})
    why = progress.waits if progress.state is JobState.PENDING else ""
    whole = {"state": progress.state, "active": not progress.is_over}
    whole |= {"explanation": translated(why) or progress.sentence, "started": progress.started}
    whole |= {"ended": progress.ended if progress.is_over else None}
    # These are those of one task.
    return sent.model_copy(
        update=whole | {"exit_code": None, "signal": None, "task": None, "tasks": _all_tasks(row)}
    )


def _all_tasks(row: Job) -> str:
    states = states_of(row).values()
    return arrays.listed(number for tasks in states for number in arrays.numbers(tasks))


def array_out(row: Job) -> ArrayOut:
    """What is sent of the tasks of an array."""
    progress, states = progress_of(row), states_of(row)
    failed = (arrays.numbers(tasks) for state, tasks in states.items() if state in FAILURES)
    return ArrayOut(
        id=row.id,
        state=progress.state,
        active=not progress.is_over,
        sentence=progress.sentence,
        tasks=progress.counts.total(),
        states=states,
        failed=arrays.listed(number for numbers in failed for number in numbers),
    )


def _shown(row: Booking | OwnImage, names: Iterable[str]) -> dict[str, Any]:
    """Values of a row, its sentences in the reader's language."""
    values = {name: getattr(row, name) for name in names}
    return {name: translated(value) if isinstance(value, str) else value for name, value in values.items()}


def booking_out(row: Booking, reader: User | None = None) -> BookingOut:
    """What is sent of a booking, to its owner or another reader."""
    same = ("name", "title", "partition", "gpu_type", "gpus_per_node", "node_names", "users", "start")
    same += ("end", "minutes", "cause", "label", "problem", "gpu_hours")
    return BookingOut(
        **_shown(row, same),
        owner=row.owner.username,
        project=row.project.name if row.project else "",
        state=BookingState(row.state),
        reserved=row.reserved is not None,
        offered_to=row.offered_to.username if row.offered_to else "",
        **(_planned(row) if reader in (None, row.owner) else {}),
    )


def _planned(row: Booking) -> dict[str, Any]:
    same = _shown(row, ("session_image", "staged", "stage_problem"))
    return {**same, "session": row.session_name, "stage": stages_of(row)}


def project_out(row: Project, reader: User) -> ProjectOut:
    """What a member is sent of a project."""
    same = ("name", "title", "account", "partitions", "gpu_types", "gpus", "nodes", "jobs", "minutes")
    people = row.memberships.all()
    managers = [person.user.username for person in people if person.manager]
    return ProjectOut(
        **{name: getattr(row, name) for name in (*same, "gpu_hours")},
        manager=reader.username in managers,
        managers=managers,
        members=[person.user.username for person in people],
        invited=[invitation.user.username for invitation in row.invitations.all()],
        closed=row.closed,
        refused_partitions=refused_partitions(row),
        gpus_now=row.use.gpus,
        nodes_now=row.use.nodes,
        jobs_now=row.use.jobs,
        gpu_hours_used=row.use.gpu_hours,
        gpu_hours_booked=round(sum(booking.gpu_hours_left for booking in row.bookings.all()), 1),
    )


def image_out(row: OwnImage) -> ImageBuild:
    """What is sent of a user's own image."""
    same = ("name", "reference", "title", "description", "state", "problem", "kind", "base", "file", "digest")
    same += ("size", "job_id", "entry_points", "packages", "created", "built")
    return ImageBuild(
        **_shown(row, same),
        owner=row.owner.username,
        project=row.project.name if row.project else None,
    )


dump_nodes = TypeAdapter(list[Node]).dump_json
#: In the place of the nodes; within strings, JSON has a backslash before each quotation mark.
_PLACE = b'"nodes":[]'


def overview_of(cluster: Cluster, partitions: list[Partition]) -> bytes:
    """What is sent of a look at the cluster, as JSON.

    The nodes are the same for all readers: their text, of a large site more than a megabyte, is made once.

    Args:
        partitions: Those of the cluster that the reader may see.
    """
    nodes = derived.get(cluster, "nodes", lambda known: dump_nodes(known.nodes))
    gpus = [SupplyOut.model_validate(supply) for supply in supplies(cluster)]
    rest = Overview.model_construct(taken=cluster.taken, partitions=partitions, nodes=[], gpus=gpus)
    before, _place, after = rest.model_dump_json().encode().partition(_PLACE)
    return b'%s"nodes":%s%s' % (before, nodes, after)
