"""The pages of datasets."""

import os
import pwd
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from carme.datasets import Dataset, copies
from carme.errors import CarmeError
from carme.jobs import Node
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.cluster import broker, cluster_cache
from carme_webui.datasets.catalogue import UserDatasets, datasets_of
from carme_webui.datasets.forms import DatasetForm, request_of, suggested
from carme_webui.files.places import path_of_query
from carme_webui.help_links import explained
from carme_webui.jobs import submissions
from carme_webui.sizes import size_words

__all__ = ["add", "dataset_list"]


@require_safe
def dataset_list(request: HttpRequest) -> HttpResponse:
    """The site's and my own, with their newest versions and where I have copies."""
    user = signed_in(request)
    known = datasets_of(user)
    nodes = _nodes()
    shown = [_shown(each, known, user, nodes) for each in known.all()]
    return render(request, "datasets/list.html", {"datasets": shown})


@require_http_methods(["GET", "HEAD", "POST"])
def add(request: HttpRequest) -> HttpResponse:
    """The form that enters a folder or an uploaded archive of mine, and the job that does it."""
    user = signed_in(request)
    if request.method != "POST":
        path = os.fsencode(path_of_query(request)).decode(errors="replace")
        form = DatasetForm(initial={"path": path, "name": suggested(path)})
        return render(request, "datasets/add.html", {"form": form})
    form = DatasetForm(request.POST)
    if form.is_valid():
        try:
            site = broker()
            job_id = submissions.submit(request_of(form, site.cluster(), user.username), user, site)
        except CarmeError as error:
            form.add_error(None, explained(error))
        else:
            messages.success(request, _("This job reads all files; the dataset is there when it has ended."))
            return redirect("job", job_id)
    return render(request, "datasets/add.html", {"form": form}, status=422)


def _nodes() -> list[Node]:
    try:
        return cluster_cache.cluster().nodes
    except CarmeError:
        return []


def _uid(user: User) -> int | None:
    try:
        return pwd.getpwnam(user.username).pw_uid
    except KeyError:  # no Unix account here
        return None


def _shown(dataset: Dataset, known: UserDatasets, user: User, nodes: list[Node]) -> dict[str, Any]:
    newest = dataset.version()
    uid = _uid(user)
    places = copies(dataset, nodes, uid) if uid is not None else {}
    older = [
        {"version": each, "size": size_words(each.size), "copies": places.get(each.digest, [])}
        for each in reversed(dataset.versions[:-1])
    ]
    return {
        "name": dataset.name,
        "title": dataset.title,
        "licence": dataset.licence,
        "newest": newest,
        "size": size_words(newest.size),
        "readers": known.readers(dataset),
        "versions": len(dataset.versions),
        "older": older,
        "site": dataset.site,
        "copies": places.get(newest.digest, []),
    }
