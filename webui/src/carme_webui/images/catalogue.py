"""What a user may start something in: the site's images, and own ones."""

from pathlib import Path
from typing import TypeVar

from django.conf import settings
from django.utils.translation import gettext as _

from carme.errors import InvalidRequest
from carme.images import Image, ImageCatalogue, is_own
from carme.jobs import JobRequest, SessionOptions
from carme_webui.accounts.models import User
from carme_webui.images.models import OwnImage

__all__ = ["UserImages", "images_of", "resolved"]

Requested = TypeVar("Requested", SessionOptions, JobRequest)


class UserImages(ImageCatalogue):
    """The site's images, then those of the user's own and of the user's projects that are ready."""

    def __init__(self, directory: Path, user: User) -> None:
        super().__init__(directory)
        #: By the names that requests use.
        self.own = {row.reference: row for row in OwnImage.ready(user)}

    def names(self) -> list[str]:
        return [*super().names(), *self.own]

    def get(self, name: str) -> Image:
        if not is_own(name):
            return super().get(name)
        row = self.own.get(name)
        if row is None:
            raise InvalidRequest(
                _("There is no image %r that you may use.") % name,
                _("Choose another one, or build it."),
                field="image",
            )
        return Image(
            name=name,
            title=row.heading if row.heading == row.name else f"{row.heading} ({row.reference})",
            description=row.description,
            file=Path(row.file),
            digest=row.digest,
            built=row.built,
            entry_points=row.entry_points,
            packages=row.packages,
        )


def images_of(user: User) -> UserImages:
    """What this user may start something in."""
    return UserImages(settings.SITE.images.directory, user)


def resolved(requested: Requested, user: User) -> Requested:
    """With the file and the digest of an own image, looked up now: sharing may have ended.

    Raises:
        InvalidRequest: There is no such image, or the user may not use it.
    """
    file = None
    if is_own(requested.image):
        catalogue = images_of(user)
        catalogue.get(requested.image or "")
        file = catalogue.own[requested.image or ""].image_file
    return requested.model_copy(update={"image_file": file})
