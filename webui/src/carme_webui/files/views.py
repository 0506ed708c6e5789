"""Pages of my files."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO, cast

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.errors import CarmeError
from carme.files.client import Entry, Files
from carme_webui.accounts.login import signed_in
from carme_webui.cluster import broker
from carme_webui.files import services
from carme_webui.files.places import (
    checked_path,
    crumbs,
    key_of,
    path_of_query,
    places_of,
    shown,
    value_of_query,
)
from carme_webui.files.quota import folder_quotas
from carme_webui.help_links import explained
from carme_webui.scaling.probes import is_named_like_result

__all__ = ["delete", "download", "folder", "make", "quota", "rename", "upload"]


@dataclass(frozen=True)
class Row:
    """An entry of a folder, as it is shown."""

    entry: Entry
    name: str
    key: str
    changed: datetime

    @property
    def is_result(self) -> bool:
        """Whether it may be the result of a probe, which the start form takes."""
        return is_named_like_result(self.entry)


@require_safe
def folder(request: HttpRequest) -> HttpResponse:
    """What is in a folder of mine; my home without one."""
    files = _files(request)
    path = path_of_query(request)
    context: dict[str, Any] = {}
    status = 200
    try:
        places = places_of(files)
        path = checked_path(path or places[0].path, places)
        context = {
            "places": places,
            "crumbs": crumbs(path, places),
            "key": key_of(path),
            "part": services.PART,
        }
        listing = files.show(path)
        entries, all_shown = listing.entries, request.GET.get("hidden") == "1"
        visible = [entry for entry in entries if all_shown or not entry.name.startswith(".")]
        context |= {"rows": _rows(path, visible), "more": listing.more, "count": len(entries)}
        context |= {"hidden": len(entries) - len(visible), "all_shown": all_shown}
    except CarmeError as error:
        context["banner"] = explained(error)
        status = services.status_of(error)
    return render(request, "files/folder.html", context, status=status)


@require_safe
def quota(request: HttpRequest) -> HttpResponse:
    """The part of the dashboard that shows my quotas; empty while nobody knows them."""
    try:
        found = folder_quotas(signed_in(request))
    except CarmeError:
        found = []
    return render(request, "files/quota.html", {"quotas": found})


@require_safe
def download(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """A file, or the part of it that a browser asks for when it goes on with one."""
    try:
        return services.content(request, _files(request), path_of_query(request))
    except CarmeError as error:
        return render(
            request, "files/folder.html", {"banner": explained(error)}, status=services.status_of(error)
        )


@require_http_methods(["GET", "PUT"])
def upload(request: HttpRequest) -> JsonResponse:
    """How far an upload is (GET), or its next part (PUT)."""
    files, path, name = _files(request), path_of_query(request), request.GET.get("id", "")
    try:
        if request.method == "GET":
            seen = files.begun(checked_path(path, places_of(files)), name)
        else:
            sent = {key: request.GET.get(key) for key in ("offset", "size")}
            sent["length"] = request.META.get("CONTENT_LENGTH")
            # The request has `read`.
            seen = services.add_part(files, path, name, cast(BinaryIO, request), sent, _replaces(request))
    except CarmeError as error:
        return JsonResponse({"message": str(error)}, status=services.status_of(error))
    return JsonResponse(seen.model_dump())


def _replaces(request: HttpRequest) -> bool:
    return request.GET.get("replace") == "1"


@require_POST
def make(request: HttpRequest) -> HttpResponse:
    """A new folder in one of mine."""

    def do(files: Files, path: str) -> str:
        services.make(files, path, request.POST.get("name", ""))
        return path

    return _change(request, do)


@require_POST
def rename(request: HttpRequest) -> HttpResponse:
    """Another name for something of mine, in the same folder."""

    def do(files: Files, path: str) -> str:
        return services.parent_of(services.rename(files, path, request.POST.get("name", "")))

    return _change(request, do)


@require_http_methods(["GET", "HEAD", "POST"])
def delete(request: HttpRequest) -> HttpResponse:
    """Ask whether to delete something of mine, and delete it."""
    if request.method != "POST":
        try:
            path = checked_path(path_of_query(request), places_of(_files(request)))
        except CarmeError as error:
            return render(
                request, "files/folder.html", {"banner": explained(error)}, status=services.status_of(error)
            )
        parent = key_of(services.parent_of(path))
        context = {"name": shown(path.rpartition("/")[2]), "key": key_of(path), "parent": parent}
        return render(request, "files/delete.html", context)

    return _change(request, services.delete)


def _files(request: HttpRequest) -> Files:
    return Files(broker(), signed_in(request).username)


def _rows(path: str, entries: list[Entry]) -> list[Row]:
    """Folders first, each by name."""
    ordered = sorted(entries, key=lambda entry: (entry.kind != "folder", entry.name.casefold(), entry.name))
    return [
        Row(
            each,
            shown(each.name),
            key_of(f"{path.rstrip('/')}/{each.name}"),
            datetime.fromtimestamp(max(0.0, min(each.changed, 4e9)), UTC),
        )
        for each in ordered
    ]


def _change(request: HttpRequest, do: Callable[[Files, str], str]) -> HttpResponse:
    """Do something to the path that a form names, and show the folder that it returns."""
    path = value_of_query(request, "path")
    try:
        shows = do(_files(request), path)
    except CarmeError as error:
        messages.error(request, explained(error))
        shows = value_of_query(request, "folder") or path
    return redirect(f"{reverse('files')}?path={key_of(shows)}")
