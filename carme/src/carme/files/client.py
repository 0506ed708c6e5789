"""A user's files, for the services that act for users."""

import errno
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict

from carme.broker.client import BrokerClient, open_files
from carme.datasets import OWN
from carme.errors import BrokerTimeout, BrokerUnavailable, CarmeError
from carme.storage import Limits, Space
from carme.translation import message as _
from carme.translation import noop

__all__ = ["Entry", "FileError", "Files", "Listing", "Part", "Saved", "Upload"]

CHUNK = 1 << 20
#: Seconds without a byte; a file system that hangs must not hold the portal.
PATIENCE = 60.0

_REASONS = {
    errno.ENOENT: (
        noop("There is no {name!r}."),
        noop("It may have been moved or deleted: load the folder again."),
    ),
    errno.ENOTDIR: (noop("{name!r} is not a folder."), noop("Open the folder that holds it.")),
    errno.EISDIR: (noop("{name!r} is a folder."), noop("Choose a file.")),
    errno.EACCES: (noop("You may not do that with {name!r}."), noop("Ask its owner to allow it.")),
    errno.EPERM: (noop("You may not do that with {name!r}."), noop("Ask its owner to allow it.")),
    errno.EEXIST: (
        noop("{name!r} already exists."),
        noop("Choose another name, or replace it."),
    ),
    errno.ENOSPC: (
        noop("There is no space left for {name!r}."),
        noop("Delete what you do not need, and try again."),
    ),
    errno.EDQUOT: (
        noop("Your quota is used up, so {name!r} does not fit."),
        noop("Delete what you do not need."),
    ),
    errno.EROFS: (noop("The file system of {name!r} cannot be written to."), noop("Choose another folder.")),
    errno.ENAMETOOLONG: (
        noop("The name {name!r} is too long."),
        noop("Choose a shorter one, of 255 bytes at most."),
    ),
    errno.ELOOP: (noop("{name!r} is a link that leads in a circle."), noop("Delete the link.")),
}


class FileError(CarmeError):
    """A file cannot be read or changed; `number` is the system's errno, 0 where it has none."""

    default_code = "file"
    number = 0


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Entry(_Answer):
    """Something in a folder: `kind` is `file`, `folder` or `other`; `changed` in seconds since 1970."""

    name: str
    kind: str
    size: int
    changed: float
    link: bool = False


class Listing(_Answer):
    """A folder; `more`: it has more entries than are reported."""

    entries: list[Entry]
    more: bool = False


class Upload(_Answer):
    """How far an upload is: bytes that have arrived, whether that is all, whether its name is taken."""

    offset: int
    done: bool = False
    exists: bool = False


class Saved(Upload):
    """How far a job's input is, and where it lies."""

    path: str


