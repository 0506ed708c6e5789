"""Whether a request may pass to a user's notebook server: nginx asks before each one."""

import posixpath
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from carme.accounts import ACCOUNT_PATTERN

__all__ = ["enter", "owner_of"]

_NAME = re.compile(rf"({ACCOUNT_PATTERN})(?:/|\Z)", re.ASCII)
# More layers of encoding than any honest address has.
_LAYERS = 4


def owner_of(address: str, base_path: str) -> str | None:
    """Whose server an address leads to.

    Args:
        address: Path and query as the browser sent them.
        base_path: Where JupyterHub's addresses begin, with slashes at both ends.

    Returns:
        The user's name; None when it is nobody's server, or when programs could disagree on whose it is:
        every reading (decoded once or more, dots and double slashes resolved or not, a backslash as a slash
        or not) must give the same name.
    """
    text = address.partition("?")[0].partition("#")[0]
    names: set[str] = set()
    for _ in range(_LAYERS):
        # Names of files may be any bytes; those of users are letters that stand for themselves.
        decoded = unquote(text, errors="surrogateescape")
        names |= {_name(reading, f"{base_path}user/") for reading in _readings(decoded)}
        if decoded == text:
            return names.pop() or None if len(names) == 1 else None
        text = decoded
    return None


def _readings(path: str) -> Iterator[str]:
    """What programs may make of a decoded path."""
    yield path
    slashed = path.replace("\\", "/")
    # normpath keeps two slashes at the beginning, as POSIX has it.
    yield posixpath.normpath("/" + slashed.lstrip("/")) + "/"


def _name(path: str, prefix: str) -> str:
    if not path.startswith(prefix) or "\0" in path:
        return ""
    found = _NAME.match(path, len(prefix))
    return found.group(1) if found else ""


@csrf_exempt
@login_not_required
def enter(request: HttpRequest) -> HttpResponse:
    """Answer nginx: the address is in `X-Original-URI`, cookies and authorization are the visitor's.

    204: it may pass; 401: nobody is signed in; 403: the server is not the visitor's, or nobody's. With a
    token of the hub, the hub itself decides: no browser sends one by following a link.
    """
    response: Any = HttpResponse(status=_status(request), headers={"Cache-Control": "no-store"})
    # Django would warn of each refusal, and an open page whose login is over gets one every few seconds.
    response._has_been_logged = True
    return response


def _status(request: HttpRequest) -> HTTPStatus:
    owner = owner_of(request.headers.get("X-Original-URI", ""), settings.SITE.hub.base_path)
    if owner is None:
        return HTTPStatus.FORBIDDEN
    scheme, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() in ("token", "bearer") and token.strip():
        return HTTPStatus.NO_CONTENT
    if not request.user.is_authenticated:
        return HTTPStatus.UNAUTHORIZED
    return HTTPStatus.NO_CONTENT if request.user.get_username() == owner else HTTPStatus.FORBIDDEN
