"""What goes over the broker's socket: one JSON object a line, a request and its answer.

A request is `{"method": "cancel", "job_id": 7}`, its answer `{"result": ...}` or `{"error": {...}}`.
"""

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from carme.bookings import Hold, Window
from carme.broker.overview import Overview
from carme.errors import CarmeError, family
from carme.jobs import MAXIMUM_MINUTES, Access, Cluster, Forecast, Job, JobRequest, Reservation, StartEstimate
from carme.jobs.arrays import MAXIMUM_TASK, Tasks
from carme.jobs.contents import Content
from carme.jobs.requests import Word
from carme.jobs.stages import Stages
from carme.projects import Grant, ProjectAccount
from carme.reports import JobWarning, Report
from carme.sessions import Extension, Session, SessionNote

__all__ = [
    "MAXIMUM_LINE",
    "MAXIMUM_WAIT",
    "Answer",
    "Bring",
    "Cancel",
    "Enrol",
    "EventBatch",
    "Extend",
    "Failure",
    "GetAccess",
    "GetCluster",
    "GetEvents",
    "GetFacts",
    "GetForecast",
    "GetHistory",
    "GetJob",
    "GetJobs",
    "GetLog",
    "GetOverview",
    "GetProjects",
    "GetRecipe",
    "GetReport",
    "GetReservations",
    "GetResult",
    "GetScript",
    "GetSession",
    "GetSessions",
    "GetWarnings",
    "JobFacts",
    "LogPart",
    "Maintain",
    "Note",
    "OpenFiles",
    "Overview",
    "PutGrant",
    "Recipe",
    "Release",
    "Request",
    "Reserve",
    "Resubmit",
    "Script",
    "SetNode",
    "StartEstimate",
    "Submit",
    "TestStart",
    "request_adapter",
]

MAXIMUM_LINE = 1 << 20  # bytes of a request with its line end; answers may be longer
MAXIMUM_WAIT = 60.0  # seconds that `events` waits at most

User = Annotated[str | None, Field(min_length=1, max_length=256)]
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


