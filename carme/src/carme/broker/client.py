"""Clients of the broker, for plain and for asyncio programs. Each call has its own connection."""

import os
import socket as sockets
from collections.abc import Callable, Coroutine
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, overload

from pydantic import ValidationError

from carme.broker import protocol
from carme.broker.protocol import Operation, Request
from carme.broker.silence import Silence, unreachable
from carme.config import load
from carme.errors import BrokerTimeout, BrokerUnavailable, InvalidRequest
from carme.jobs import refusal
from carme.translation import message as _

__all__ = ["AsyncBrokerClient", "BrokerClient", "LastAnswers", "open_files"]

TIMEOUT = 60.0  # seconds
#: For these no client waits less: what it has given up may be submitted all the same, and then a second time.
_SUBMISSIONS = (protocol.Submit, protocol.Resubmit, protocol.StageIn)

P = ParamSpec("P")
R = TypeVar("R")


def _line(request: Request) -> bytes:
    line = protocol.request_adapter.dump_json(request) + b"\n"
    if len(line) > protocol.MAXIMUM_LINE:
        raise InvalidRequest(
            _(
                "The request has {count} bytes; at most {maximum_line} are allowed.",
                count=len(line),
                maximum_line=protocol.MAXIMUM_LINE,
            ),
            _("Put large values into a file and name the file."),
        )
    return line


def _wait_of(request: Request) -> float:
    """Seconds for which the request itself has the broker wait."""
    return request.wait if isinstance(request, protocol.GetEvents) else 0.0


def _timeout_of(request: Request, timeout: float) -> float:
    return max(timeout, TIMEOUT) if isinstance(request, _SUBMISSIONS) else timeout + _wait_of(request)


def _result(request: Request, line: bytes, socket: Path, *, is_long: bool = False) -> Any:
    """The result that an answer brings; raises what it says instead."""
    if not line.endswith(b"\n"):
        raise unreachable(socket, _("it closed the connection without an answer"))
    try:
        kind = protocol.answer_of(type(request)) if is_long else protocol.Answer
        answer = kind.model_validate_json(line)
        if answer.error:
            raise answer.error.error()
        if is_long and answer.result is not None:
            return answer.result
        return request.result.validate_python(answer.result)
    except ValidationError:
        raise unreachable(socket, _("its answer is not what this version of Carme expects")) from None


def _failed(socket: Path, error: OSError) -> BrokerUnavailable:
    if isinstance(error, TimeoutError):
        return unreachable(socket, _("it took too long"), BrokerTimeout)
    return unreachable(socket, (error.strerror or str(error)).lower())


def open_files(broker: "BrokerClient", user: str) -> sockets.socket:
    """For services: a connection to a user's files, as `carme.files` speaks it; the caller closes it.

    Raises what the methods of BrokerClient do.
    """
    request = Call(protocol.OpenFiles).request(user=user)
    connection = sockets.socket(sockets.AF_UNIX)
    try:
        broker._send(connection, request, _line(request))
        # Byte by byte: what follows the line is no longer the broker's.
        answer = bytearray()
        while not answer.endswith(b"\n") and (byte := connection.recv(1)):
            answer += byte
        _result(request, bytes(answer), broker.socket)
    except OSError as error:
        connection.close()
        raise _failed(broker.socket, error) from None
    except BaseException:
        connection.close()
        raise
    return connection


class Call(Generic[P, R]):
    """An operation of the broker as a method of both clients.

    Its parameters are the operation's fields, its help is the operation's docstring. The plain client's
    method returns the result, the asyncio client's a coroutine.
    """

    def __init__(self, operation: Callable[P, Operation[R]]) -> None:
        self._operation = cast(type[Operation[R]], operation)
        self._methods: dict[bool, Any] = {}

    @overload
    def __get__(self, client: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, client: "BrokerClient", owner: type[Any] | None = None) -> Callable[P, R]: ...
    @overload
    def __get__(
        self, client: "AsyncBrokerClient", owner: type[Any] | None = None
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, client: Any, owner: type[Any] | None = None) -> Any:
        waits = issubclass(owner or type(client), AsyncBrokerClient)
        if waits not in self._methods:
            self._methods[waits] = self._described(self._coroutine() if waits else self._plain())
        return self._methods[waits].__get__(client, owner)

    def request(self, *args: P.args, **values: P.kwargs) -> Request:
        """The request with these values. Raises InvalidRequest."""
        bound = self._signature.bind(*args, **values)
        try:
            return self._operation(**bound.arguments)
        except ValidationError as error:
            raise refusal(error, self._operation) from None

    @cached_property
    def _signature(self) -> Signature:
        return self._operation.signature()

    def _plain(self) -> Callable[..., R]:
        def call(self: "BrokerClient", *args: P.args, **values: P.kwargs) -> R:
            return self._perform(request(*args, **values))

        request = self.request
        return call

    def _coroutine(self) -> Callable[..., Coroutine[Any, Any, R]]:
        async def call(self: "AsyncBrokerClient", *args: P.args, **values: P.kwargs) -> R:
            return await self._perform(request(*args, **values))

        request = self.request
        return call

    def _described(self, method: Any) -> Any:
        """The method with the operation's name, help and signature."""
        method.__name__ = self._operation.method
        method.__qualname__ = f"BrokerClient.{method.__name__}"
        method.__doc__ = self._operation.help()
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        method.__signature__ = self._signature.replace(parameters=[own, *self._signature.parameters.values()])
        return method


