"""What goes over the broker's socket: one JSON object a line, a request and its answer.

Each operation is declared here, and nowhere else.

A request is `{"method": "cancel", "job_id": 7}`, its answer `{"result": ...}` or `{"error": {...}}`.
"""

from datetime import datetime
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Optional, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, create_model

from carme.bookings import ReservationSpec, Window
from carme.broker.operations import OPERATIONS, Operation, observers, operation, services
from carme.broker.overview import Overview, RunningJob
from carme.errors import CarmeError, family
from carme.jobs import MAXIMUM_MINUTES, Access, Cluster, Forecast, Job, JobRequest, Reservation, StartEstimate
from carme.jobs.arrays import MAXIMUM_TASK, Tasks
from carme.jobs.contents import Content
from carme.jobs.page_notes import JobFacts, NetPicture
from carme.jobs.requests import Word
from carme.jobs.stages import Stages
from carme.projects import Grant, ProjectAccount
from carme.reports import JobWarning, Report
from carme.sessions import Extension, Session, SessionNote
from carme.translation.models import Sentence, WithMessages

__all__ = [
    "MAXIMUM_LINE",
    "MAXIMUM_WAIT",
    "OPERATIONS",
    "Answer",
    "Cancel",
    "Enrol",
    "EventBatch",
    "Extend",
    "Failure",
    "GetAccess",
    "GetCluster",
    "GetCoordinatedAccounts",
    "GetEvents",
    "GetFacts",
    "GetForecast",
    "GetHistory",
    "GetJob",
    "GetJobs",
    "GetLog",
    "GetNet",
    "GetOverview",
    "GetProjects",
    "GetRecipe",
    "GetReport",
    "GetReservations",
    "GetResult",
    "GetRunning",
    "GetScript",
    "GetSession",
    "GetSessions",
    "GetWarnings",
    "JobFacts",
    "LogPart",
    "Maintain",
    "NetPicture",
    "Note",
    "OpenFiles",
    "Operation",
    "Overview",
    "PutGrant",
    "Recipe",
    "Release",
    "Request",
    "Reserve",
    "Resubmit",
    "RunningJob",
    "Script",
    "SetNode",
    "StageIn",
    "StartEstimate",
    "Submit",
    "TestStart",
    "answer_of",
    "request_adapter",
]

MAXIMUM_LINE = 1 << 20  # bytes of a request with its line end; answers may be longer
MAXIMUM_WAIT = 60.0  # seconds that `events` waits at most

JobNumber = Annotated[int, Field(ge=1)]
Minutes = Annotated[int, Field(ge=1, le=MAXIMUM_MINUTES)]
#: A part of a file, in bytes.
Offset = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=1, le=1 << 20)]
#: None: the peer itself, or for services nobody in particular.
User = Annotated[str | None, Field(min_length=1, max_length=256)]
SomeUser = Annotated[str, Field(min_length=1, max_length=256)]
#: The session whose job is meant: after a crash of Slurm it may have another number.
SessionName = Annotated[str | None, Field(min_length=1, max_length=64)]


#: A task of the array that the job's number is of.
Task = Annotated[int | None, Field(ge=0, le=MAXIMUM_TASK)]


def _reason(text: str) -> str:
    text = " ".join(text.split())
    if not text.isprintable() or "=" in text:
        raise ValueError("must be one line of letters, digits and signs, without '='")
    return text


#: Why a node is drained, as `sinfo -R` shows it.
Reason = Annotated[str, Field(max_length=200), AfterValidator(_reason)]


class LogPart(BaseModel):
    """Part of a job's output: `offset` is where the next part begins, `size` the whole log's bytes now."""

    model_config = ConfigDict(frozen=True)

    text: str
    offset: int
    size: int


class Script(BaseModel):
    """A script of a user's: its absolute path and its text."""

    model_config = ConfigDict(frozen=True)

    path: str
    text: Content


class Recipe(BaseModel):
    """What a batch job was submitted with. The values of its environment stay in its folder."""

    model_config = ConfigDict(frozen=True)

    request: JobRequest
    variables: list[str] = []


