"""Images of users' own: how they are named, and what a job needs to know to run in one."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from carme.translation import message as _

__all__ = ["OWN_NAME", "ImageFile", "is_own", "reference"]

#: What a user may call an image; with `@` and the owner it fits wherever an image is named.
OWN_NAME = r"[a-z0-9][a-z0-9_.-]{0,30}"


def _file(text: str) -> str:
    if not PurePosixPath(text).is_absolute() or not text.isprintable() or ":" in text or "," in text:
        raise ValueError(_("must be an absolute path without colons and commas"))
    return text


class ImageFile(BaseModel):
    """A file, and the digest that it must have when a job starts in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Annotated[str, Field(max_length=4096), AfterValidator(_file)]
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


def reference(name: str, owner: str) -> str:
    """How requests name a user's own image."""
    return f"{name}@{owner}"


def is_own(image: str | None) -> bool:
    """Whether an image's name is that of a user's own; `@` is in no name of the site's."""
    return image is not None and "@" in image
