"""Pages of my files."""

import asyncio
import errno
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.errors import CarmeError, InvalidRequest
from carme.files.client import Entry, FileError, Files, Part
from carme_webui.accounts.login import signed_in
from carme_webui.cluster import broker
from carme_webui.files.places import Place, asked_path, asked_value, crumbs, key_of, places_of, shown, within
from carme_webui.files.room import rooms

__all__ = ["delete", "download", "folder", "make", "rename", "room", "upload"]

#: Bytes that the browser sends at once; nginx takes 10 MiB.
PART = 8 << 20
MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class Row:
    """An entry of a folder, as it is shown."""

    entry: Entry
    name: str
    key: str
    changed: datetime


@require_safe
def folder(request: HttpRequest) -> HttpResponse:
    """What is in a folder of mine; my home without one."""
    files = _files(request)
    path = asked_path(request)
    context: dict[str, Any] = {}
    status = 200
    try:
        mine = places_of(files)
        path = within(path or mine[0].path, mine)
        context = {"places": mine, "crumbs": crumbs(path, mine), "key": key_of(path), "part": PART}
        listing = files.show(path)
        context |= {"rows": _rows(path, listing.entries), "more": listing.more}
    except CarmeError as error:
        context["banner"] = str(error)
        status = _status(error)
    return render(request, "files/folder.html", context, status=status)


@require_safe
def room(request: HttpRequest) -> HttpResponse:
    """The part of the dashboard that says how much room I have; empty while nobody knows."""
    try:
        found = rooms(signed_in(request))
    except CarmeError:
        found = []
    return render(request, "files/room.html", {"rooms": found})


@require_safe
def download(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """A file, or the part of it that a browser asks for when it goes on with one.

    See https://www.rfc-editor.org/rfc/rfc9110#name-range-requests.
    """
    files = _files(request)
    try:
        path = within(asked_path(request), places_of(files))
        part = files.read(path)
        tag = f'"{part.size:x}-{int(part.changed * 1e9):x}"'
        asked = _range(request, part.size, tag)
        if asked is not None:
            part.close()
            if asked[0] >= part.size:
                answer = HttpResponse(status=416)
                answer["Content-Range"] = f"bytes */{part.size}"
                return answer
            part = files.read(path, asked[0], asked[1])
    except CarmeError as error:
        return render(request, "files/folder.html", {"banner": str(error)}, status=_status(error))
    name = shown(path.rpartition("/")[2])
    body = _body(part) if request.method == "GET" else _nothing(part)
    answer = StreamingHttpResponse(body, content_type="application/octet-stream")
    answer["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    answer["Content-Length"] = str(part.length)
    answer["Accept-Ranges"] = "bytes"
    answer["ETag"] = tag
    answer["Cache-Control"] = "private, no-store"
    if asked is not None:
        answer.status_code = 206
        answer["Content-Range"] = f"bytes {asked[0]}-{asked[0] + part.length - 1}/{part.size}"
    return answer


@require_http_methods(["GET", "PUT"])
def upload(request: HttpRequest) -> JsonResponse:
    """How far an upload is (GET), or its next part (PUT)."""
    files = _files(request)
    try:
        path = within(asked_path(request), places_of(files))
        name = request.GET.get("id", "")
        if request.method == "GET":
            told = files.begun(path, name)
            return JsonResponse(told.model_dump())
        length = _number(request.META.get("CONTENT_LENGTH"), PART)
        told = files.write(
            path,
            name,
            request,  # pyright: ignore[reportArgumentType] - it has `read`
            offset=_number(request.GET.get("offset"), MOST_BYTES),
            length=length,
            size=_number(request.GET.get("size"), MOST_BYTES),
            replace=request.GET.get("replace") == "1",
        )
    except CarmeError as error:
        return JsonResponse({"message": str(error)}, status=_status(error))
    return JsonResponse(told.model_dump())


@require_POST
def make(request: HttpRequest) -> HttpResponse:
    """A new folder in one of mine."""

    def do(files: Files, path: str, places: list[Place]) -> str:
        files.make(within(f"{path}/{_name(request)}", places))
        return path

    return _change(request, do)


@require_POST
def rename(request: HttpRequest) -> HttpResponse:
    """Another name for something of mine, in the same folder."""

    def do(files: Files, path: str, places: list[Place]) -> str:
        parent = path.rpartition("/")[0] or "/"
        files.move(path, within(f"{parent}/{_name(request)}", places))
        return parent

    return _change(request, do)


@require_http_methods(["GET", "HEAD", "POST"])
def delete(request: HttpRequest) -> HttpResponse:
    """Ask whether to delete something of mine, and delete it."""
    if request.method != "POST":
        try:
            path = within(asked_path(request), places_of(_files(request)))
        except CarmeError as error:
            return render(request, "files/folder.html", {"banner": str(error)}, status=_status(error))
        parent = key_of(path.rpartition("/")[0] or "/")
        context = {"name": shown(path.rpartition("/")[2]), "key": key_of(path), "parent": parent}
        return render(request, "files/delete.html", context)

    def do(files: Files, path: str, places: list[Place]) -> str:
        if any(place.path == path for place in places):
            raise InvalidRequest(_("This folder cannot be deleted."), _("Delete what is in it."))
        files.remove(path)
        return path.rpartition("/")[0] or "/"

    return _change(request, do)


def _files(request: HttpRequest) -> Files:
    return Files(broker(), signed_in(request).username)


def _rows(path: str, entries: list[Entry]) -> list[Row]:
    """Folders first, each by name."""
    ordered = sorted(entries, key=lambda one: (one.kind != "folder", one.name.casefold(), one.name))
    return [
        Row(
            one,
            shown(one.name),
            key_of(f"{path.rstrip('/')}/{one.name}"),
            datetime.fromtimestamp(max(0.0, min(one.changed, 4e9)), UTC),
        )
        for one in ordered
    ]


def _change(request: HttpRequest, do: Any) -> HttpResponse:
    """Do something to the path that a form names, and show the folder that it returns."""
    files = _files(request)
    path = asked_value(request, "path")
    try:
        places = places_of(files)
        path = within(path, places)
        shows = do(files, path, places)
    except CarmeError as error:
        messages.error(request, str(error))
        shows = asked_value(request, "folder") or path
    return redirect(f"{reverse('files')}?path={key_of(shows)}")


def _name(request: HttpRequest) -> str:
    """A new name."""
    name = request.POST.get("name", "")
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


def _status(error: CarmeError) -> int:
    """The HTTP status of a failure."""
    if isinstance(error, FileError):
        return {errno.ENOENT: 404, errno.EACCES: 403, errno.EPERM: 403}.get(error.number, 409)
    return 422 if isinstance(error, InvalidRequest) else 503


def _range(request: HttpRequest, size: int, tag: str) -> tuple[int, int] | None:
    """The offset and length of one range that is asked for; None: all of it."""
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", request.headers.get("Range", ""))
    if found is None or request.headers.get("If-Range", tag) != tag:
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
