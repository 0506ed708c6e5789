"""Batch jobs from the browser and the API: what was requested becomes a request that the broker checks."""

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from django.conf import settings
from django.utils.translation import gettext as _
from pydantic import BaseModel, ConfigDict, Field

from carme.broker import BrokerClient
from carme.errors import InvalidRequest
from carme.jobs import MAXIMUM_MINUTES, JobRequest, StartEstimate, parse_minutes, parse_stages
from carme.jobs.contents import Content, to_bytes
from carme.jobs.directives import directives
from carme.jobs.scripts import check_start, check_text, interpreter, name_of, sent
from carme.jobs.stages import Stage
from carme.scaling import Prediction
from carme.sessions import Extension
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.datasets import datasets_of
from carme_webui.files.quota import check_quota
from carme_webui.images.catalogue import resolved
from carme_webui.notifier import notifier
from carme_webui.scaling import Probe
from carme_webui.sessions.clock import check_extension

__all__ = [
    *("MOST_INPUT", "JobSubmission", "Staged", "Wanted"),
    *("requested_by_script", "estimate", "extend", "like", "sized", "stages_of", "submit", "to_request"),
]

#: Bytes that a job may find in a private file of its owner's home.
MOST_INPUT = 256 << 20

Text = Annotated[str, Field(max_length=4096)]


#: What is to be there before something begins.
Staged = Annotated[
    list[Stage | Text],
    Field(
        max_length=100,
        description="is in $CARME_DATA before it begins; a text is like 'scratch:/data/x' or a dataset",
    ),
]


class JobSubmission(BaseModel):
    """A batch job: exactly one of `script` (its text), `script_path` (in my home, or absolute) and `command`.

    `arguments` follow the script. Memory is in MiB, time in minutes; what is left out, the script's `#SBATCH`
    lines say, else the site decides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: Content | None = Field(
        default=None,
        description="the script, 256 KiB at most: its text, or {'base64': ...} if it is not UTF-8",
    )
    script_path: Text | None = Field(default=None, description="a script in my home, or an absolute path")
    command: list[Text] | None = Field(default=None, description="program and arguments")
    arguments: list[Text] = Field(default=[], max_length=1000)
    name: str | None = None
    image: str | None = Field(default=None, description="none: directly on the node")
    environment: dict[str, str] = {}
    files: dict[str, Content] = Field(default={}, description="lie in $CARME_JOB_FOLDER/files")
    partition: str | None = None
    account: str | None = None
    qos: str | None = Field(default=None, description="none: that of the account")
    nodes: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    cpus_per_node: int | None = None
    memory_mb_per_node: int | None = None
    minutes: int | None = None
    reservation: str | None = None
    array: str | None = Field(
        default=None, description="one job for each of these tasks, like 0-99 or 0-99%4 (four at a time)"
    )
    workdir: str | None = None
    stage: Staged = []
    results: str | None = Field(default=None, description="where what it leaves in $CARME_RESULTS goes")
    prediction: Prediction | None = Field(
        default=None, description="what a probe's result says of these nodes and GPUs; is kept with the job"
    )


#: What `#SBATCH` lines ask for, where the submission calls it otherwise.
_FIELDS = {
    "gpus": "gpus_per_node",
    "cpus": "cpus_per_node",
    "memory": "memory_mb_per_node",
    "time": "minutes",
}


class Wanted(NamedTuple):
    """A request, and the options of its script's `#SBATCH` lines that are ignored."""

    request: JobRequest
    ignored: list[str]


def requested_by_script(text: str) -> tuple[dict[str, Any], list[str]]:
    """What a script's `#SBATCH` lines ask for, by the names of a submission, and what of them is ignored.

    Raises:
        InvalidRequest: One of them cannot be understood.
    """
    found, ignored = directives(text.removeprefix("\ufeff"))
    values: dict[str, Any] = {}
    for option, value in found.items():
        name = _FIELDS.get(option, option)
        if name == "workdir" and not value.startswith("/"):
            ignored.append("--chdir")  # from where it is meant, nobody can know here
        else:
            values[name] = parse_minutes(value) if name == "minutes" else value
    return values, ignored


def _with_directives(requested: JobSubmission, text: str) -> tuple[JobSubmission, list[str]]:
    """What the script asks for itself, where the submission says nothing. Raises InvalidRequest."""
    values, ignored = requested_by_script(text)
    given = {name for name in requested.model_fields_set if getattr(requested, name) is not None}
    if "workdir" in given:
        ignored = [option for option in ignored if option != "--chdir"]
    return requested.model_copy(update={key: values[key] for key in values.keys() - given}), ignored


