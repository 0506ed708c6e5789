"""Whether a request may pass to a user's notebook server: nginx asks before each one.

It asks for every file of a notebook's page, hence past Django's middleware, on the server's own loop and in
two threads of its own: pages may wait for the broker or a file system that hangs, and notebooks must not. A
view of Django's is as fast while nothing hangs (`./test bench portal --files --without entrance`).
"""

import asyncio
import logging
import posixpath
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

from django.conf import settings
from django.contrib.auth import get_user
from django.db import DatabaseError, connection
from django.http import HttpRequest
from django.http.cookie import parse_cookie

from carme.accounts import ACCOUNT_PATTERN

__all__ = ["admit", "enter", "owner_of"]

logger = logging.getLogger(__name__)

# Threads of their own, which keep their connections to the database.
_threads = ThreadPoolExecutor(2, thread_name_prefix="entrance")
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


def admit(address: str, cookies: str, authorization: str) -> HTTPStatus:
    """204: it may pass; 401: nobody is signed in; 403: the server is not the visitor's, or nobody's.

    Args:
        address: Path and query as the browser sent them.
        cookies: The request's `Cookie`.
        authorization: The request's `Authorization`. With a token of the hub, the hub itself decides: no
            browser sends one by following a link.
    """
    owner = owner_of(address, settings.SITE.hub.base_path)
    if owner is None:
        return HTTPStatus.FORBIDDEN
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() in ("token", "bearer") and token.strip():
        return HTTPStatus.NO_CONTENT
    visitor = _signed_in(cookies)
    if visitor is None:
        return HTTPStatus.UNAUTHORIZED
    return HTTPStatus.NO_CONTENT if visitor == owner else HTTPStatus.FORBIDDEN


def _signed_in(cookies: str) -> str | None:
    """Who is signed in to the portal with these cookies."""
    key = parse_cookie(cookies).get(settings.SESSION_COOKIE_NAME)
    if not key:
        return None
    login = import_module(settings.SESSION_ENGINE).SessionStore(key)
    user = get_user(cast(HttpRequest, SimpleNamespace(session=login)))
    return user.get_username() if user.is_authenticated else None


def _answer(address: str, cookies: str, authorization: str) -> HTTPStatus:
    try:
        return admit(address, cookies, authorization)
    except DatabaseError:
        # The database may have been restarted under a connection that was kept.
        connection.close()
        return admit(address, cookies, authorization)


async def enter(
    scope: MutableMapping[str, Any], send: Callable[[MutableMapping[str, Any]], Awaitable[None]]
) -> None:
    """Answer nginx: the address is in `X-Original-URI`, cookies and authorization are the visitor's."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value)

    def header(name: bytes, between: bytes = b", ") -> str:
        return between.join(headers.get(name, [])).decode("latin-1")

    question = (header(b"x-original-uri"), header(b"cookie", b"; "), header(b"authorization"))
    try:
        status = await asyncio.get_running_loop().run_in_executor(_threads, _answer, *question)
    except Exception:
        logger.exception("Who may enter could not be found out")
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    headers_sent = [(b"cache-control", b"no-store"), (b"content-length", b"0")]
    if status is HTTPStatus.NO_CONTENT:
        headers_sent.pop()
    await send({"type": "http.response.start", "status": int(status), "headers": headers_sent})
    await send({"type": "http.response.body", "body": b""})
