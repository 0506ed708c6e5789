"""Seeing a user's pages as they see them, for support: read only, for half an hour, always on record."""

import time
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _

from carme_webui.accounts.models import User
from carme_webui.administration.models import AuditEntry

__all__ = ["KEY", "begin", "end", "impersonating"]

KEY = "carme-looks-as"  # also of views that are open while the portal is upgraded
SECONDS = 1800.0
#: All that may be seen; what is not named is not, such as recovery codes, or the sign-in to JupyterHub.
PAGES = ("/sessions/", "/jobs/", "/bookings/", "/projects/", "/announcements/", "/maintenance/", "/help/")
EXACTLY = ("/", "/live/", "/updates/", "/profile/", "/files/quota/", "/metrics/sparks/")
#: What the form for a session asks; it changes nothing.
ESTIMATE = "/sessions/estimate/"
#: What open pages load by themselves is no new visit.
BY_THEMSELVES = (
    *(
        "live/",
        "updates/",
        "/files/quota/",
        "/metrics/sparks/",
        "/jobs/month/",
        "/use/",
        "/facts/",
        "/recipe/",
    ),
    "/bookings/share/",
    ESTIMATE,
)


def begin(request: HttpRequest, user: User) -> None:
    """From now on this login sees the pages of `user`."""
    request.session[KEY] = [user.pk, time.time()]
    AuditEntry.objects.create(by_id=request.user.pk, text=f"began to view the portal as {user.username}")


def end(request: HttpRequest) -> None:
    """End the read-only view; the login sees its own pages again."""
    if entry := request.session.pop(KEY, None):
        user = User.objects.filter(pk=entry[0]).first()
        AuditEntry.objects.create(by_id=request.user.pk, text=f"stopped viewing the portal as {user}")


def impersonating(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware that shows a user's pages to an admin who requested it, read-only."""

    def middleware(request: HttpRequest) -> HttpResponse:
        entry = request.session.get(KEY)
        if not entry or request.path == "/admin/impersonation/end/":
            return get_response(request)
        admin = request.user
        number, since = entry
        user = User.objects.filter(pk=number, is_active=True, is_staff=False).first()
        if not (isinstance(admin, User) and admin.is_staff) or user is None or time.time() > since + SECONDS:
            del request.session[KEY]
            return get_response(request)
        request.impersonator = admin  # type: ignore[attr-defined]
        request.user = user
        allowed = request.path in EXACTLY or request.path.startswith(PAGES)
        reads = request.method in ("GET", "HEAD") or request.path == ESTIMATE
        if not (reads and allowed):
            context = {
                "title": _("Read-only view"),
                "sentence": _("You are viewing as %s (read-only); some pages are hidden.") % user.username,
                "remedy": _("Exit the read-only view to do this as yourself."),
            }
            return render(request, "error.html", context, status=403)
        if not request.path.endswith(BY_THEMSELVES):
            AuditEntry.objects.create(by=admin, text=f"viewed {request.path[:200]} as {user.username}")
        return get_response(request)

    return middleware
