"""The portal without optimisations of its own: a Django app of `./test bench portal --without` alone.

`CARME_BENCH_WITHOUT` names what is left out: `cache`, so that each page asks the broker itself;
`object-cache`, so that Django's own cache in memory pickles what it holds (`portal_without_settings.py`);
`derived`, so that each page computes what it needs of the snapshots; `entrance`, so that nginx's question who
may enter goes through Django's middleware to a view, in a thread of the pages.
"""

import functools
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from unittest.mock import patch

from django.apps import AppConfig
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.urls import path

__all__ = ["VARIABLE", "Without", "ask_each_time", "compute_each_time", "enter_as_page", "enter_view"]

VARIABLE = "CARME_BENCH_WITHOUT"


class Without(AppConfig):
    """The last of the site's apps, as it changes what others have."""

    name = "portal_without"

    def ready(self) -> None:
        names = os.environ.get(VARIABLE, "").split(",")
        if "cache" in names:
            from carme_webui.cluster import ClusterCache

            patch.object(ClusterCache, "_cached", ask_each_time).start()
        if "derived" in names:
            from carme_webui.caches import DerivedValues

            patch.object(DerivedValues, "get", compute_each_time).start()
        if "entrance" in names:
            from carme_webui.accounts import entrance

            patch.object(entrance, "enter", enter_as_page).start()


def ask_each_time(_cluster: Any, _name: str, ask: Callable[[], Any], **_how_long: Any) -> Any:
    """In place of `ClusterCache._cached`: what the broker answers now."""
    return ask()


def compute_each_time(_values: Any, source: Any, _key: Any, make: Callable[[Any], Any]) -> Any:
    """In place of `DerivedValues.get`: what is made of an object now."""
    return make(source)


async def enter_as_page(
    scope: MutableMapping[str, Any], send: Callable[[MutableMapping[str, Any]], Awaitable[None]]
) -> None:
    """In place of `entrance.enter`: answer nginx as a page is answered."""
    await _pages()(scope, _no_body, send)


@functools.cache
def _pages() -> Any:
    """The portal's pages with the view among them; its addresses cannot be read before Django is set up."""
    from carme_webui import urls
    from carme_webui.asgi import pages

    urls.urlpatterns.insert(0, path("internal/enter", enter_view))
    return pages


async def _no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


@login_not_required
def enter_view(request: HttpRequest) -> HttpResponse:
    """What `entrance.admit` says, by the user whom Django's middleware knows."""
    from carme_webui.accounts.entrance import owner_of

    owner = owner_of(request.headers.get("X-Original-URI", ""), settings.SITE.hub.base_path)
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if owner is None:
        status = HTTPStatus.FORBIDDEN
    elif scheme.lower() in ("token", "bearer") and token.strip():
        status = HTTPStatus.NO_CONTENT
    elif not request.user.is_authenticated:
        status = HTTPStatus.UNAUTHORIZED
    else:
        is_own = request.user.get_username() == owner
        status = HTTPStatus.NO_CONTENT if is_own else HTTPStatus.FORBIDDEN
    return HttpResponse(status=status)
