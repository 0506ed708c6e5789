"""Requests to the portal's API, and what it refuses as Carme's own errors."""

from __future__ import annotations

import json
import os
import re
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from carme.errors import (
    BrokerUnavailable,
    CarmeError,
    ConfigError,
    Denied,
    InvalidRequest,
    NotFound,
    SlurmError,
)
from carme.translation import message as _

__all__ = ["Connection", "Login", "Unreachable", "trusting"]

TIMEOUT = httpx.Timeout(60.0, connect=10.0)
LONGEST_PAUSE = 65.0  # seconds that a request waits when there were too many
TRIES = 4


class Unreachable(CarmeError):
    """The portal does not answer; whether it did what was requested is not known."""

    default_code = "unreachable"


class Login:
    """Where the portal is and with which token, kept in a file that its owner alone may read.

    Args:
        path: The file; by default `carme/login.json` below `XDG_CONFIG_HOME` or `~/.config`.
    """

    def __init__(self, path: Path | None = None) -> None:
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        self.path = path or Path(base) / "carme/login.json"

    def exists(self) -> bool:
        """Whether this computer has been given a token."""
        return bool(os.environ.get("CARME_TOKEN")) or self.path.exists()

    def read(self) -> tuple[str, str]:
        """Address and token: those of `CARME_URL` and `CARME_TOKEN`, else the file's.

        Raises:
            ConfigError: There are none, or others could read the file.
        """
        url, token = os.environ.get("CARME_URL", ""), os.environ.get("CARME_TOKEN", "")
        if url and token:
            return url, token
        try:
            if self.path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    _("Others may read {path}, which holds a token.", path=self.path),
                    _(
                        "Revoke the token in the portal, then: chmod 600 {path} and carme login",
                        path=self.path,
                    ),
                )
            found = json.loads(self.path.read_text(encoding="utf-8"))
            url, token = url or found["url"], token or found["token"]
            if not (isinstance(url, str) and isinstance(token, str)):
                raise TypeError("url and token must be texts")
            return url, token
        except FileNotFoundError:
            raise ConfigError(
                _("This computer has no token for a portal."),
                _("Make one in the portal under API tokens, then: carme login https://PORTAL"),
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                _("{path} cannot be read: {error}.", path=self.path, error=error),
                _("Write it anew with: carme login"),
            ) from None

    def authority(self, url: str) -> str:
        """What certificates of this portal are trusted for besides the usual ones, as PEM; empty: nothing."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return str(found.get("authority", "")) if found["url"] == url.rstrip("/") else ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ""

    def write(self, url: str, token: str, authority: str = "") -> None:
        """Keep them, and an authority's certificate (PEM). Raises ConfigError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(
                    {"url": url, "token": token} | ({"authority": authority} if authority else {}), file
                )
            partial.replace(self.path)
        except OSError as error:
            raise ConfigError(
                _("{path} cannot be written: {why}.", path=self.path, why=error.strerror),
                _("Make its folder yours and writable."),
            ) from None


def trusting(authority: str) -> ssl.SSLContext:
    """How to check certificates if this one (PEM) is trusted besides the usual ones. Raises ConfigError."""
    context = httpx.create_ssl_context()
    # A site's own may be that of the portal itself, and older than today's rules for authorities.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            _("The file holds no certificate as PEM."), _("It must begin with -----BEGIN CERTIFICATE-----.")
        ) from None
    return context


