"""What goes over the wire of the portal's REST API: for the portal and for the Python client."""

import warnings
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from carme.bookings import BookingState
from carme.jobs import Association, Cluster, JobState, SessionOptions, Stage
from carme.sessions import SessionState

__all__ = [
    "Account",
    "App",
    "ArrayOut",
    "BookingOut",
    "ChangeOut",
    "EntryOut",
    "Extended",
    "FolderOut",
    "ImageBuild",
    "ImageOut",
    "InvitationOut",
    "JobOut",
    "LogOut",
    "MaintenanceOut",
    "NewsOut",
    "NodeKind",
    "NoticeKind",
    "NoticeOut",
    "Onboarded",
    "OthersJob",
    "Overview",
    "Page",
    "PlaceOut",
    "PolicyOut",
    "PresetOut",
    "Problem",
    "ProjectOut",
    "QuotaOut",
    "SessionOut",
    "Slot",
    "Submitted",
    "SupplyOut",
    "UserOut",
]

Item = TypeVar("Item")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The earlier name of `QuotaOut`."""
        if name != "RoomOut":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(
            "carme.api.RoomOut is carme.api.QuotaOut now. Use that.", DeprecationWarning, stacklevel=2
        )
        return QuotaOut


class Problem(BaseModel):
    """Why a request was refused: https://www.rfc-editor.org/rfc/rfc9457.

    `help` is the path of the portal's page that says more, where there is one.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    field: str | None = None
    help: str | None = None


class Page(BaseModel, Generic[Item]):
    """A part of a list; `next` is the `cursor` of the following part, null at the end."""

    items: list[Item]
    next: str | None = None


class App(BaseModel):
    """Something that a ready session can open."""

    name: str
    title: str
    url: str


class SessionOut(BaseModel):
    """A session. `state` is one word, `label` and `explanation` are what the page shows."""

    name: str
    title: str
    state: SessionState
    ending: str
    label: str
    explanation: str
    options: SessionOptions
    job_id: int | None
    node_list: str
    created: datetime
    changed: datetime
    ends: datetime | None
    stops_idle: datetime | None
    apps: list[App]


class Extended(BaseModel):
    """When it ends now, and its limit in minutes since its start."""

    ends: datetime
    minutes_limit: int


class JobOut(BaseModel):
    """A job. Memory is in MiB; GPUs, processors and memory are over all nodes.

    `array_id` is the number of the array that it belongs to, `task` which one of it. Those that
    wait are one job together, and `tasks` names them, like `5-9%2`. An array requested by its number
    stands for all of its tasks: the state is that of the whole.
    """

    model_config = ConfigDict(from_attributes=True)

    id: int
    name: str
    kind: str
    image: str | None
    account: str
    partition: str
    state: JobState
    explanation: str
    active: bool
    nodes: int
    node_list: str
    gpus: int
    gpu_type: str | None
    cpus: int
    memory_mb: int
    minutes_limit: int | None
    submitted: datetime | None
    started: datetime | None
    ended: datetime | None
    exit_code: int | None
    signal: int | None
    array_id: int | None = None
    task: int | None = None
    tasks: str = ""


class ArrayOut(BaseModel):
    """How far the tasks of an array are.

    `state` and `sentence` are those of the whole ("1 of 6 tasks failed."), `active` says whether a task
    waits or runs. `states` names the tasks in each of Slurm's states, like {"COMPLETED": "0-3,5",
    "FAILED": "4"}; `failed` those that failed, empty if none did.
    """

    id: int
    state: JobState
    active: bool
    sentence: str
    tasks: int
    states: dict[JobState, str]
    failed: str


class Submitted(BaseModel):
    """The number of the new job, or of the array; the options of `#SBATCH` lines that were ignored."""

    id: int
    ignored: list[str] = []


class LogOut(BaseModel):
    """A part of a text: `offset` is where the next part begins, `size` its bytes; `over`: no more comes."""

    text: str
    offset: int
    size: int
    over: bool


class BookingOut(BaseModel):
    """A booking. Its `name` is what sessions and jobs name as `reservation`.

    A session in `session_image` starts in its first minute, and is called `session` then. What `stage` names
    is brought to its nodes before; `staged` is since when it is there, `stage_problem` why it is not. Only
    its owner gets notices of these.
    """

    name: str
    title: str
    owner: str
    project: str = ""
    partition: str
    gpu_type: str
    gpus_per_node: int
    node_names: list[str]
    users: list[str]
    start: datetime
    end: datetime
    minutes: int
    state: BookingState
    cause: str
    label: str
    problem: str
    reserved: bool
    gpu_hours: float
    offered_to: str = ""
    session_image: str = ""
    session: str = ""
    stage: list[Stage] = []
    staged: datetime | None = None
    stage_problem: str = ""


class Slot(BaseModel):
    """A time at which a request could be met."""

    start: datetime
    end: datetime


class NodeKind(BaseModel):
    """Nodes that can be booked: those of a partition with so many GPUs of a type."""

    model_config = ConfigDict(from_attributes=True)

    partition: str
    gpu_type: str
    gpus: int
    nodes: int


class SupplyOut(BaseModel):
    """The GPUs of one type: free now and in all, and on one node at most."""

    model_config = ConfigDict(from_attributes=True)

    kind: str
    free: int
    total: int
    per_node: int


