"""The time zone of a user: the own choice, else that of the browser, else the site's."""

from collections.abc import Callable
from functools import cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from django.core.cache import cache as noted
from django.http import HttpRequest, HttpResponse

from carme_webui.accounts.models import User
from carme_webui.clocks import in_zone

__all__ = ["COOKIE", "use_reader_zone", "zone_names", "zone_of"]

#: In which `times.js` says the browser's zone.
COOKIE = "carme_zone"
#: How long the account keeps the zone that one browser reported.
STORED_AGAIN_SECONDS = 3600


@cache
def zone_names() -> tuple[str, ...]:
    """The zones that can be chosen, like `Europe/Berlin`."""
    names = (name for name in available_timezones() if "/" in name and not name.startswith("Etc/"))
    return (*sorted(names), "UTC")


def zone_of(user: User) -> ZoneInfo | None:
    """The zone by whose clocks this user gets notices; None: the site's."""
    for name in (user.time_zone, user.browser_zone):
        if name:
            try:
                return ZoneInfo(name)
            except (ZoneInfoNotFoundError, ValueError):
                continue  # this host no longer knows it
    return None


def _is_page(request: HttpRequest) -> bool:
    return request.method == "GET" and "HX-Request" not in request.headers


def use_reader_zone(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware, after that of impersonation: pages are by the reader's clocks.

    The browser's zone is kept with the account, so that mails are by the same clocks.
    """

    def middleware(request: HttpRequest) -> HttpResponse:
        user = request.user
        if not isinstance(user, User):
            return get_response(request)
        found = request.COOKIES.get(COOKIE, "")
        if found != user.browser_zone and found in zone_names() and not hasattr(request, "impersonator"):
            # Two devices in two zones each have their own on their pages, and do not write all the time.
            if _is_page(request) and noted.add(f"browser-zone-{user.pk}", 1, STORED_AGAIN_SECONDS):
                User.objects.filter(pk=user.pk).update(browser_zone=found)
            user.browser_zone = found
        with in_zone(zone_of(user)):
            return get_response(request)

    return middleware
