"""Who asks: the token's owner, and what the token allows."""

from http import HTTPStatus
from typing import Any

from auditlog.context import auditlog_value
from django.http import Http404, HttpRequest
from django.utils.translation import gettext as _
from ninja.errors import HttpError
from ninja.security.http import HttpAuthBase

from carme.errors import CarmeError, Denied
from carme_webui.accounts.models import User
from carme_webui.api.limits import seconds_to_wait
from carme_webui.api.models import FOR_ADMINS, SCOPES, Token

__all__ = [
    *("TokenAuth", "TooOften", "Unknown", "administrates", "asker", "require", "require_admin", "token_of"),
]


class Unknown(CarmeError):
    """Nobody showed a token that is valid."""

    default_code = "unauthorized"


class TooOften(HttpError):
    """Too many requests; `seconds` to wait."""

    def __init__(self, seconds: int) -> None:
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, "")
        self.seconds = seconds


class TokenAuth(HttpAuthBase):
    """`Authorization: Bearer carme_...`"""

    openapi_scheme = "bearer"
    openapi_description = "A personal token from the portal's page of API tokens."

    def __call__(self, request: HttpRequest) -> Any:
        scheme, _space, secret = request.headers.get("Authorization", "").partition(" ")
        token = Token.find(secret.strip()) if scheme.lower() == "bearer" and secret.strip() else None
        # Who guesses tokens is counted by address, whatever they send.
        who = f"token {token.pk}" if token is not None else f"address {request.META.get('REMOTE_ADDR')}"
        if seconds := seconds_to_wait(who):
            raise TooOften(seconds)
        if token is None:
            raise Unknown(
                _("This needs a valid token, and none was sent, or it has expired or was revoked."),
                _("Create one in the portal under API tokens, and send it as 'Authorization: Bearer TOKEN'."),
            )
        request.auth = token  # type: ignore[attr-defined]
        # The audit log was begun before it was known who asks.
        auditlog_value.get({})["actor"] = token.owner
        return token


def token_of(request: HttpRequest) -> Token:
    """The token that was sent."""
    token = request.auth  # type: ignore[attr-defined]
    assert isinstance(token, Token)
    return token


def asker(request: HttpRequest) -> User:
    """The owner of the token."""
    return token_of(request).owner


def require(request: HttpRequest, scope: str) -> User:
    """The owner of the token, if it allows this. Raises Denied."""
    token = token_of(request)
    if scope not in token.scopes:
        raise Denied(
            _("This token may not %s.") % SCOPES[scope],
            _("Create one with the scope '%s' in the portal under API tokens.") % scope,
        )
    return token.owner


def require_admin(request: HttpRequest) -> User:
    """The owner of the token, an administrator, if it allows that; nobody else finds anything there.

    Raises:
        Http404: It is nobody who administrates.
        Denied: The token does not allow it.
    """
    if not asker(request).is_staff:
        raise Http404
    return require(request, FOR_ADMINS)


def administrates(request: HttpRequest) -> bool:
    """Whether this token shows what administrators see."""
    token = token_of(request)
    return token.owner.is_staff and FOR_ADMINS in token.scopes
