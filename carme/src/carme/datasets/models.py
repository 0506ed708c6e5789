"""A dataset and its versions. This module needs nothing of `carme.jobs`, whose stages name datasets."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from carme.errors import NotFound
from carme.translation import message as _
from carme.wording import listing

__all__ = ["Dataset", "Version"]

_SHORTEST = 6  # digits of a digest that name a version


class Version(BaseModel):
    """A folder's contents at one time. `digest` is over paths, sizes and contents; `size` is in bytes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    digest: str = Field(pattern=r"^[a-z0-9]+:[0-9a-f]{16,128}$")
    path: str
    files: int = Field(ge=0)
    size: int = Field(ge=0)
    added: datetime

    @property
    def short(self) -> str:
        """The digits that people use."""
        return self.digest.partition(":")[2][:12]


class Dataset(BaseModel):
    """A name with its versions, the newest last."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    title: str = ""
    licence: str = ""
    versions: list[Version] = Field(min_length=1)
    site: bool = False

    def version(self, wanted: str = "") -> Version:
        """The newest version, or the one whose digest begins so.

        Raises:
            NotFound: There is none.
        """
        if not wanted:
            return self.versions[-1]
        found = [each for each in self.versions if each.digest.partition(":")[2].startswith(wanted)]
        if len(found) != 1 or len(wanted) < _SHORTEST:
            raise NotFound(
                _(
                    "The dataset {value_name!r} has no version {wanted!r}; it has: {short}.",
                    value_name=self.name,
                    wanted=wanted,
                    short=listing([each.short for each in self.versions]),
                ),
                _(
                    "Name at least {shortest} digits of one of these, or leave it out for the newest.",
                    shortest=_SHORTEST,
                ),
            )
        return found[0]
