"""Which folders the portal shows, and how their paths travel in addresses and forms."""

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote

from django.conf import settings
from django.http import HttpRequest
from django.utils.translation import gettext as _

from carme.errors import InvalidRequest
from carme.files.client import Files

__all__ = [
    "Place",
    "checked_path",
    "crumbs",
    "key_of",
    "path_of_query",
    "places_of",
    "shown",
    "value_of_query",
]

LONGEST = 4095  # bytes of a path, as for Linux itself


@dataclass(frozen=True)
class Place:
    """A folder with its name for people and its `key` for addresses."""

    name: str
    path: str

    @property
    def key(self) -> str:
        """The path as addresses and forms hold it."""
        return key_of(self.path)


def places_of(files: Files) -> list[Place]:
    """My home, and the site's folders that jobs see as well."""
    folders = [Place(path.name or str(path), str(path)) for path in settings.SITE.sessions.bind]
    return [Place(_("Home"), files.home()), *folders]


def key_of(path: str) -> str:
    """A path in ASCII. Names are bytes to Linux, and not all of them are UTF-8."""
    return quote(os.fsencode(path), safe="/")


def shown(name: str) -> str:
    """A name as people can read it."""
    text = os.fsencode(name).decode(errors="replace")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def path_of_query(request: HttpRequest) -> str:
    """The path that the query of an address names; empty without one."""
    query = parse_qs(request.META.get("QUERY_STRING", ""), errors="surrogateescape")
    return query.get("path", [""])[0]


def value_of_query(request: HttpRequest, name: str) -> str:
    """A path that a form has sent."""
    return unquote(request.POST.get(name, ""), errors="surrogateescape")


def checked_path(path: str, places: Sequence[Place]) -> str:
    """The normalised path.

    Raises:
        InvalidRequest: It is in none of the places. (What links lead to is the user's own business: whatever
            is done, the system allows it to them or not.)
    """
    try:
        whole = os.fsencode(path)
    except UnicodeEncodeError:
        whole = b""
    clean = posixpath.normpath(path)
    if not whole or len(whole) > LONGEST or b"\0" in whole or not path.startswith("/"):
        clean = ""
    clean = "/" + clean.lstrip("/") if clean else ""
    if not any(clean == place.path or clean.startswith(f"{place.path.rstrip('/')}/") for place in places):
        raise InvalidRequest(
            _("The portal does not show this folder."),
            _("It shows: %s.") % ", ".join(place.path for place in places),
            field="path",
        )
    return clean


def crumbs(path: str, places: Sequence[Place]) -> list[Place]:
    """The folders on the way to a path, from its place on."""
    inside = [place for place in places if f"{path}/".startswith(f"{place.path.rstrip('/')}/")]
    place = max(inside, key=lambda each: len(each.path))
    found = [place]
    for part in path[len(place.path) :].strip("/").split("/"):
        if part:
            found.append(Place(shown(part), f"{found[-1].path.rstrip('/')}/{part}"))
    return found
