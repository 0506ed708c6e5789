"""The page of the site's datasets."""

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from carme.datasets import Datasets, readers
from carme.staging.progress import size

__all__ = ["dataset_list"]


@require_safe
def dataset_list(request: HttpRequest) -> HttpResponse:
    """All of them, with their newest versions."""
    found = Datasets(settings.SITE.staging.datasets).all()
    return render(request, "datasets/list.html", {"datasets": [_shown(one) for one in found]})


def _shown(one: Any) -> dict[str, Any]:
    newest = one.version()
    return {
        "name": one.name,
        "title": one.title,
        "licence": one.licence,
        "newest": newest,
        "size": size(newest.size),
        "readers": readers(newest.path),
        "versions": one.versions,
    }