class Connection:
    """Requests to one portal with one token. Threads may share it.

    Args:
        url: The portal's address, like `https://carme.example.org`.
        token: The token.
        verify: Whether to check the portal's certificate, or how.

    Raises:
        ConfigError: The address is not one of HTTPS, or the text cannot be a token.
    """

    def __init__(self, url: str, token: str, verify: bool | ssl.SSLContext = True) -> None:
        if not url.startswith(("https://", "http://localhost", "http://127.0.0.1")):
            raise ConfigError(
                _("The portal's address must begin with 'https://', not be {url!r}.", url=url),
                _("A token may only be sent encrypted."),
            )
        self.url = url.rstrip("/")
        token = token.strip()  # a file that holds it ends its line
        if not (token.isascii() and token.isprintable()):
            # A header cannot hold it, and what refuses that would print it.
            raise ConfigError(
                _("The token has a character that no token has."),
                _("Copy the whole token. The list of tokens shows only how each begins."),
            )
        if not token:
            raise ConfigError(_("The token is empty."), _new_token(self.url, token))
        self._token = token
        self._client = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            timeout=TIMEOUT,
            verify=verify,
        )

    def close(self) -> None:
        """Close it."""
        self._client.close()

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The answer to a request.

        Raises:
            CarmeError: What the portal refuses, in its words: `InvalidRequest` (with `field`), `Denied`,
                `NotFound`, `SlurmError`, `BrokerUnavailable`; `Unreachable` when it does not answer.
        """
        given = {name: value for name, value in query.items() if value is not None}
        try:
            request = self._client.build_request(method, path, json=body, params=given or None)
        except UnicodeEncodeError as error:
            raise _not_encodable(error) from None
        answer = self._answer(request)
        return answer.json() if answer.content else None

    def send(self, path: str, data: bytes, query: str) -> Any:
        """The answer to bytes that are sent; `query` is as addresses have it. Raises as `ask` does."""
        headers = {"Content-Type": "application/octet-stream"}
        return self._answer(
            self._client.build_request("PUT", f"{path}?{query}", content=data, headers=headers)
        ).json()

    @contextmanager
    def fetch(self, path: str, query: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """An answer whose bytes come as they are read. Raises as `ask` does, and while it is read."""
        request = self._client.build_request("GET", f"{path}?{query}", headers=headers)
        answer = self._answer(request, stream=True)
        try:
            with self._reachable():
                yield answer
        finally:
            answer.close()

    def _answer(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        for left in reversed(range(TRIES)):
            with self._reachable():
                answer = self._client.send(request, stream=stream)
                if answer.is_success:
                    return answer
                answer.read()
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS or not left:
                refusal = _refusal(answer)
                if answer.status_code == httpx.codes.UNAUTHORIZED and refusal.code == "unauthorized":
                    # The portal's own words are for programs that send the header themselves.
                    raise Denied(
                        _(
                            "The portal does not accept the token: it has expired, was revoked, or is not "
                            "whole."
                        ),
                        _new_token(self.url, self._token),
                        refusal.code,
                    )
                raise refusal
            pause = answer.headers.get("Retry-After", "1")
            time.sleep(min(LONGEST_PAUSE, int(pause) if pause.isdecimal() else 1))
        raise AssertionError("the last try has returned or raised")

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            if refused := _certificate_error(error):
                raise _untrusted_error(self.url, refused) from None
            raise Unreachable(
                _(
                    "The portal at {url} does not answer: {error}.",
                    url=self.url,
                    error=error or type(error).__name__,
                ),
                _("Check the address and your network, then try again."),
            ) from None


def _new_token(url: str, token: str) -> str:
    """What to do where this token is of no use: the environment's counts before that of a login."""
    variable = os.environ.get("CARME_TOKEN")
    if variable and variable.strip() == token:
        return _("Create one at {url}/tokens/, and set CARME_TOKEN to it.", url=url)
    return _("Create one at {url}/tokens/, then: carme login {url}", url=url)


def _not_encodable(error: UnicodeEncodeError) -> InvalidRequest:
    """What to say of a text that JSON cannot hold, shown as people know its bytes."""
    text = error.object
    whole = text[text.rfind('"', 0, error.start) + 1 : text.find('"', error.end)]
    named = whole.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return InvalidRequest(
        _("A part of the request is not UTF-8: '{named}'.", named=named[:80]),
        _("Rename it, or have a script of yours name it."),
    )


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Why a certificate was not accepted, if that is the cause."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _untrusted_error(url: str, error: ssl.SSLCertVerificationError) -> Unreachable:
    why = (error.verify_message or str(error)).rstrip(".")
    message = _("The certificate of the portal at {url} is not trusted here: {why}.", url=url, why=why)
    if error.verify_code in _WRONG_ITSELF:
        return Unreachable(
            message,
            _("{named} Check the address and this computer's clock.", named=_certificate_names(url)),
            "certificate",
        )
    return Unreachable(
        message,
        _(
            "{named} If your site has an authority of its own, get its certificate from your "
            "administrators, then: carme login {url} --ca FILE",
            named=_certificate_names(url),
            url=url,
        ),
        "certificate",
    )


#: X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED, _HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH (x509_vfy.h)
_WRONG_ITSELF = (9, 10, 62, 64)


def _certificate_names(url: str) -> str:
    """Which certificate it is: whose, by whom, and its fingerprint, by which administrators know it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    address = httpx.URL(url)
    try:
        text = ssl.get_server_certificate((address.host, address.port or 443), timeout=10)
        found = x509.load_pem_x509_certificate(text.encode())
    except (OSError, ValueError):
        return ""
    fingerprint = found.fingerprint(SHA256()).hex(":").upper()
    subject, issuer = found.subject.rfc4514_string(), found.issuer.rfc4514_string()
    return f"It is that of {subject or 'nobody'}, issued by {issuer or 'nobody'}, SHA-256 {fingerprint}."


_KINDS: dict[int, type[CarmeError]] = {
    401: Denied,
    403: Denied,
    404: NotFound,
    409: SlurmError,
    422: InvalidRequest,
    503: BrokerUnavailable,
}


def _refusal(answer: httpx.Response) -> CarmeError:
    try:
        message = answer.json()
        kind = _KINDS.get(answer.status_code, CarmeError)
        code, field, path = str(message["code"]), message.get("field"), message.get("help")
        address = str(answer.url.join(path)) if isinstance(path, str) and re.match("/[^/]", path) else ""
        return kind(str(message["detail"]), "", code, field, address)
    except (ValueError, KeyError, TypeError):
        return Unreachable(
            _(
                "{host} answered {status_code}, and not as a portal of Carme does.",
                host=answer.url.host,
                status_code=answer.status_code,
            ),
            _("Check the address."),
        )
