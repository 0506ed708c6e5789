"""My files, for programs: what the pages of files do, by the same rules."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, BinaryIO, cast

from django.http import HttpRequest
from ninja import Router, Status
from ninja.params.functions import Query as QueryValue
from pydantic import BaseModel, ConfigDict, Field

from carme import api as wire
from carme.files.client import Entry, Files, Upload
from carme_webui.api.access import require
from carme_webui.api.answers import GONE, REFUSED, answers
from carme_webui.api.schemas import Words
from carme_webui.cluster import broker
from carme_webui.files import services
from carme_webui.files.places import checked_path, key_of, path_of_query, places_of, shown
from carme_webui.files.quota import folder_quotas

__all__ = ["BYTES", "UploadName", "router"]

router = Router(tags=["files"])

# It is read from the address itself: names are bytes, and not all of them are UTF-8.
PathValue = QueryValue(..., min_length=1, max_length=20_000, description="an absolute path of the cluster")
UploadName = QueryValue(..., alias="id", pattern=r"^[0-9a-f]{32}$", description="32 hexadecimal digits")
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_CONTENT = {
    "responses": {
        200: {"description": "all of it", "content": BYTES},
        206: {"description": "the part that 'Range' names", "content": BYTES},
    }
}


class Named(BaseModel):
    """A name, without its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Words = Field(min_length=1)


def _readable(request: HttpRequest) -> Files:
    return Files(broker(), require(request, "files-read").username)


def _writable(request: HttpRequest) -> Files:
    return Files(broker(), require(request, "files").username)


@router.get("", response=answers(wire.FolderOut, *REFUSED))
def list_files(
    request: HttpRequest,
    path: str = QueryValue("", max_length=20_000, description="an absolute path; my home without one"),
) -> Any:
    """What is in a folder of mine."""
    files = _readable(request)
    places = places_of(files)
    folder = checked_path(path_of_query(request) or places[0].path, places)
    listing = files.show(folder)
    ordered = sorted(listing.entries, key=lambda entry: (entry.kind != "folder", entry.name))
    entries = [_entry(folder, each) for each in ordered]
    return wire.FolderOut(path=shown(folder), key=key_of(folder), entries=entries, more=listing.more)


def _entry(folder: str, entry: Entry) -> wire.EntryOut:
    return wire.EntryOut(
        **entry.model_dump(include={"kind", "size", "link"}),
        name=shown(entry.name),
        key=key_of(f"{folder.rstrip('/')}/{entry.name}"),
        changed=datetime.fromtimestamp(max(0.0, min(entry.changed, 4e9)), UTC),
    )


@router.get("/places", response=answers(list[wire.PlaceOut]))
def list_places(request: HttpRequest) -> Any:
    """The folders that the portal shows, with all that is in them: my home, and the site's."""
    return [wire.PlaceOut(name=place.name, path=place.path) for place in places_of(_readable(request))]


@router.get("/room", response=answers(list[wire.QuotaOut]))
def file_quotas(request: HttpRequest) -> Any:
    """My quotas there, and the free space."""
    found = []
    for folder in folder_quotas(require(request, "files-read")):
        quota = folder.space.quota
        limits = [each for each in (quota.soft, quota.limit) if each] if quota else []
        found.append(
            wire.QuotaOut(
                **{name: getattr(folder, name) for name in ("name", "level", "words")},
                path=folder.space.path,
                free=folder.space.free,
                used=quota.used if quota else None,
                limit=min(limits, default=None),
            )
        )
    return found


@router.get(
    "/content",
    response=answers(None, *REFUSED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE),
    openapi_extra=_CONTENT,
)
def read_file(request: HttpRequest, path: str = PathValue) -> Any:
    """A file of mine, or, by `Range` and `If-Range`, the part of it that is still wanted."""
    return services.content(request, _readable(request), path_of_query(request))


@router.get("/upload", response=answers(Upload, *REFUSED))
def show_upload(request: HttpRequest, path: str = PathValue, name: str = UploadName) -> Any:
    """How far an upload is: the bytes that have arrived, and whether there is a file of that name."""
    files = _writable(request)
    return files.begun(checked_path(path_of_query(request), places_of(files)), name).model_dump()


@router.put(
    "/upload",
    response=answers(Upload, *REFUSED, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra={"requestBody": {"required": True, "content": BYTES}},
)
def send_part(
    request: HttpRequest,
    path: str = PathValue,
    name: str = UploadName,
    offset: int = QueryValue(..., ge=0, le=services.MOST_BYTES, description="where the part belongs"),
    size: int = QueryValue(..., ge=0, le=services.MOST_BYTES, description="all of the file's bytes"),
    replace: bool = QueryValue(False, description="a file of that name may be replaced"),
) -> Any:
    """A part of a file, of 8 MiB at most; with the last one the file appears, whole.

    The `id` is of your own making. What was sent under it can be gone on with later, at `offset` of GET.
    """
    requested = {"offset": str(offset), "size": str(size), "length": request.META.get("CONTENT_LENGTH")}
    files, part = _writable(request), cast(BinaryIO, request)  # a request can be read
    return services.add_part(files, path_of_query(request), name, part, requested, replace).model_dump()


@router.post("/folders", response=answers(wire.PlaceOut, *REFUSED, status=HTTPStatus.CREATED))
def make_folder(request: HttpRequest, requested: Named, path: str = PathValue) -> Any:
    """A new folder in the folder `path`."""
    folder = services.make(_writable(request), path_of_query(request), requested.name)
    return Status(HTTPStatus.CREATED, wire.PlaceOut(name=requested.name, path=shown(folder)))


@router.patch("", response=answers(wire.PlaceOut, *REFUSED))
def rename_file(request: HttpRequest, requested: Named, path: str = PathValue) -> Any:
    """Another name for something of mine, in the same folder."""
    new = services.rename(_writable(request), path_of_query(request), requested.name)
    return wire.PlaceOut(name=requested.name, path=shown(new))


@router.delete("", response=answers(None, *GONE, HTTPStatus.CONFLICT, status=HTTPStatus.NO_CONTENT))
def delete_file(request: HttpRequest, path: str = PathValue) -> Any:
    """Delete a file of mine, or a folder with all that is in it."""
    services.delete(_writable(request), path_of_query(request))
    return Status(HTTPStatus.NO_CONTENT, None)