class EventBatch(BaseModel):
    """Jobs and sessions that changed since a cursor.

    `complete`: all jobs and sessions (of those that have ended, the ones of the last day), because the cursor
    was not known (any more).
    """

    model_config = ConfigDict(frozen=True)

    jobs: list[Job]
    sessions: list[Session] = []
    cursor: str
    complete: bool


@operation("submit")
class Submit(Operation[int]):
    """Start a job and return its number. Services and root name the `user` whose job it is."""

    request: JobRequest
    user: User = None

    def audit(self) -> dict[str, Any]:
        request = self.request
        what = {
            "name": request.name,
            "kind": request.kind,
            "image": request.image,
            "image_file": request.image_file and request.image_file.model_dump(),
            "partition": request.partition,
            "account": request.account,
            "qos": request.qos,
            "nodes": request.nodes,
            "gpus_per_node": request.gpus_per_node,
            "gpu_type": request.gpu_type,
            "minutes": request.minutes,
        }
        if request.array:
            what["array"] = request.array
        if request.stage:
            what["stage"] = _sources(request.stage)
        if request.prediction:
            what["prediction"] = request.prediction.model_dump()
        return what


@operation("bring", services("bring data to booked nodes"))
class StageIn(Operation[int | None]):
    """Copy a user's data to booked nodes ahead of time.

    Returns:
        The number of the job that copies; a second request of the same name returns the same job. None: the
        nodes have the data already.
    """

    name: Annotated[str, Field(pattern=r"^stage-[a-z0-9-]{1,50}$")]
    stage: Annotated[Stages, Field(min_length=1)]
    partition: Word
    node_names: Annotated[list[Word], Field(min_length=1, max_length=10_000)]
    minutes: Minutes
    user: SomeUser
    account: Word | None = None

    def audit(self) -> dict[str, Any]:
        return {"name": self.name, "nodes": self.node_names, "stage": _sources(self.stage)}


@operation("test")
class TestStart(Operation[StartEstimate]):
    """Estimate when the job would start, without starting it."""

    request: JobRequest
    user: User = None


@operation("cancel")
class Cancel(Operation[None]):
    """Cancel a job, an array, or a `task` of one; a job that has ended stays as it is.

    `session` is the name of the session that the job serves: it finds the job when its number has changed. A
    service that names no user acts for an administrator.
    """

    job_id: JobNumber
    user: User = None
    session: SessionName = None
    task: Task = None

    def audit(self) -> dict[str, Any]:
        return {"job_id": self.job_id}


@operation("extend")
class Extend(Operation[Extension]):
    """Give a running job more minutes; InvalidRequest says why not, and how many more there are."""

    job_id: JobNumber
    minutes: Minutes
    user: User = None

    def audit(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "minutes": self.minutes}


@operation("job")
class GetJob(Operation[Job]):
    """Get a job, or a task of an array; jobs that have left the queue come from the accounting."""

    job_id: JobNumber
    user: User = None
    task: Task = None


@operation("jobs")
class GetJobs(Operation[list[Job]]):
    """List the jobs in Slurm's queue; with `active=False` include jobs that ended minutes ago.

    Services that name no user get the jobs of all users.
    """

    user: User = None
    active: bool = True


@operation("running", services("see who has which nodes", remedy="See your own jobs with 'carme jobs'."))
class GetRunning(Operation[list[RunningJob]]):
    """List the jobs of all users that have nodes now, with what a calendar shows of them."""


@operation("history")
class GetHistory(Operation[list[Job]]):
    """List jobs in Slurm's accounting, newest first, by default those of the last seven days."""

    user: User = None
    since: datetime | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 200
    until: datetime | None = None


@operation("log")
class GetLog(Operation[LogPart]):
    """Read a part of the job's output, from byte `offset`, or from where `tail` lines are left."""

    job_id: JobNumber
    user: User = None
    offset: Offset = 0
    limit: Limit = 65_536
    task: Task = None
    tail: Annotated[int | None, Field(ge=0, le=1_000_000)] = None


