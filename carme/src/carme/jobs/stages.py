"""Data that a job wants near its processors before it begins, and where its results go."""

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from carme.errors import InvalidRequest, NotFound
from carme.translation import message as _
from carme.wording import listing

if TYPE_CHECKING:
    from carme.datasets.models import Dataset

__all__ = [
    "TARGETS",
    "ResultsPath",
    "Stage",
    "check_path",
    "check_text",
    "parse_stages",
    "split_stages",
    "stage_text",
    "stage_words",
]

#: Where a copy can lie, and what that is.
TARGETS = {
    "local": "the node's own disk, kept there for the next job",
    "scratch": "the site's shared scratch",
    "ram": "the node's memory, for as long as the job runs",
    "beeond": "a file system over the disks of the job's nodes, for as long as it runs",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MOST = 16
_PART = re.compile(r'(?:"[^"]*"|[^\s,"])+')


def check_text(text: str) -> str:
    """Refuse bytes that are not UTF-8, which JSON and the portal's pages cannot hold. Raises ValueError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # As Python has them, their bytes are surrogates; people know them as \xe9.
        given = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise ValueError(
            _(
                "must be text in UTF-8, not '{given}'; rename it, or have a script of yours name it",
                given=given[:80],
            )
        ) from None
    return text


def check_path(text: str) -> str:
    """Refuse what is not an absolute path of one line. Raises ValueError."""
    check_text(text)
    if not text.startswith("/"):
        raise ValueError(_("must be an absolute path, not {path!r}", path=text[:80]))
    if any(ord(letter) < 32 for letter in text):
        raise ValueError(
            _("must not have a line end or another control character in it, as {path!r} has", path=text[:80])
        )
    if len(text) > 4096:
        raise ValueError(_("must have at most 4096 characters"))
    return text


def _path(text: str) -> str:
    return check_path(text).rstrip("/") or "/"


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(_("must be 1 to 64 letters, digits, dots, underscores or hyphens"))
    return text


ResultsPath = Annotated[str, AfterValidator(_path)]


class Stage(BaseModel):
    """A folder or file that is copied before the job begins.

    Args:
        source: Where it lies, on all nodes.
        target: Where the copy goes, one of TARGETS.
        name: What the job finds it under, in the folder that `CARME_DATA` names.
        version: The digest of a dataset's version, which never changes; empty: what lies there now.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, AfterValidator(_path)]
    target: Literal["local", "scratch", "ram", "beeond"] = "local"
    name: Annotated[str, AfterValidator(_name)] = ""
    version: str = Field(default="", max_length=140, pattern=r"^[a-z0-9:]*$")

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("name"):
            last = str(values.get("source", "")).rstrip("/").rsplit("/", 1)[-1]
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", last)[:64].lstrip(".-") or "data"
            return values | {"name": name}
        return values

    @property
    def is_ahead(self) -> bool:
        """Whether it is copied before the job begins; else the place is there only with the job."""
        return self.target in ("local", "scratch")

    @property
    def key(self) -> str:
        """What copies of this are known by: 24 hexadecimal digits."""
        text = f"{self.source}\0{self.version}".encode(errors="surrogateescape")
        return hashlib.blake2b(text, digest_size=12).hexdigest()

    def feature(self, uid: int) -> str:
        """The feature of nodes that hold a user's copy."""
        return f"carme_{uid}_{self.key}"


def check_names(stages: list[Stage]) -> list[Stage]:
    """Refuse two of one name, and too many. Raises ValueError."""
    if len(stages) > _MOST:
        raise ValueError(_("must be at most {most}, not {count}", most=_MOST, count=len(stages)))
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(_("names {name!r} twice; give what is to be staged different names", name=name))
    return stages


Stages = Annotated[list[Stage], AfterValidator(check_names)]


class _List(BaseModel):
    stage: Stages = []

    @classmethod
    def of(cls, stages: list[Stage]) -> Self:
        return cls(stage=stages)


class Catalogue(Protocol):
    """Where names of datasets are looked up: `carme.datasets.Datasets`."""

    def get(self, name: str) -> "Dataset":
        """The dataset of this name. Raises NotFound."""
        ...


def parse_stages(parts: str | Iterable[str], datasets: Catalogue) -> list[Stage]:
    """What `scratch:/data/imagenet mnist ram:cifar@1a2b3c "/data/of me"` asks for.

    Args:
        parts: Each is an absolute path or a dataset's name (with `@` and the beginning of a version's digest,
            else its newest), with a target and a colon in front or without. In one text they have space or
            commas between them, and double quotes around those that hold such characters.
        datasets: Where names are looked up.

    Raises:
        InvalidRequest: In one sentence what is wrong with which part.
    """
    stages = []
    for part in split_stages(parts) if isinstance(parts, str) else parts:
        target, colon, rest = part.partition(":")
        if not colon or target.startswith("/"):
            target, rest = "local", part
        if target not in TARGETS:
            raise InvalidRequest(
                _(
                    "{part!r} names the target {target!r}; there are: {targets}.",
                    part=part,
                    target=target,
                    targets=listing(TARGETS),
                ),
                _("Write for example scratch:/data/imagenet."),
                field="stage",
            )
        if rest.startswith("/"):
            source, name, version = rest, "", ""
        else:
            name, _at, wanted = rest.partition("@")
            try:
                known = datasets.get(name).version(wanted)
            except NotFound as error:
                raise InvalidRequest(error.message, error.remedy, field="stage") from None
            source, version = known.path, known.digest
        try:
            stages.append(Stage.model_validate(
                {"source": source, "target": target, "name": name, "version": version}
            ))  # fmt: skip
            _List.of(stages)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise InvalidRequest(
                _("{part!r} cannot be staged: it {why}.", part=part, why=why),
                _("Name an absolute path or a dataset; 'carme datasets' lists them."),
                field="stage",
            ) from None
    return stages


def split_stages(text: str) -> list[str]:
    """The parts of a text for `parse_stages`. Raises InvalidRequest."""
    if text.count('"') % 2:
        raise InvalidRequest(
            _("A quotation mark is not closed."), _("Close it, or name one folder alone."), field="stage"
        )
    return [part.replace('"', "") for part in _PART.findall(text)]


def stage_words(stages: Iterable[Stage]) -> list[str]:
    """What `parse_stages` reads, as far as text can hold it; datasets by their paths."""
    return [f"{stage.target}:{stage.source}" for stage in stages]


def stage_text(stages: Iterable[Stage]) -> str:
    """The same as one text."""
    return " ".join(f'"{word}"' if re.search(r"[\s,]", word) else word for word in stage_words(stages))
