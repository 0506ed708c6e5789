"""My files on the cluster, from a program: sent in parts, and gone on with after an interruption."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

from carme import api
from carme.client.connection import Connection
from carme.errors import CarmeError, InvalidRequest
from carme.translation import message as _

__all__ = ["Files"]

PART = 8 << 20
CHUNK = 1 << 20
PARTIAL_CONTENT = 206
#: Called with the bytes that have arrived, and with all of them.
Progress = Callable[[int, int], object]


class Files:
    """The folders that the portal shows: my home, and the site's.

    Paths are absolute ones of the cluster. All methods raise what the portal refuses: `NotFound`, `Denied`,
    `InvalidRequest`, and `SlurmError` for what is in the way, such as a full disk.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self, path: str | None = None) -> api.FolderOut:
        """What is in a folder; in my home without one."""
        return api.FolderOut.model_validate(self._connection.ask("GET", _with_query("files", path)))

    def places(self) -> list[api.PlaceOut]:
        """The folders that the portal shows, with all that is in them."""
        return [api.PlaceOut.model_validate(each) for each in self._connection.ask("GET", "files/places")]

    def quotas(self) -> list[api.QuotaOut]:
        """My quotas there, and the free space."""
        return [api.QuotaOut.model_validate(each) for each in self._connection.ask("GET", "files/room")]

    def room(self) -> list[api.QuotaOut]:
        """The earlier name of `quotas`."""
        warnings.warn("files.room is files.quotas now. Use that.", DeprecationWarning, stacklevel=2)
        return self.quotas()

    def upload(
        self, file: str | Path, path: str, *, replace: bool = False, progress: Progress | None = None
    ) -> str:
        """Send a file of this computer; called again after an interruption, it goes on where it was.

        Args:
            file: The file.
            path: Where it goes: its new path, or, with a `/` at the end, the folder.
            replace: Whether a file of that name may be replaced.

        Returns:
            The path of the new file, which appears when all of it has arrived.

        Raises:
            InvalidRequest: The file cannot be read, or changed while it was sent.
        """
        file = Path(file)
        path = path + file.name if path.endswith("/") else path
        try:
            with file.open("rb") as stream:
                state = os.fstat(stream.fileno())
                # The same file sent to the same place is the same upload.
                known = f"{file.resolve()}\0{path}\0{state.st_size}\0{state.st_mtime_ns}"
                upload = hashlib.sha256(os.fsencode(known)).hexdigest()[:32]
                reported = self._connection.ask("GET", _with_query("files/upload", path, id=upload))
                if reported["exists"] and not replace:
                    raise InvalidRequest(
                        _("{path!r} already exists.", path=path),
                        _("Choose another name, or replace it."),
                        field="path",
                    )
                offset = min(reported["offset"], state.st_size)
                while True:
                    stream.seek(offset)
                    data = stream.read(min(PART, state.st_size - offset))
                    if not data and offset < state.st_size:
                        raise InvalidRequest(
                            _("The file {file!r} became shorter while it was sent.", file=str(file)),
                            _("Send it again."),
                        )
                    query = {"id": upload, "offset": offset, "size": state.st_size, "replace": int(replace)}
                    reported = self._connection.send("files/upload", data, _query(path, **query))
                    offset = reported["offset"]
                    if progress is not None:
                        progress(offset, state.st_size)
                    if reported["done"]:
                        return path
        except OSError as error:
            raise InvalidRequest(
                _(
                    "The file {file!r} cannot be read: {why}.",
                    file=str(file),
                    why=error.strerror,
                ),
                _("Name a file of this computer."),
                field="file",
            ) from None

    def download(
        self,
        path: str,
        file: str | Path | None = None,
        *,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> Path:
        """Fetch a file; called again after an interruption, it goes on where it was.

        Args:
            path: The file on the cluster.
            file: Where it goes on this computer: a file or a folder; by default here under its own name.

        Returns:
            The file, which appears when all of it is there.

        Raises:
            InvalidRequest: There is such a file here already, or it cannot be written.
        """
        into = Path(file if file is not None else ".")
        into = into / path.rpartition("/")[2] if into.is_dir() else into
        if into.exists() and not replace:
            raise InvalidRequest(
                _("The file {into!r} already exists here.", into=str(into)),
                _("Choose another name."),
                field="file",
            )
        partial = into.with_name(f"{into.name}.carme-partial")
        mark = into.with_name(f"{into.name}.carme-mark")
        try:
            self._fetch(path, partial, mark, progress)
            partial.replace(into)
            mark.unlink()
        except OSError as error:
            raise InvalidRequest(
                _("The file {into!r} cannot be written: {why}.", into=str(into), why=error.strerror),
                _("Free some space, or choose another folder."),
                field="file",
            ) from None
        return into

    def make_folder(self, path: str) -> str:
        """A new folder; its path."""
        parent, _slash, name = path.rstrip("/").rpartition("/")
        found = self._connection.ask("POST", _with_query("files/folders", parent or "/"), {"name": name})
        return api.PlaceOut.model_validate(found).path

    def rename(self, path: str, name: str) -> str:
        """Another name, in the same folder; the new path."""
        found = self._connection.ask("PATCH", _with_query("files", path), {"name": name})
        return api.PlaceOut.model_validate(found).path

    def delete(self, path: str) -> None:
        """A file, or a folder with all that is in it."""
        self._connection.ask("DELETE", _with_query("files", path))

    def _fetch(self, path: str, partial: Path, mark: Path, progress: Progress | None) -> None:
        """Bring `partial` to the whole file; `mark` names the file's version that the part is of."""
        # A link that somebody put there would lead the bytes elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(partial, flags, 0o600), "r+b") as stream:
            # The last byte once more, so that there is always something to ask for.
            have = max(0, stream.seek(0, os.SEEK_END) - 1)
            known = mark.read_text("ascii") if have and mark.exists() else ""
            headers = {"Range": f"bytes={have}-", "If-Range": known} if known else {}
            with self._connection.fetch("files/content", _query(path), headers) as answer:
                if answer.status_code != PARTIAL_CONTENT:
                    have = 0
                    mark.write_text(answer.headers["ETag"], "ascii")
                stream.seek(have)
                stream.truncate()
                size = have + int(answer.headers["Content-Length"])
                for piece in answer.iter_raw(CHUNK):
                    stream.write(piece)
                    have += len(piece)
                    if progress is not None:
                        progress(have, size)
        if have != size:
            raise CarmeError(
                _("Only {have} of {size} bytes of {path!r} have arrived.", have=have, size=size, path=path),
                _("Fetch it again."),
            )


def _query(path: str, **values: object) -> str:
    """Names are bytes to Linux, and not all are UTF-8: `os.fsdecode` made text of them."""
    return urlencode({"path": os.fsencode(path), **values})


def _with_query(address: str, path: str | None, **values: object) -> str:
    return f"{address}?{_query(path, **values)}" if path is not None else address