class Part:
    """Bytes of a file on their way; a context manager.

    Attributes:
        size: The whole file's bytes.
        length: Those of this part.
        changed: When the file was changed, in seconds since 1970.
    """

    def __init__(self, connection: socket.socket, stream: BinaryIO, header: dict[str, Any]) -> None:
        self._connection, self._stream = connection, stream
        self.size, self.length, self.changed = header["size"], header["length"], header["changed"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._stream.close()
        self._connection.close()

    def __iter__(self) -> Iterator[bytes]:
        """The bytes. Raises FileError when the file became shorter meanwhile."""
        left = self.length
        while left:
            part = self._stream.read(min(CHUNK, left))
            if not part:
                raise FileError(_("The file became shorter while it was read."), _("Read it again."))
            left -= len(part)
            yield part


class Files:
    """The files of one user, read and changed as that user.

    All methods raise FileError with a sentence for the user, or BrokerUnavailable. Paths are absolute.

    Args:
        patience: Seconds without a byte.
    """

    def __init__(self, broker: BrokerClient, user: str, patience: float = PATIENCE) -> None:
        self._broker, self._user, self._patience = broker, user, patience

    def home(self) -> str:
        """Where the user is at home."""
        return str(self._ask("home")["path"])

    def space(self, paths: list[str]) -> list[Space]:
        """The user's quota and the free space in these folders, as far as they can be read."""
        return [
            Space(**reported | {"quota": Limits(**reported["quota"]) if reported["quota"] else None})
            for reported in self._ask("space", paths=paths)["spaces"]
        ]

    def show(self, path: str) -> Listing:
        """What is in a folder."""
        return Listing.model_validate(self._ask("show", path=path))

    def datasets(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """What is in the user's own catalogue, by name, and who may read the folders that it names."""
        reported = self._ask("datasets", path=OWN)
        return reported["datasets"], reported["readers"]

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Part:
        """Bytes of a file from `offset` on; the caller closes the part."""
        connection, stream, reported = self._begin("read", path=path, offset=offset, length=length)
        return Part(connection, stream, reported)

    def begun(self, path: str, upload: str) -> Upload:
        """How much has arrived of the upload that is called `upload` (32 hexadecimal digits)."""
        return Upload.model_validate(self._ask("begun", path=path, upload=upload))

    def write(
        self, path: str, upload: str, part: BinaryIO, *, offset: int, length: int, size: int, replace: bool
    ) -> Upload:
        """Add a part to an upload. With the last one the file appears, whole.

        Args:
            part: Where `length` bytes are read.
            offset: Where they belong; not beyond what has arrived.
            size: All of the file's bytes.
            replace: Whether a file of that name may be replaced.
        """
        values = {"offset": offset, "size": size, "replace": replace}
        return Upload.model_validate(self._send("write", part, length, path=path, upload=upload, **values))

    def keep(self, name: str, part: BinaryIO, *, offset: int, length: int, size: int) -> Saved:
        """Add a part to what a job is to read; see `write`.

        Args:
            name: 32 hexadecimal digits.
        """
        values = {"offset": offset, "size": size}
        return Saved.model_validate(self._send("keep", part, length, name=name, **values))

    def _send(self, do: str, part: BinaryIO, length: int, **values: Any) -> dict[str, Any]:
        def send(connection: socket.socket) -> None:
            left = length
            while left:
                data = part.read(min(CHUNK, left))
                if not data:
                    raise FileError(_("The upload was interrupted."), _("Continue it."))
                connection.sendall(data)
                left -= len(data)

        connection, stream, reported = self._begin(do, send=send, length=length, **values)
        stream.close()
        connection.close()
        return reported

    def make(self, path: str) -> None:
        """A new folder."""
        self._ask("make", path=path)

    def move(self, path: str, to: str) -> None:
        """Another name or folder; nothing is replaced."""
        self._ask("move", path=path, to=to)

    def copy(self, path: str, to: str, *, shared: bool) -> None:
        """Another file with the same bytes, which all may read when it is `shared`; nothing is replaced."""
        self._ask("copy", path=path, to=to, shared=shared)

    def remove(self, path: str) -> None:
        """A file, a link, or a folder with all that is in it."""
        self._ask("remove", path=path)

    def _ask(self, do: str, **values: Any) -> dict[str, Any]:
        connection, stream, reported = self._begin(do, **values)
        stream.close()
        connection.close()
        return reported

    def _begin(
        self, do: str, send: Any = None, **values: Any
    ) -> tuple[socket.socket, BinaryIO, dict[str, Any]]:
        connection = open_files(self._broker, self._user)
        stream = connection.makefile("rb")
        path = Path(str(values.get("to") or values.get("path", "")))
        try:
            with _answers():
                connection.settimeout(self._patience)
                connection.sendall(json.dumps({"do": do, **values}).encode() + b"\n")
                if send is not None:
                    # One that takes no more has reported why.
                    with suppress(BrokenPipeError, ConnectionResetError):
                        send(connection)
                answer = json.loads(stream.readline() or b"{}")
            if "error" in answer:
                raise _error(answer["error"], answer["message"], path.name or str(path))
            if "ok" not in answer:
                raise BrokerUnavailable(_("Your files cannot be reached."), _("Try again in a moment."))
        except BaseException:
            stream.close()
            connection.close()
            raise
        return connection, stream, answer["ok"]


def _error(number: int, message: str, name: str) -> FileError:
    # Bytes that are not UTF-8 have no place in a sentence.
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    words, remedy = _REASONS.get(number, (f"{{name!r}}: {message.replace('{', '(')}.", ""))
    error = FileError(words.format(name=shown), remedy)
    error.number = number
    return error


@contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise BrokerTimeout(
            _("Your file system does not respond."), _("The file system may hang; try again later.")
        ) from None
    except (OSError, ValueError):
        raise BrokerUnavailable(_("Your files cannot be reached."), _("Try again in a moment.")) from None
