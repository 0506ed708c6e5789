"""The image folder: `NAME.sif`, and `NAME.json` beside it."""

import json
import re
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from carme.errors import CarmeError, InvalidRequest
from carme.translation import message as _
from carme.wording import listing

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Image(BaseModel):
    """One image; `entry_points` maps a program of the start form to its title, `packages` have versions."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    title: str
    description: str = ""
    file: Path
    digest: str = ""
    built: datetime | None = None
    entry_points: dict[str, str] = {}
    packages: dict[str, str] = {}


class ImageCatalogue:
    """All images of the site, read from the folder at each call, so that a new image is there at once.

    Args:
        directory: The folder, `settings.images.directory`.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    def names(self) -> list[str]:
        """The names of the images that have both a file and a manifest."""
        return sorted(
            manifest.stem
            for manifest in self.directory.glob("*.json")
            if _NAME.fullmatch(manifest.stem) and manifest.with_suffix(".sif").is_file()
        )

    def get(self, name: str) -> Image:
        """The image called `name`.

        Raises:
            InvalidRequest: There is none; the message lists those that there are.
            CarmeError: Its manifest cannot be read.
        """
        if name not in (names := self.names()):
            raise InvalidRequest(
                _("There is no image {name!r}; there are: {names}.", name=name, names=listing(names)),
                _("Choose one of these.") if names else _("Ask an administrator to build one."),
                field="image",
            )
        manifest = self.directory / f"{name}.json"
        try:
            values = json.loads(manifest.read_text(encoding="utf-8"))
            # The file is the one beside the manifest, whatever the manifest says.
            return Image.model_validate({**values, "name": name, "file": manifest.with_suffix(".sif")})
        except (OSError, ValueError, TypeError) as error:
            raise CarmeError(
                _(
                    "The manifest {manifest} of the image {name!r} cannot be read: {error}.",
                    manifest=manifest,
                    name=name,
                    error=error,
                ),
                _("Build the image again."),
                code="image",
            ) from None
