"""Images from a program: those that can be used, and own ones that are built."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from carme import api
from carme.client.connection import Connection
from carme.client.jobs import Job
from carme.client.remote_object import RemoteObject, wait_until
from carme.errors import InvalidRequest
from carme.translation import message as _

__all__ = ["Image", "Images"]


class Image(RemoteObject[api.ImageBuild]):
    """An own image of mine, or one that a project of mine shares."""

    def __repr__(self) -> str:
        return f"<Image {self.reference} {self._known.state}>"

    @property
    def reference(self) -> str:
        """What sessions and jobs name as `image`."""
        return self._known.reference

    def info(self) -> api.ImageBuild:
        """What is known of it now."""
        if self._known.state == "building":
            self._is(self._connection.ask("GET", f"images/own/{self.reference}"))
        return self._known

    @property
    def job(self) -> Job | None:
        """The job that builds it, for its log; of an image of mine."""
        return Job(self._connection, self._known.job_id) if self._known.job_id else None

    def wait(self, timeout: float | None = None) -> api.ImageBuild:
        """Wait until it is ready, or its build has failed: see `state` and `problem`.

        Raises:
            TimeoutError: It is being built after `timeout` seconds.
        """
        wait_until(
            lambda: self.info().state != "building",
            lambda: f"The image {self.reference} is still being built after {timeout:g} s.",
            timeout,
        )
        return self._known

    def share(self, project: str = "", *, folder: str = "") -> api.ImageBuild:
        """Let the members of a project of mine use it; without a project, nobody else any more.

        Args:
            folder: Where its file goes, by default where it is; the members must be able to read it.

        Raises:
            InvalidRequest: With the field, and what is expected.
        """
        requested = {"project": project, "folder": folder}
        return self._is(self._connection.ask("PUT", f"images/own/{self.reference}/share", requested))

    def delete(self) -> None:
        """Delete it with its file; a build is ended."""
        self._connection.ask("DELETE", f"images/own/{self.reference}")


class Images:
    """Images that I can use, and my own ones."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self) -> list[api.ImageOut]:
        """What sessions and jobs can run in."""
        return [api.ImageOut.model_validate(each) for each in self._connection.ask("GET", "images")]

    def details(self, name: str) -> api.ImageDetails:
        """One of them, with its packages. Raises NotFound."""
        reported = self._connection.ask("GET", f"images/at/{quote(name, safe='')}")
        return api.ImageDetails.model_validate(reported)

    def build(
        self,
        name: str,
        *,
        requirements: list[str] | str | Path | None = None,
        definition: str | Path | None = None,
        base: str = "",
        title: str = "",
        folder: str = "",
        project: str = "",
    ) -> Image:
        """Have a batch job of mine build an image.

        Args:
            requirements: Packages for pip, or the path of a file that lists them.
            definition: The path of an Apptainer definition file.
            base: The site's image on which the packages are installed.
            folder: Where it goes; by default into my home.
            project: Whose members may use it; needs a folder that they can read.

        Raises:
            InvalidRequest: With the field, and what is expected.
        """
        if (requirements is None) == (definition is None):
            raise InvalidRequest(
                _("An image is built either from requirements or from a definition."),
                _("Give one of the two."),
                field="kind",
            )
        if isinstance(requirements, list):
            text = "\n".join(requirements) + "\n"
        else:
            text = _read(Path(str(requirements if definition is None else definition)))
        requested = {"name": name, "kind": "definition" if definition is not None else "requirements"}
        requested |= {"text": text, "base": base, "title": title, "folder": folder, "project": project}
        return self._image(self._connection.ask("POST", "images/own", requested))

    def get(self, reference: str) -> Image:
        """One of mine by its name, or another's as `name@owner`. Raises NotFound."""
        return self._image(self._connection.ask("GET", f"images/own/{reference}"))

    def list(self) -> list[Image]:
        """Those that I have built, and those that projects of mine share."""
        return [self._image(each) for each in self._connection.ask("GET", "images/own")]

    def _image(self, found: object) -> Image:
        return Image(self._connection, api.ImageBuild.model_validate(found))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            _(
                "The file {path!r} cannot be read: {why}.",
                path=str(path),
                why=getattr(error, "strerror", None) or error,
            ),
            _("Name a text file of this computer."),
            field="text",
        ) from None