class JobFacts(BaseModel):
    """Where a job began: its image's digest, the Git repository of its working folder, failing login files.

    Its owner could have written it otherwise. What is not known is empty.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    image: Annotated[str, Field(max_length=100)] = ""
    digest: Annotated[str, Field(max_length=100)] = ""
    repository: Annotated[str, Field(max_length=4096)] = ""
    branch: Annotated[str, Field(max_length=500)] = ""
    revision: Annotated[str, Field(max_length=64)] = ""
    login: Annotated[str, Field(max_length=2000)] = ""


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


class _Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result: ClassVar[TypeAdapter[Any]] = TypeAdapter(None)


class Submit(_Asked):
    method: Literal["submit"] = "submit"
    request: JobRequest
    user: User = None
    result = TypeAdapter(int)


class Bring(_Asked):
    method: Literal["bring"] = "bring"
    name: Annotated[str, Field(pattern=r"^stage-[a-z0-9-]{1,50}$")]
    stage: Stages = Field(min_length=1)
    partition: Word
    account: Word | None = None
    node_names: list[Word] = Field(min_length=1, max_length=10_000)
    minutes: int = Field(ge=1, le=MAXIMUM_MINUTES)
    user: str = Field(min_length=1, max_length=256)
    result = TypeAdapter(int | None)


class Resubmit(_Asked):
    method: Literal["resubmit"] = "resubmit"
    job_id: int = Field(ge=1)
    task: Task = None
    tasks: Tasks | None = None
    user: User = None
    result = TypeAdapter(int)


class TestStart(_Asked):
    method: Literal["test"] = "test"
    request: JobRequest
    user: User = None
    result = TypeAdapter(StartEstimate)


class Cancel(_Asked):
    method: Literal["cancel"] = "cancel"
    job_id: int = Field(ge=1)
    task: Task = None
    user: User = None
    session: SessionName = None


class Extend(_Asked):
    method: Literal["extend"] = "extend"
    job_id: int = Field(ge=1)
    minutes: int = Field(ge=1, le=MAXIMUM_MINUTES)
    user: User = None
    result = TypeAdapter(Extension)


class GetJob(_Asked):
    method: Literal["job"] = "job"
    job_id: int = Field(ge=1)
    task: Task = None
    user: User = None
    result = TypeAdapter(Job)


class GetJobs(_Asked):
    method: Literal["jobs"] = "jobs"
    user: User = None
    active: bool = True
    result = TypeAdapter(list[Job])


class GetHistory(_Asked):
    method: Literal["history"] = "history"
    user: User = None
    since: datetime | None = None
    until: datetime | None = None
    limit: int = Field(default=200, ge=1, le=10_000)
    result = TypeAdapter(list[Job])


class GetLog(_Asked):
    method: Literal["log"] = "log"
    job_id: int = Field(ge=1)
    task: Task = None
    user: User = None
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=65_536, ge=1, le=1 << 20)
    #: Begin where so many lines are left, instead of at `offset`.
    tail: int | None = Field(default=None, ge=0, le=1_000_000)
    result = TypeAdapter(LogPart)


class GetFacts(_Asked):
    method: Literal["facts"] = "facts"
    job_id: int = Field(ge=1)
    task: Task = None
    user: User = None
    result = TypeAdapter(JobFacts)


class GetResult(_Asked):
    method: Literal["result"] = "result"
    job_id: int = Field(ge=1)
    task: Task = None
    user: User = None
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=65_536, ge=1, le=1 << 20)
    result = TypeAdapter(LogPart)


class GetRecipe(_Asked):
    method: Literal["recipe"] = "recipe"
    job_id: int = Field(ge=1)
    user: User = None
    result = TypeAdapter(Recipe)


class GetScript(_Asked):
    method: Literal["script"] = "script"
    path: str = Field(min_length=1, max_length=4096)
    user: User = None
    result = TypeAdapter(Script)


class GetCluster(_Asked):
    method: Literal["cluster"] = "cluster"
    result = TypeAdapter(Cluster)


class GetForecast(_Asked):
    method: Literal["forecast"] = "forecast"
    result = TypeAdapter(Forecast)


class GetReservations(_Asked):
    method: Literal["reservations"] = "reservations"
    result = TypeAdapter(list[Reservation])


class Reserve(_Asked):
    method: Literal["reserve"] = "reserve"
    hold: Hold
    user: str = Field(min_length=1, max_length=256)
    result = TypeAdapter(Reservation)


class Maintain(_Asked):
    method: Literal["maintain"] = "maintain"
    window: Window
    user: str = Field(min_length=1, max_length=256)
    result = TypeAdapter(Reservation)


class Release(_Asked):
    method: Literal["release"] = "release"
    name: str = Field(min_length=1, max_length=64)
    user: str = Field(min_length=1, max_length=256)


class GetProjects(_Asked):
    method: Literal["projects"] = "projects"
    result = TypeAdapter(list[ProjectAccount])


class PutGrant(_Asked):
    method: Literal["grant"] = "grant"
    grant: Grant
    user: str = Field(min_length=1, max_length=256)
    result = TypeAdapter(ProjectAccount)


class SetNode(_Asked):
    method: Literal["node"] = "node"
    name: Word
    drain: bool
    reason: Reason = ""
    user: str = Field(min_length=1, max_length=256)


class Enrol(_Asked):
    method: Literal["enrol"] = "enrol"
    name: str = Field(min_length=1, max_length=64)
    user: str = Field(min_length=1, max_length=256)
    result = TypeAdapter(list[str])


class GetReport(_Asked):
    method: Literal["report"] = "report"
    job_id: int = Field(ge=1)
    user: User = None
    result = TypeAdapter(Report)


class GetWarnings(_Asked):
    method: Literal["warnings"] = "warnings"
    result = TypeAdapter(list[JobWarning])


class OpenFiles(_Asked):
    """After the answer the connection is that of `carme.files.program`, which runs as the user."""

    method: Literal["files"] = "files"
    user: str = Field(min_length=1, max_length=256)


class GetAccess(_Asked):
    method: Literal["access"] = "access"
    user: User = None
    result = TypeAdapter(Access)


class GetAccountsLed(_Asked):
    method: Literal["accounts_led"] = "accounts_led"
    user: User = None
    result = TypeAdapter(list[str])


class GetOverview(_Asked):
    method: Literal["overview"] = "overview"
    result = TypeAdapter(Overview)


class GetEvents(_Asked):
    method: Literal["events"] = "events"
    cursor: str | None = Field(default=None, max_length=128)
    wait: float = Field(default=0.0, ge=0, le=MAXIMUM_WAIT, allow_inf_nan=False)
    result = TypeAdapter(EventBatch)


class GetSessions(_Asked):
    method: Literal["sessions"] = "sessions"
    user: User = None
    active: bool = True
    result = TypeAdapter(list[Session])


class GetSession(_Asked):
    method: Literal["session"] = "session"
    name: str = Field(min_length=1, max_length=64)
    user: User = None
    result = TypeAdapter(Session)


class Note(_Asked):
    method: Literal["note"] = "note"
    job_id: int = Field(ge=1)
    user: str = Field(min_length=1, max_length=256)
    note: SessionNote
    session: SessionName = None


Request = (
    Submit
    | Bring
    | TestStart
    | Cancel
    | Extend
    | GetJob
    | GetJobs
    | GetHistory
    | GetLog
    | GetResult
    | GetFacts
    | GetRecipe
    | GetScript
    | Resubmit
    | GetCluster
    | GetForecast
    | GetAccess
    | GetAccountsLed
    | GetOverview
    | GetReport
    | GetWarnings
    | GetReservations
    | Reserve
    | Maintain
    | Release
    | GetProjects
    | PutGrant
    | SetNode
    | Enrol
    | GetEvents
    | GetSessions
    | GetSession
    | Note
    | OpenFiles
)
request_adapter: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="method")])


class Failure(BaseModel):
    """An error as it travels; `kind` is its class, by that class's default code."""

    model_config = ConfigDict(frozen=True)

    message: str
    remedy: str = ""
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