def sized(submission: JobSubmission) -> JobSubmission:
    """With what its script asks for, as far as that is written here. Raises InvalidRequest."""
    return _with_directives(submission, submission.script)[0] if submission.script is not None else submission


def like(submission: JobSubmission) -> JobRequest:
    """A request of the same size that does nothing, to ask when it would begin. Raises InvalidRequest."""
    names = ("partition", "account", "qos", "nodes", "gpus_per_node", "gpu_type", "cpus_per_node")
    names += ("memory_mb_per_node", "reservation", "array")
    minutes = submission.minutes or settings.SITE.sessions.default_minutes
    values = {name: getattr(submission, name) for name in names} | {"minutes": minutes}
    return JobRequest.read(values | {"name": "estimate", "kind": "batch", "command": ["true"]})


def to_request(
    requested: JobSubmission, user: User, broker: BrokerClient, probe: Probe | None = None
) -> Wanted:
    """The request, its script read as the user where it lies in their home, with its `#SBATCH` lines.

    Args:
        probe: What a form says of a prediction, which is then made for the nodes and GPUs of the request.

    Raises:
        InvalidRequest: With the field, and what is expected.
        CarmeError: The broker does not answer.
    """
    given = [name for name in ("script", "script_path", "command") if getattr(requested, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            _("A job needs exactly one of a script, the path of a script, and a command."),
            _("Give one of 'script', 'script_path' and 'command'."),
            field=given[1] if given else "script",
        )
    files, name, ignored = dict(requested.files), "job", []
    if requested.script is not None:
        command, sent_files = sent(requested.script, requested.arguments)
        files |= sent_files
        requested, ignored = _with_directives(requested, requested.script or "")
    elif requested.script_path is not None:
        found = broker.script(requested.script_path, user=user.username)
        check_text(found.text)
        check_start(requested.script_path, to_bytes(found.text[:4096]))
        command = [*interpreter(to_bytes(found.text[:256])), found.path, *requested.arguments]
        name = name_of(found.path)
        requested, ignored = _with_directives(requested, found.text)
    else:
        command = [*(requested.command or []), *requested.arguments]
        name = name_of(command[0]) if command else name
    values: dict[str, Any] = requested.model_dump(
        exclude={"stage", "script", "script_path", "command", "arguments", "files", "name", "minutes"}
    )
    values["stage"] = [stage.model_dump() for stage in stages_of(requested.stage, user)]
    if probe is not None:
        values["prediction"] = probe.prediction(user, broker, values["nodes"], values["gpus_per_node"])
    request = JobRequest.read(
        values
        | {"kind": "batch", "name": requested.name or name, "command": command, "files": files}
        | {
            "minutes": settings.SITE.sessions.default_minutes
            if requested.minutes is None
            else requested.minutes
        }
    )
    return Wanted(resolved(request, user), ignored)


def stages_of(given: Iterable[Stage | str], user: User) -> list[Stage]:
    """What is to be staged; names are those of the user's own datasets and of the site's.

    Raises:
        InvalidRequest: One of them is not a folder or dataset.
    """
    datasets = datasets_of(user)
    found: list[Stage] = []
    for each in given:
        if isinstance(each, Stage):
            found.append(each)
        else:
            found += parse_stages([each], datasets)
    return found


def _check_booking(request: JobRequest, user: User) -> None:
    """Slurm would refuse it too, in words that help nobody."""
    name = request.reservation
    if name is None:
        return
    row = Booking.open().filter(name=name).first()
    if row is not None and not row.may_be_used_by(user):
        raise InvalidRequest(
            _("This booking is over, or you may not use it."),
            _("Choose another one, or none."),
            field="reservation",
        )


def estimate(request: JobRequest, user: User, broker: BrokerClient) -> StartEstimate:
    """Check a request as a submission would, and ask Slurm when it would begin. Raises CarmeError."""
    _check_booking(request, user)
    check_quota(user)
    return broker.test(request, user=user.username)


def submit(request: JobRequest, user: User, broker: BrokerClient) -> int:
    """Submit a request as the user; the job's number. Raises CarmeError."""
    _check_booking(request, user)
    check_quota(user)
    job_id = broker.submit(request, user=user.username)
    notifier.notify([user.username])
    return job_id


def extend(user: User, job_id: int, minutes: int, broker: BrokerClient, task: int | None = None) -> Extension:
    """Give a running job, or a task of an array, more time.

    Raises:
        InvalidRequest: It does not run, or so much time cannot be had.
        CarmeError: The broker or Slurm refuses.
    """
    check_extension(minutes, MAXIMUM_MINUTES)
    if task is not None:
        job_id = broker.job(job_id, user=user.username, task=task).id
    given = broker.extend(job_id, minutes, user=user.username)
    notifier.notify([user.username])
    return given