@operation("result")
class GetResult(Operation[LogPart]):
    """Read a part of what the job left as its result, from byte `offset`; empty while there is none."""

    job_id: JobNumber
    user: User = None
    offset: Offset = 0
    limit: Limit = 65_536
    task: Task = None


@operation("facts")
class GetFacts(Operation[JobFacts]):
    """Get where a job began: its image's digest, the Git revision of its working folder."""

    job_id: JobNumber
    user: User = None
    task: Task = None


@operation("net")
class GetNet(Operation[NetPicture]):
    """Get the Petri net that a job runs or has run, drawn with its tokens and tasks."""

    job_id: JobNumber
    user: User = None
    task: Task = None


@operation("recipe")
class GetRecipe(Operation[Recipe]):
    """Get what a batch job was submitted with: its request, and of its environment the names alone."""

    job_id: JobNumber
    user: User = None


@operation("script")
class GetScript(Operation[Script]):
    """Read a script as the user, at most 256 KiB; `path` is absolute or within the home directory."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    user: User = None


@operation("resubmit")
class Resubmit(Operation[int]):
    """Submit a batch job again as it was, its environment included; of an array, `task` or `tasks`.

    Returns:
        The new job's number.
    """

    job_id: JobNumber
    user: User = None
    task: Task = None
    tasks: Tasks | None = None


@operation("cluster")
class GetCluster(Operation[Cluster]):
    """Get partitions and nodes, and when they were last seen."""


@operation("forecast")
class GetForecast(Operation[Forecast]):
    """Forecast how many GPUs of each type will be free in each half hour of three days.

    It follows Slurm's plan and is at most a minute old.
    """


@operation("access")
class GetAccess(Operation[Access]):
    """Get what Slurm lets a user use: accounts, qualities of service, partitions, limits, and groups."""

    user: User = None


@operation("coordinated_accounts")
class GetCoordinatedAccounts(Operation[list[str]]):
    """List the accounts whose coordinator the user is in Slurm."""

    user: User = None


@operation(
    "overview",
    observers("see figures of all users", "monitoring does", "See your own jobs with 'carme jobs'."),
)
class GetOverview(Operation[Overview]):
    """Get figures of all users' jobs, of nodes, reservations, licences and sessions."""


@operation("report")
class GetReport(Operation[Report]):
    """Compare what a job used with what it requested, and say what to change."""

    job_id: JobNumber
    user: User = None


@operation("warnings", services("see the warnings of all users"))
class GetWarnings(Operation[list[JobWarning]]):
    """List the policy's last warning of each job of all users, and for a day the jobs that it stopped."""


@operation("reservations")
class GetReservations(Operation[list[Reservation]]):
    """List Slurm's reservations that have not ended; an ordinary user gets those that they may use."""


@operation("reserve", services("make or change reservations"))
class Reserve(Operation[Reservation]):
    """Make or change the reservation of `user`'s booking, so that it is as `hold` says."""

    hold: ReservationSpec
    user: SomeUser

    def audit(self) -> dict[str, Any]:
        spec = self.hold
        times = {"start": spec.start.isoformat(), "end": spec.end.isoformat()}
        nodes = {"name": spec.name, "nodes": spec.node_names}
        return {**nodes, **times, "users": spec.users, "accounts": spec.accounts}


@operation("maintain", services("reserve nodes for maintenance"))
class Maintain(Operation[Reservation]):
    """Reserve nodes for maintenance; `user` is the administrator who requested it."""

    window: Window
    user: SomeUser

    def audit(self) -> dict[str, Any]:
        window = self.window
        times = {"start": window.start.isoformat(), "end": window.end.isoformat()}
        return {"name": window.name, "nodes": window.node_names, **times}


@operation("release", services("make or change reservations"))
class Release(Operation[None]):
    """Delete the reservation of a booking of `user`; waiting jobs go on waiting without it."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    user: SomeUser

    def audit(self) -> dict[str, Any]:
        return {"name": self.name}


@operation("projects", services("see projects"))
class GetProjects(Operation[list[ProjectAccount]]):
    """List Carme's accounts in Slurm, with members, limits and use."""