class Overview(Cluster):
    """Partitions and nodes, when they were last seen, and the GPUs that are free now."""

    gpus: list[SupplyOut]


class NewsOut(BaseModel):
    """News; `until`: the last day on which they are on the dashboard, if one was named."""

    number: int
    title: str
    text: str
    created: datetime
    until: date | None = None


class MaintenanceOut(BaseModel):
    """A time at which nodes take no jobs. `reserved`: since when it is in Slurm; `problem`: why not."""

    name: str
    title: str
    text: str
    start: datetime
    end: datetime
    node_names: list[str]
    reserved: datetime | None = None
    problem: str = ""


class ImageOut(BaseModel):
    """An image, and what it can open."""

    name: str
    title: str
    description: str
    digest: str
    apps: dict[str, str]


class ImageDetails(ImageOut):
    """The same with its Python packages and their versions."""

    packages: dict[str, str]


class ImageBuild(BaseModel):
    """A user's own image; `reference` is what sessions and jobs name as `image`.

    `state` is `building`, `ready` or `failed`.
    """

    model_config = ConfigDict(from_attributes=True)

    name: str
    owner: str
    reference: str
    title: str
    description: str
    state: str
    problem: str
    kind: str
    base: str
    project: str | None
    file: str
    digest: str
    size: int
    job_id: int | None
    entry_points: dict[str, str]
    packages: dict[str, str]
    created: datetime
    built: datetime | None


class ProjectOut(BaseModel):
    """A project of mine: who is in it, what it may use and has used. A limit that is null is none.

    `account` is what sessions and jobs name when it pays; `refused_partitions` are those in which Slurm
    starts no jobs of it; `gpu_hours_used` is what its jobs have used, and `gpu_hours_booked` what its
    bookings to come will cost.
    """

    name: str
    title: str
    account: str
    manager: bool
    managers: list[str]
    members: list[str]
    invited: list[str] = []
    closed: datetime | None = None
    refused_partitions: list[str] = []
    partitions: list[str]
    gpu_types: dict[str, int]
    gpus: int | None
    nodes: int | None
    jobs: int | None
    minutes: int | None
    gpu_hours: int | None
    gpus_now: int
    nodes_now: int
    jobs_now: int
    gpu_hours_used: float
    gpu_hours_booked: float


class InvitationOut(BaseModel):
    """Somebody asks me to join a project."""

    number: int
    project: str
    title: str
    by: str
    created: datetime


class PlaceOut(BaseModel):
    """A folder of mine that the portal shows."""

    name: str
    path: str


class EntryOut(BaseModel):
    """Something in a folder. `kind` is `file`, `folder` or `other`.

    Names are bytes to Linux, and not all are text: `key` is the whole path in ASCII, percent-encoded, as
    addresses take it; `name` is for people.
    """

    name: str
    key: str
    kind: str
    size: int
    changed: datetime
    link: bool


class FolderOut(BaseModel):
    """A folder of mine, subfolders first; `more`: it has more entries than these."""

    path: str
    key: str
    entries: list[EntryOut]
    more: bool


class QuotaOut(BaseModel):
    """The quota and the free space of one of my folders, in bytes; `words` says it for people.

    `level` is `near` or `full` where it runs out; `used` and `limit` are of my quota, where there is one.
    """

    name: str
    path: str
    free: int
    used: int | None
    limit: int | None
    level: str
    words: str


class PresetOut(BaseModel):
    """Options of a session that I start often; `link` opens the portal's form filled in with them."""

    number: int
    name: str
    options: SessionOptions
    link: str


class NoticeOut(BaseModel):
    """A notice of the portal's; `link` is the page that it is about."""

    number: int
    kind: str
    text: str
    link: str
    created: datetime
    read: datetime | None


class NoticeKind(BaseModel):
    """A kind of notices, and whether I want them on pages and by mail; `fixed`: on pages always."""

    kind: str
    title: str
    page: bool
    mail: bool
    fixed: bool


class UserOut(BaseModel):
    """A user, as administrators see one."""

    name: str
    email: str
    active: bool
    admin: bool
    joined: datetime
    last_login: datetime | None
    projects: list[str]


class Onboarded(BaseModel):
    """A user who was onboarded: what that took, and the first password of a new portal account."""

    user: UserOut
    password: str
    done: list[str]


class OthersJob(JobOut):
    """A job, and whose it is."""

    user: str


class ChangeOut(BaseModel):
    """A change on record: who changed what, when; `changes` has each field before and after."""

    number: int
    when: datetime
    who: str
    address: str
    action: str
    kind: str
    what: str
    changes: dict[str, list[Any]]


class PolicyOut(BaseModel):
    """A part of the site's limits and policies, with the keys of `carme.toml`."""

    title: str
    values: dict[str, Any]


class Account(BaseModel):
    """Whose token this is, and what it allows.

    `accounts` are Slurm's that your jobs have used; `associations` are those that may pay for new ones, with
    the partitions and the qualities of service for which they may.
    """

    user: str
    email: str
    manager: bool
    accounts: list[str]
    default_account: str | None
    associations: list[Association] = []
    scopes: list[str]
    token_expires: datetime
