"""What a user asks for."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from carme.accounts import is_account_name
from carme.errors import InvalidRequest
from carme.images.user_images import ImageFile, is_own
from carme.jobs.arrays import Tasks
from carme.jobs.contents import Content
from carme.jobs.stages import ResultsPath, Stages, check_path, check_text
from carme.scaling.predictions import Prediction
from carme.translation import message as _
from carme.wording import nearest, place, problem

_NAME = re.compile(r"[A-Za-z0-9._ -]{1,64}")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MAXIMUM_MINUTES = 366 * 1440
#: Errors about a field that a model, or a dataclass, does not have.
UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")
#: Letters of an image's name, with its owner's.
MAXIMUM_IMAGE = 128


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(_("must be 1 to 64 letters, digits, dots, underscores, spaces or hyphens"))
    return text


def _check_word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise ValueError(_("must be 1 to 64 letters, digits, dots, underscores or hyphens"))
    return text


def _image(text: str) -> str:
    name, at, owner = text.partition("@")
    _check_word(name)
    if at and not is_account_name(owner):
        raise ValueError(_("must be an image's name, or one with '@' and its owner"))
    if len(text) > MAXIMUM_IMAGE:
        raise ValueError(_("must be at most {most} characters", most=MAXIMUM_IMAGE))
    return text


def _printable(text: str) -> str:
    if "\0" in text:
        raise ValueError(_("must not contain a NUL character"))
    return check_text(text)


def _environment(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                _("has a variable {name!r}; names are letters, digits and underscores", name=name[:64])
            )
        if "\0" in value:
            raise ValueError(_("must not contain a NUL character in the value of {name}", name=name))
        check_text(value)
    return values


def _files(files: dict[str, str]) -> dict[str, str]:
    for name in files:
        if not _WORD.fullmatch(name):
            raise ValueError(
                _(
                    "has a file {name!r}; names are letters, digits, dots, underscores, hyphens",
                    name=name[:64],
                )
            )
    return files


Word = Annotated[str, AfterValidator(_check_word)]
#: An image of the site, `torch`, or of a user's own, `torch-mine@alice`.
ImageName = Annotated[str, AfterValidator(_image)]
Argument = Annotated[str, AfterValidator(_printable)]
#: Processors and memory (MiB) on each node; None: the share of its GPUs.
Cpus = Annotated[int | None, Field(ge=1, le=65_536)]
Memory = Annotated[int | None, Field(ge=1, le=2**31 - 1)]


class _Requested(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, data: Mapping[str, Any] | str | bytes) -> Self:
        """The model of `data` (a mapping or JSON).

        Raises:
            InvalidRequest: In one sentence, with the field, what is wrong and what was expected.
        """
        try:
            if isinstance(data, str | bytes):
                return cls.model_validate_json(data)
            return cls.model_validate(data)
        except ValidationError as error:
            raise refusal(error, cls) from None


def refusal(error: ValidationError, model: type[Any], skip: int = 0) -> InvalidRequest:
    """The first wrong place of a request, as the error that its sender reads.

    Args:
        model: What the request was to be: a model, or a dataclass of pydantic.
        skip: How many outer parts of the place belong to the envelope, not to the model.
    """
    detail = error.errors()[0]
    detail["loc"] = detail["loc"][skip:]
    field = place(detail)
    if detail["type"] in UNKNOWN_FIELD:
        return InvalidRequest(
            _("There is no field {field!r} in a request.", field=field),
            nearest(str(detail["loc"][-1]), model.__pydantic_fields__),
            field=field,
        )
    subject = repr(field) if field else _("The request")
    return InvalidRequest(problem(detail, subject), _("Correct it and ask again."), field=field or None)


class Resources(_Requested):
    """What a job or a session gets, and what is copied for it.

    Memory is in MiB (2**20 bytes), as in Slurm. Processors and memory that are not named follow from the
    share of the node's GPUs: `carme.jobs.share`. `account` pays, with the quality of service `qos`; None
    leaves them to the site and to Slurm. `reservation` is the name of the booking to run in.

    What `stage` names is there, in the folder that `CARME_DATA` names, before the command runs. What the job
    leaves in the folder that `CARME_RESULTS` names is copied to `results` when it has ended, however it did.

    `prediction` is what a probe's result says of these nodes and GPUs; it is stored with the job.
    """

    image_file: ImageFile | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    nodes: int = Field(default=1, ge=1, le=100_000)
    gpus_per_node: int = Field(default=0, ge=0, le=1024)
    gpu_type: Word | None = None
    cpus_per_node: Cpus = None
    memory_mb_per_node: Memory = None
    minutes: int = Field(ge=1, le=MAXIMUM_MINUTES)
    reservation: Word | None = None
    stage: Stages = []
    results: ResultsPath | None = None
    prediction: Prediction | None = None


class JobRequest(Resources):
    """What a user asks for.

    `environment` and `files` may hold secrets: they never leave the job's private folder. `files` (name to
    content) lie in `files/` of that folder, which the job finds by `CARME_JOB_FOLDER`, byte
    for byte.

    `image` is one of the site's, or a user's own one; then `image_file` says where that lies.

    `array` makes it an array: one job for each of these tasks, alike but for `SLURM_ARRAY_TASK_ID`; what a
    task leaves goes to a folder of its number in `results`.
    """

    name: Annotated[str, AfterValidator(_name)]
    kind: Literal["session", "batch"]
    image: ImageName | None = None
    command: list[Argument] = Field(min_length=1)
    environment: Annotated[dict[str, str], AfterValidator(_environment)] = {}
    files: Annotated[dict[str, Content], AfterValidator(_files)] = {}
    array: Tasks | None = None
    workdir: Annotated[str, AfterValidator(check_path)] | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.kind == "session" and self.image is None:
            raise ValueError(_("for a session must name an image"))
        if self.kind == "session" and self.array is not None:
            raise ValueError(_("for a session must not be an array"))
        if not self.command[0]:
            raise ValueError(_("must have a program as the first word of its command"))
        _check_file(self.image, self.image_file)
        return self


def _check_file(image: str | None, file: ImageFile | None) -> None:
    # A file must not go by the name of one of the site's images.
    if file is not None and not is_own(image):
        raise ValueError(_("names a file for an image that is not a user's own, like torch-mine@alice"))


class SessionOptions(Resources):
    """What the start form and JupyterHub's `user_options` hold; `app` is the image's entry point to open.

    `account` is a project's, one of the user's own in Slurm, or None for the site's default one. The portal
    fills in `image_file` when a session in a user's own image is started.
    """

    image: ImageName
    title: str = Field(default="", max_length=80)
    app: Word = "lab"

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        _check_file(self.image, self.image_file)
        return self

    def request(
        self,
        *,
        name: str,
        command: list[str],
        environment: dict[str, str],
        files: Mapping[str, str] | None = None,
    ) -> JobRequest:
        """The job that gives this session."""
        return JobRequest(
            name=name,
            kind="session",
            image=self.image,
            command=command,
            environment=environment,
            files=dict(files or {}),
            **{field: getattr(self, field) for field in Resources.model_fields},
        )
