"""What users do with their files, from a page or through the API: the same rules and words."""

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import BinaryIO

from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _

from carme.errors import CarmeError, InvalidRequest
from carme.files.client import FileError, Files, Part, Upload
from carme_webui.files.places import Place, checked_path, places_of, shown

__all__ = [
    *("MOST_BYTES", "PART", "add_part", "content", "delete", "make", "numbers_of", "parent_of", "rename"),
    "status_of",
]

#: Bytes that are sent at once; nginx takes 10 MiB.
PART = 8 << 20
MOST_BYTES = 1 << 50

_STATUS = {errno.ENOENT: HTTPStatus.NOT_FOUND, errno.EACCES: HTTPStatus.FORBIDDEN}
_STATUS |= {errno.EPERM: HTTPStatus.FORBIDDEN}


def status_of(error: CarmeError) -> HTTPStatus:
    """The HTTP status of a failure."""
    if isinstance(error, FileError):
        return _STATUS.get(error.number, HTTPStatus.CONFLICT)
    wrong = isinstance(error, InvalidRequest)
    return HTTPStatus.UNPROCESSABLE_ENTITY if wrong else HTTPStatus.SERVICE_UNAVAILABLE


def parent_of(path: str) -> str:
    """The folder that it is in."""
    return path.rpartition("/")[0] or "/"


def content(request: HttpRequest, files: Files, path: str) -> HttpResponse | StreamingHttpResponse:
    """A file, or the requested part of it.

    See https://www.rfc-editor.org/rfc/rfc9110#name-range-requests. Raises CarmeError.
    """
    path = checked_path(path, places_of(files))
    part = files.read(path)
    tag = f'"{part.size:x}-{int(part.changed * 1e9):x}"'
    requested = _range(request.headers, part.size, tag)
    if requested is not None:
        part.close()
        if requested[0] >= part.size:
            answer = HttpResponse(status=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            answer["Content-Range"] = f"bytes */{part.size}"
            return answer
        part = files.read(path, requested[0], requested[1])
    name = shown(path.rpartition("/")[2])
    body = _body(part) if request.method == "GET" else _nothing(part)
    answer = StreamingHttpResponse(body, content_type="application/octet-stream")
    answer["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    answer["Content-Length"] = str(part.length)
    answer["Accept-Ranges"] = "bytes"
    answer["ETag"] = tag
    answer["Cache-Control"] = "private, no-store"
    if requested is not None:
        answer.status_code = HTTPStatus.PARTIAL_CONTENT
        answer["Content-Range"] = f"bytes {requested[0]}-{requested[0] + part.length - 1}/{part.size}"
    return answer


def add_part(
    files: Files, path: str, upload: str, part: BinaryIO, requested: Mapping[str, str | None], replace: bool
) -> Upload:
    """Add a part to an upload; with the last one the file appears, whole.

    Args:
        upload: What it is called, 32 hexadecimal digits.
        requested: `offset` at which the part belongs, its `length`, and the `size` of the whole, in bytes.

    Raises:
        CarmeError: It does not fit, or may not be.
    """
    path = checked_path(path, places_of(files))
    return files.write(path, upload, part, replace=replace, **numbers_of(requested))


def numbers_of(requested: Mapping[str, str | None]) -> dict[str, int]:
    """Where a part belongs, its length, and that of the whole. Raises InvalidRequest."""
    limits = {"offset": MOST_BYTES, "length": PART, "size": MOST_BYTES}
    return {name: _number(requested[name], most) for name, most in limits.items()}


def make(files: Files, parent: str, name: str) -> str:
    """A new folder in `parent`; its path. Raises CarmeError."""
    places = places_of(files)
    path = checked_path(f"{checked_path(parent, places)}/{_name(name)}", places)
    files.make(path)
    return path


def rename(files: Files, path: str, name: str) -> str:
    """Another name, in the same folder; the new path. Raises CarmeError."""
    places = places_of(files)
    path = checked_path(path, places)
    new = checked_path(f"{parent_of(path)}/{_name(name)}", places)
    files.move(path, new)
    return new


def delete(files: Files, path: str) -> str:
    """A file, or a folder with all that is in it; the folder that it was in. Raises CarmeError."""
    places: list[Place] = places_of(files)
    path = checked_path(path, places)
    if any(place.path == path for place in places):
        raise InvalidRequest(
            _("This folder cannot be deleted."), _("Delete its content first."), field="path"
        )
    files.remove(path)
    return parent_of(path)


def _name(name: str) -> str:
    """A new name. Raises InvalidRequest."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise InvalidRequest(
            _("A name has letters, digits, signs and spaces, but no '/'."),
            _("Write another one."),
            field="name",
        )
    return name


def _number(text: str | None, most: int) -> int:
    if text is None or not re.fullmatch(r"[0-9]{1,16}", text) or int(text) > most:
        raise InvalidRequest(
            _("A number from 0 to %s was expected.") % most, _("Load the page again and send the file again.")
        )
    return int(text)


def _range(headers: Mapping[str, str], size: int, tag: str) -> tuple[int, int] | None:
    """The offset and length of one range that is requested; None: all of it."""
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", headers.get("Range", ""))
    if found is None or headers.get("If-Range", tag) != tag:
        return None  # also more than one range: then all of it is a right answer
    first, last = found.groups()
    if first:
        start, end = int(first), int(last) if last else size - 1
    elif last:
        start, end = max(0, size - int(last)), size - 1
    else:
        return None
    return (start, end - start + 1) if end >= start or start >= size else None


async def _body(part: Part) -> AsyncIterator[bytes]:
    pieces = iter(part)
    try:
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece
    finally:
        part.close()


async def _nothing(part: Part) -> AsyncIterator[bytes]:
    part.close()
    return
    yield b""