class _Client:
    """The broker's operations, each with its own connection."""

    submit = Call(protocol.Submit)
    bring = Call(protocol.StageIn)
    test = Call(protocol.TestStart)
    cancel = Call(protocol.Cancel)
    extend = Call(protocol.Extend)
    job = Call(protocol.GetJob)
    jobs = Call(protocol.GetJobs)
    running = Call(protocol.GetRunning)
    history = Call(protocol.GetHistory)
    log = Call(protocol.GetLog)
    result = Call(protocol.GetResult)
    facts = Call(protocol.GetFacts)
    net = Call(protocol.GetNet)
    recipe = Call(protocol.GetRecipe)
    resubmit = Call(protocol.Resubmit)
    script = Call(protocol.GetScript)
    cluster = Call(protocol.GetCluster)
    forecast = Call(protocol.GetForecast)
    report = Call(protocol.GetReport)
    warnings = Call(protocol.GetWarnings)
    access = Call(protocol.GetAccess)
    coordinated_accounts = Call(protocol.GetCoordinatedAccounts)
    overview = Call(protocol.GetOverview)
    events = Call(protocol.GetEvents)
    sessions = Call(protocol.GetSessions)
    session = Call(protocol.GetSession)
    note = Call(protocol.Note)
    reservations = Call(protocol.GetReservations)
    reserve = Call(protocol.Reserve)
    maintain = Call(protocol.Maintain)
    release = Call(protocol.Release)
    projects = Call(protocol.GetProjects)
    grant = Call(protocol.PutGrant)
    node = Call(protocol.SetNode)
    enrol = Call(protocol.Enrol)

    def __init__(self, socket: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT) -> None:
        self.socket = Path(socket) if socket is not None else load().broker.socket
        self.timeout = timeout


class LastAnswers:
    """The last answer to each request of a client that asks the same again and again, for long answers.

    An answer whose bytes are those of the last one is not read again: it is the very same object, which
    nobody may change therefore.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bytes, Any]] = {}

    def result(self, request: Request, line: bytes, answer: bytes, socket: Path) -> Any:
        """The result that an answer brings; raises what it says instead.

        Args:
            line: The request as it was sent.
        """
        before, result = self._known.get(line, (b"", None))
        if before != answer:
            result = _result(request, answer, socket, is_long=True)
            self._known[line] = answer, result
        return result


class BrokerClient(_Client):
    """The broker, for a plain program.

    Args:
        socket: The broker's Unix socket; by default the one that `carme.toml` names.
        timeout: Seconds without an answer, beyond the time that a request itself waits; submissions get 60 s
            at least.
        answers: Those of the same requests before; None: each answer is read.
        silence: Gives up a broker that hangs before the timeout; None: the timeout alone does.

    Every method raises `BrokerUnavailable` when there is no broker (`BrokerTimeout` when it takes too long
    and may still do what was requested), and what the broker refuses as `InvalidRequest`, `Denied`,
    `NotFound` or `SlurmError`.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        timeout: float = TIMEOUT,
        answers: LastAnswers | None = None,
        silence: Silence | None = None,
    ) -> None:
        super().__init__(socket, timeout)
        self._answers = answers
        self._silence = silence

    def _send(self, connection: sockets.socket, request: Request, line: bytes) -> None:
        """Connect and send a request. With a `Silence` also wait until its answer begins."""
        if self._silence is not None:
            self._silence.check(self.socket)
        connection.settimeout(_timeout_of(request, self.timeout))
        connection.connect(str(self.socket))
        connection.sendall(line)
        if self._silence is not None:
            self._silence.wait(connection, self.socket, _wait_of(request))

    def _perform(self, request: Request) -> Any:
        line = _line(request)
        try:
            with sockets.socket(sockets.AF_UNIX) as connection:
                self._send(connection, request, line)
                with connection.makefile("rb") as stream:
                    answer = stream.readline()
        except OSError as error:
            raise _failed(self.socket, error) from None
        if self._answers is not None:
            return self._answers.result(request, line, answer, self.socket)
        return _result(request, answer, self.socket)


class AsyncBrokerClient(_Client):
    """The same as `BrokerClient`, for asyncio programs."""

    async def _perform(self, request: Request) -> Any:
        import asyncio  # which plain programs do not need

        line = _line(request)
        try:
            async with asyncio.timeout(_timeout_of(request, self.timeout)):
                answer = await self._exchange(line)
        except OSError as error:
            raise _failed(self.socket, error) from None
        return _result(request, answer, self.socket)

    async def _exchange(self, line: bytes) -> bytes:
        import asyncio

        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            writer.write(line)
            await writer.drain()
            # Answers have no length limit, so read to the end: the broker closes after we do.
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()
