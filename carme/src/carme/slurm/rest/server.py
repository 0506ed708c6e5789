"""slurmrestd as an HTTP server: its address, its token, the version of its answers, and its errors."""

import asyncio
import http.client
import json
import socket
import ssl
import stat
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from carme.errors import SlurmError
from carme.slurm.programs import TIMEOUT
from carme.slurm.refusals import away, refusal
from carme.translation import message as _

PROGRAM = "slurmrestd"
#: The versions that are read here, in the order in which they are tried: first those that were recorded, of
#: them the one that makes reservations. v0.0.45 does not report which jobs have whole nodes.
VERSIONS = ("v0.0.43", "v0.0.42", "v0.0.44", "v0.0.41")

Body = Mapping[str, Any]
Query = Mapping[str, str | list[str]]
_NO_QUERY: Query = {}
_THREADS = 6  # requests at a time
#: The last is the answer to a token that may not act as the user who is named beside it.
_UNAUTHORIZED = {
    *(http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN),
    http.HTTPStatus.NETWORK_AUTHENTICATION_REQUIRED,
}
_T = TypeVar("_T")


class _Answer(NamedTuple):
    """`document` is None where the answer is not a JSON object; `start` of the body then shows what it is."""

    status: int
    document: dict[str, Any] | None
    start: str


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
        # Not asyncio's own threads: each connection to the broker needs one of them, and a slurmrestd that
        # does not answer would hold them all.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=PROGRAM)

    def close(self) -> None:
        """Let go of its threads; call it when nobody asks any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """What `work` returns, done in one of its threads: others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

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
            database: The accounting is queried, not the controller.
            user: As whom it is queried; empty: as the owner of the token.
            query: Parameters.

        Raises:
            SlurmError: Slurm refuses or does not answer, or the answer cannot be read.
            NotFound: Slurm does not know this job.
        """
        part = "slurmdb" if database else "slurm"
        return await self._request("GET", path, user=user, query=query, part=part)

    async def send(
        self, method: str, path: str, body: Body | None = None, *, user: str = "", proof: str = ""
    ) -> dict[str, Any]:
        """Change something.

        Args:
            method, path, user: As for `get`.
            body: What is sent as JSON.
            proof: A field of the answer, such as `job_id`, whose number says that it was done, even with
                errors beside it: of a job that has to wait Slurm may report why as an error.

        Raises:
            SlurmError: As for `get`. Its code is `slurm-away` where it may have been done all the same: after
                an answer that cannot be read, or a failure that Slurm did not word.
            NotFound: Slurm does not know this job.
        """
        return await self._request(method, path, body, user=user, proof=proof)

    async def _request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        user: str = "",
        query: Query = _NO_QUERY,
        part: str = "slurm",
        proof: str = "",
    ) -> dict[str, Any]:
        version = await self.version()
        target = f"/{part}/{version}/{path}"
        if query:
            target += f"?{urllib.parse.urlencode(query, doseq=True)}"
        answer = await self._exchange(method, target, body, user)
        if answer.status == http.HTTPStatus.NOT_FOUND and not answer.document:
            self._version = ""  # it may have been replaced by another release
        return self._read(answer, method, proof)

    async def _negotiate(self) -> str:
        for version in VERSIONS:
            answer = await self._exchange("GET", f"/slurm/{version}/ping/")
            if answer.status != http.HTTPStatus.NOT_FOUND:
                self._read(answer, "GET")
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
                return await self.in_thread(lambda: self._send(method, target, data, headers))
        except TimeoutError:  # of the socket as well
            raise away(PROGRAM, f"timed out after {TIMEOUT:.0f} seconds") from None
        except OSError as error:  # also where the connection ends without an answer
            raise away(PROGRAM, f"{self.address}: {error.strerror or error}") from None
        except http.client.HTTPException as error:
            raise self.unreadable(error, method) from None

    def _send(self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]) -> _Answer:
        connection = self._connection()
        try:
            connection.request(method, target, data, dict(headers))
            answer = connection.getresponse()
            body = answer.read()
            # Parsed here, in the thread: with thousands of jobs that takes long.
            document = _document(body)
            start = "" if document is not None else body[:100].decode(errors="replace").strip()
            return _Answer(answer.status, document, start)
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

    def _read(self, answer: _Answer, method: str, proof: str = "") -> dict[str, Any]:
        if answer.status in _UNAUTHORIZED:
            raise self._unauthorized()
        status, document = answer.status, answer.document
        # With 4xx a request was refused; other answers without Slurm's words leave it open.
        is_refusal = http.HTTPStatus.BAD_REQUEST <= status < http.HTTPStatus.INTERNAL_SERVER_ERROR
        if document is None:
            raise self._unreadable(f"HTTP {status}, {answer.start!r}", "GET" if is_refusal else method)
        number = document.get(proof)
        if isinstance(number, int) and number > 0:
            return document
        if words := _complaint(document.get("errors")):
            raise refusal(PROGRAM, words)
        if status >= http.HTTPStatus.BAD_REQUEST:
            text = f"HTTP {status}"
            raise refusal(PROGRAM, text) if is_refusal or method == "GET" else away(PROGRAM, text)
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

    def unreadable(self, error: Exception, method: str = "GET") -> SlurmError:
        """The error for an answer that lacks what is needed.

        Args:
            error: What went wrong with it.
            method: Of the request. What changes something may have been done: Slurm counts as away then.
        """
        return self._unreadable(f"{type(error).__name__}: {error}", method)

    def _unreadable(self, reason: str, method: str) -> SlurmError:
        if method != "GET":
            return away(PROGRAM, reason[:200])
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
    """Slurm's words for what was wrong; empty where nothing was."""
    if not errors:
        return ""
    rows = [row for row in errors if isinstance(row, dict)] if isinstance(errors, list) else []
    words = [str(row.get("error") or row.get("description") or "") for row in rows]
    return "\n".join(dict.fromkeys(filter(None, words))) or str(errors)[:200]


def _token(file: Path) -> str:
    """The token in a file that nobody else may read."""
    try:
        readable_by_others = file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        token = file.read_text().strip().removeprefix("SLURM_JWT=")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else _("it is not text")
        raise SlurmError(
            _("The token for slurmrestd cannot be read from {file}: {reason}.", file=file, reason=reason),
            _("Write there what 'scontrol token username=slurm' prints, for root alone."),
            code="slurm-token",
        ) from None
    if readable_by_others or not token or not token.isascii() or len(token.split()) != 1:
        reason = _("other users may read it") if readable_by_others else _("it holds no token")
        raise SlurmError(
            _("The token for slurmrestd in {file} is not used: {reason}.", file=file, reason=reason),
            _("Write there what 'scontrol token username=slurm' prints, for root alone."),
            code="slurm-token",
        )
    return token