@operation("grant", services("change projects"))
class PutGrant(Operation[ProjectAccount]):
    """Make a project's account what `grant` says; `user` is who changed it."""

    grant: Grant
    user: SomeUser

    def audit(self) -> dict[str, Any]:
        return self.grant.model_dump(exclude_none=True)


@operation("node", services("drain or resume nodes"))
class SetNode(Operation[None]):
    """Drain a node for a reason, or resume it."""

    name: Word
    drain: bool
    user: SomeUser
    reason: Reason = ""

    def audit(self) -> dict[str, Any]:
        return {"name": self.name, "drain": self.drain, "reason": self.reason}


@operation("enrol", services("enrol users"))
class Enrol(Operation[list[str]]):
    """Give an account what it needs to run jobs: a default association, a home, quotas.

    Returns:
        What had to be done, in words.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    user: SomeUser

    def audit(self) -> dict[str, Any]:
        return {"name": self.name}


@operation("events")
class GetEvents(Operation[EventBatch]):
    """Get the jobs and sessions that changed since `cursor`; wait up to `wait` seconds for a change.

    Without a cursor that the broker knows, the batch is complete: it has all jobs and sessions (of sessions
    that have ended, those of the last day).
    """

    cursor: Annotated[str | None, Field(max_length=128)] = None
    wait: Annotated[float, Field(ge=0, le=MAXIMUM_WAIT, allow_inf_nan=False)] = 0.0


@operation("sessions")
class GetSessions(Operation[list[Session]]):
    """List sessions, newest first; with `active=False` include sessions that ended in the last days."""

    user: User = None
    active: bool = True


@operation("session")
class GetSession(Operation[Session]):
    """Get the newest session of this name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    user: User = None


@operation(
    "note",
    services("note anything about sessions", "services do", "See your sessions with 'carme session list'."),
)
class Note(Operation[None]):
    """Report what the hub knows about a user's session; `session` is its name.

    Only notes that end a session go into the audit log.
    """

    job_id: JobNumber
    user: SomeUser
    note: SessionNote
    session: SessionName = None

    def audit(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "ending": self.note.ending}


@operation(
    "files",
    services("open others' files", "portal does for their owners", "Use your files as they are."),
)
class OpenFiles(Operation[None]):
    """Open a user's files: after the answer `carme.files.program`, run as the user, has the connection."""

    user: SomeUser


def _sources(stages: Stages) -> list[str]:
    return [f"{stage.target}:{stage.source}" for stage in stages]


#: A request of any operation.
Request = Operation[Any]
request_adapter: TypeAdapter[Request] = TypeAdapter(
    # At run time alone is known which operations there are.
    cast(Any, Annotated)[reduce(or_, OPERATIONS.values()), Field(discriminator="method")]
)


class Failure(WithMessages):
    """An error as it travels; `kind` is its class, by that class's default code.

    Its texts are English; clients that know `messages` render these in their reader's language.
    """

    model_config = ConfigDict(frozen=True)

    message: Sentence
    remedy: Sentence = ""
    kind: str = "error"
    code: str = "error"
    field: str | None = None

    @classmethod
    def of(cls, error: CarmeError) -> "Failure":
        return cls(
            message=error.message,
            remedy=error.remedy,
            kind=error.default_code,
            code=error.code,
            field=error.field,
        )

    def error(self) -> CarmeError:
        return family(self.kind)(self.message, self.remedy, self.code, self.field)


class Answer(BaseModel):
    """Either a result or an error."""

    model_config = ConfigDict(frozen=True)

    result: Any = None
    error: Failure | None = None


@cache
def answer_of(kind: type[Request]) -> type[Answer]:
    """An operation's answer with the type of its result: reads a long one in half the time."""
    result: Any = Optional[kind.result_type()]  # noqa: UP045  the type may be that of None
    return create_model("Answer", __base__=Answer, result=(result, None))
