"""What all pages share, and the pages for errors."""

from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import SafeString
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from carme_webui.accounts.models import User
from carme_webui.announcements.models import upcoming_maintenance
from carme_webui.profile.notices import unread

__all__ = [
    "bad_request",
    "csrf_failure",
    "forbidden",
    "keep_refused",
    "not_found",
    "refused_reason",
    "report_freed",
    "server_error",
    "site",
    "wanted_words",
    "without_empty_refusals",
]

#: The parts of the portal that the help page has sections for, as their addresses begin.
HELP_SECTIONS = frozenset(
    {"sessions", "jobs", "bookings", "files", "images", "datasets", "projects", "profile", "tokens", "admin"}
)


def site(request: HttpRequest) -> dict[str, Any]:
    """Context of every page: the site's name, how it looks, what waits to be read, maintenance to come."""
    user = getattr(request, "user", None)
    count = SimpleLazyObject(lambda: unread(user) if isinstance(user, User) else 0)
    theme = user.theme if isinstance(user, User) else ""
    near = SimpleLazyObject(lambda: upcoming_maintenance() if isinstance(user, User) else [])
    return {
        "site_name": settings.SITE.site.name,
        "unread": count,
        "theme": theme,
        "own_zone": user.time_zone if isinstance(user, User) else "",
        "upcoming_maintenance": near,
        "navigation": SimpleLazyObject(
            lambda: _navigation(_current_section(request), bool(user and user.is_staff), get_language())
        ),
        "help_section": f"#{_current_section(request)}" if _current_section(request) in HELP_SECTIONS else "",
        "outside": settings.SITE.oidc.name if settings.SITE.oidc.issuer else "",
    }


def _current_section(request: HttpRequest) -> str:
    """The first part of the page's address; empty for the dashboard, and for what is not a page."""
    match = request.resolver_match
    return match.route.partition("/")[0] if match else ""


@lru_cache(maxsize=256)
def _navigation(here: str, staff: bool, language: str | None) -> SafeString:
    """The links to the main pages, one of them marked; the same for all readers of a language."""
    return render_to_string("parts/navigation.html", {"here": here, "staff": staff})


def wanted_words(request: HttpRequest, name: str, most: int) -> str:
    """What somebody looks for by a form, at most so many characters; PostgreSQL takes no NUL in a text."""
    return request.GET.get(name, "").replace("\0", "").strip()[:most]


def keep_refused(request: HttpRequest, page: str, name: str, reason: str) -> None:
    """Keep the reason that was written into a form that is refused, for the page that has the form.

    It is not in the page's address: that is logged, and a link of somebody else's could have one.

    Args:
        page: The page's name.
        name: Of what the form is about, such as a node: the page has several.
    """
    request.session[f"refused:{page}"] = {"name": name, "reason": reason[:200]}


def refused_reason(request: HttpRequest, page: str) -> dict[str, str]:
    """What `keep_refused` has kept for this page, once: name and reason; empty without it."""
    return request.session.pop(f"refused:{page}", {})


def report_freed(request: HttpRequest, freed: bool, done: str, free: str) -> None:
    """Say that something with a reservation is cancelled, also where Slurm has yet to delete that.

    Args:
        freed: Whether the reservation is deleted.
        done: What is cancelled, as a sentence.
        free: The same with what holds once the reservation is deleted.
    """
    if freed:
        messages.success(request, free)
    else:
        later = _("Its nodes are free as soon as the reservation can be deleted; this is tried again.")
        messages.warning(request, f"{done} {later}")


def _page(request: HttpRequest, status: HTTPStatus, title: str, sentence: str, remedy: str) -> HttpResponse:
    context = {"title": title, "sentence": sentence, "remedy": remedy}
    return render(request, "error.html", context, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """400"""
    return _page(
        request,
        HTTPStatus.BAD_REQUEST,
        _("Not understood"),
        _("The portal could not understand what the browser sent."),
        _("Go back, load the page again and repeat what you did."),
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """403"""
    return _page(
        request,
        HTTPStatus.FORBIDDEN,
        _("Not allowed"),
        _("Your account may not see or do this."),
        _("Ask an administrator if you think that it should."),
    )


@login_not_required
def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """A form without a valid token of this browser's login."""
    return _page(
        request,
        HTTPStatus.FORBIDDEN,
        _("Form not accepted"),
        _("This form did not come from a current page of the portal, so it was not accepted."),
        _("Go back, load the page again and send the form once more; cookies must be allowed."),
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """404"""
    return _page(
        request,
        HTTPStatus.NOT_FOUND,
        _("Not found"),
        _("There is no such page, or it is not yours."),
        _("Check the address, or go to the dashboard."),
    )


def without_empty_refusals(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware: an address that only takes forms says so where a browser opens it; Django says nothing."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        opened = request.method == "GET" and response.status_code == HTTPStatus.METHOD_NOT_ALLOWED
        if not opened or response.content:
            return response
        page = _page(
            request,
            HTTPStatus.METHOD_NOT_ALLOWED,
            _("Nothing to show"),
            _("This address only takes what a form sends."),
            _("Go back to the page with the form, or to the dashboard."),
        )
        page["Allow"] = response["Allow"]
        return page

    return middleware


def server_error(request: HttpRequest) -> HttpResponse:
    """500"""
    context = {
        "title": _("Something went wrong"),
        "sentence": _("The portal failed to create this page."),
        "remedy": _("Try again. If it fails again, tell an administrator when it happened and what you did."),
    }
    # Without the request: what failed may be what the usual page header needs, such as the database.
    page = render_to_string("error.html", context | {"site_name": settings.SITE.site.name})
    return HttpResponse(page, status=HTTPStatus.INTERNAL_SERVER_ERROR)
