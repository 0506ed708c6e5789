"""slurmrestd as an HTTP server: its address, its token, the version of its answers, and its errors."""

import asyncio
import http.client
import json
import socket
import ssl
import stat
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from carme.errors import SlurmError
from carme.slurm.programs import TIMEOUT
from carme.slurm.refusals import away, refusal
from carme.translation import message as _

PROGRAM = "slurmrestd"
#: The versions that are read here, in the order in which they are tried: first the one that was recorded.
VERSIONS = ("v0.0.42", "v0.0.43", "v0.0.44", "v0.0.45", "v0.0.41")

Body = Mapping[str, Any]
Query = Mapping[str, str]
_NO_QUERY: Query = {}


class _Answer(NamedTuple):
    status: int
    body: bytes


class RestServer:
    """One slurmrestd.

    Args:
        address: The path of its socket, or its URL.
        token_file: Holds a JSON Web Token of Slurm's user or root; None: the socket says who we are.
    """

    def __init__(self, address: str, token_file: Path | None = None) -> None:
        self.address = address
        self.token_file = token_file
        self._version = ""

    @property
    def acts_for_users(self) -> bool:
        """Whether it does something as another user, which takes a token."""
        return self.token_file is not None

    async def version(self) -> str:
        """The version that both sides know.

        Raises:
            SlurmError: It does not answer, takes no token of ours, or knows other versions only.
        """
        if not self._version:
            self._version = await self._negotiate()
        return self._version

    async def get(
        self, path: str, *, user: str = "", database: bool = False, query: Query = _NO_QUERY
    ) -> dict[str, Any]:
        """What it answers to a question, such as `jobs/`.

        Args:
            path: What follows the version.
            database: The accounting is asked, not the controller.
            user: As whom it is asked; empty: as the owner of the token.
            query: Parameters.

        Raises:
            SlurmError: Slurm refuses or does not answer, or the answer cannot be read.
            NotFound: Slurm does not know this job.
        """
        part = "slurmdb" if database else "slurm"
        return await self._request("GET", path, user=user, query=query, part=part)

    async def send(
        self, method: str, path: str, body: Body | None = None, *, user: str = ""
    ) -> dict[str, Any]:
        """Change something; arguments and errors as for `get`."""
        return await self._request(method, path, body, user=user)

    async def _request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        user: str = "",
        query: Query = _NO_QUERY,
        part: str = "slurm",
    ) -> dict[str, Any]:
        version = await self.version()
        target = f"/{part}/{version}/{path}"
        if query:
            target += f"?{urllib.parse.urlencode(query)}"
        answer = await self._exchange(method, target, body, user)
        if answer.status == http.HTTPStatus.NOT_FOUND and not _document(answer.body):
            self._version = ""  # it may have been replaced by another release
        return self._read(answer)

    async def _negotiate(self) -> str:
        for version in VERSIONS:
            answer = await self._exchange("GET", f"/slurm/{version}/ping/")
            if answer.status != http.HTTPStatus.NOT_FOUND:
                self._read(answer)
                return version
        known = ", ".join(sorted(VERSIONS))
        raise SlurmError(
            _(
                "slurmrestd at {address} supports none of the versions {known}.",
                address=self.address,
                known=known,
            ),
            _("Install slurmrestd of Slurm 24.05 or later, or set slurm.adapter to 'commands'."),
        )

    async def _exchange(self, method: str, target: str, body: Body | None = None, user: str = "") -> _Answer:
        headers = self._headers(user)
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(TIMEOUT + 5):
                return await asyncio.to_thread(self._send, method, target, data, headers)
        except TimeoutError:  # of the socket as well
            raise away(PROGRAM, f"timed out after {TIMEOUT:.0f} seconds") from None
        except OSError as error:  # also where the connection ends without an answer
            raise away(PROGRAM, f"{self.address}: {error.strerror or error}") from None
        except http.client.HTTPException as error:
            raise self._unreadable(f"{type(error).__name__}: {error}") from None

    def _send(self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]) -> _Answer:
        connection = self._connection()
        try:
            connection.request(method, target, data, dict(headers))
            answer = connection.getresponse()
            return _Answer(answer.status, answer.read())
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.address.startswith("/"):
            return _SocketConnection(self.address)
        url = urllib.parse.urlsplit(self.address)
        host = url.hostname or ""
        if url.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, url.port, timeout=TIMEOUT, context=context)
        return http.client.HTTPConnection(host, url.port, timeout=TIMEOUT)

    def _headers(self, user: str) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.token_file is not None:
            # Read each time: tokens end, and the site puts new ones there.
            headers["X-SLURM-USER-TOKEN"] = _token(self.token_file)
        if user:
            headers["X-SLURM-USER-NAME"] = user
        return headers

    def _read(self, answer: _Answer) -> dict[str, Any]:
        if answer.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            raise self._unauthorized()
        document = _document(answer.body)
        if document is None:
            start = answer.body[:100].decode(errors="replace").strip()
            raise self._unreadable(f"HTTP {answer.status}, {start!r}")
        errors = document.get("errors")
        if errors:
            raise refusal(PROGRAM, _complaint(errors))
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise refusal(PROGRAM, f"HTTP {answer.status}")
        return document

    def _unauthorized(self) -> SlurmError:
        if self.token_file is None:
            return SlurmError(
                _("slurmrestd at {address} accepts no request without a token.", address=self.address),
                _("Name a file with a token of Slurm's user in slurm.rest_token_file."),
                code="slurm-token",
            )
        return SlurmError(
            _("slurmrestd does not accept the token in {file}.", file=self.token_file),
            _("Put a token of Slurm's user there that has not expired ('scontrol token' makes one)."),
            code="slurm-token",
        )

    def unreadable(self, error: Exception) -> SlurmError:
        """The error for an answer that lacks what is needed."""
        return self._unreadable(f"{type(error).__name__}: {error}")

    def _unreadable(self, reason: str) -> SlurmError:
        return SlurmError(
            _("The answer of slurmrestd cannot be read ({reason}).", reason=reason[:200]),
            _("Look into the log of slurmrestd, or set slurm.adapter to 'commands'."),
        )


class _SocketConnection(http.client.HTTPConnection):
    """Over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        # Names that users choose need not be text.
        document = json.loads(body.decode(errors="replace"))
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _complaint(errors: Any) -> str:
    """Slurm's words for what was wrong."""
    rows = [row for row in errors if isinstance(row, dict)] if isinstance(errors, list) else []
    words = [str(row.get("error") or row.get("description") or "") for row in rows]
    return "\n".join(dict.fromkeys(filter(None, words))) or str(errors)[:200]


def _token(file: Path) -> str:
    """The token in a file that nobody else may read."""
    try:
        open_to_all = file.stat().st_mode & stat.S_IRWXO
        token = file.read_text().strip().removeprefix("SLURM_JWT=")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SlurmError(
            _("The token for slurmrestd cannot be read from {file}: {reason}.", file=file, reason=reason),
            _("Write there what 'scontrol token username=slurm' prints, for root alone."),
            code="slurm-token",
        ) from None
    if open_to_all or not token or not token.isascii() or len(token.split()) != 1:
        reason = "other users may read it" if open_to_all else "it holds no token"
        raise SlurmError(
            _("The token for slurmrestd in {file} is not used: {reason}.", file=file, reason=reason),
            _("Write there what 'scontrol token username=slurm' prints, for root alone."),
            code="slurm-token",
        )
    return token
