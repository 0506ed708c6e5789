"""From a request line to the handler of its operation, past what the operation's declaration demands."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from carme.broker import protocol
from carme.broker.audit import AuditLog
from carme.broker.operations import Operation
from carme.broker.peers import Peer, require_rights
from carme.errors import Denied, InvalidRequest, NotFound
from carme.jobs import JobRequest, refusal
from carme.jobs.requests import UNKNOWN_FIELD
from carme.slurm import UnixAccount
from carme.translation import message as _

__all__ = ["Dispatcher", "HandOver", "handles", "hands_over"]

S = TypeVar("S")
O = TypeVar("O", bound=Operation[Any])  # noqa: E741
R = TypeVar("R")

_OPERATION = "__operation__"


class HandOver(NamedTuple):
    """The peer's connection becomes that of a program which runs as a user."""

    account: UnixAccount
    arguments: list[str]


def handles(
    kind: type[Operation[R]],
) -> Callable[[Callable[[S, Peer, O], Awaitable[R]]], Callable[[S, Peer, O], Awaitable[R]]]:
    """Make a method the handler of an operation, whose result it returns."""

    def register(method: Callable[[S, Peer, O], Awaitable[R]]) -> Callable[[S, Peer, O], Awaitable[R]]:
        setattr(method, _OPERATION, kind)
        return method

    return register


def hands_over(
    kind: type[Operation[None]],
) -> Callable[[Callable[[S, Peer, O], Awaitable[HandOver]]], Callable[[S, Peer, O], Awaitable[HandOver]]]:
    """Make a method the handler of an operation after which a program has the connection."""

    def register(
        method: Callable[[S, Peer, O], Awaitable[HandOver]],
    ) -> Callable[[S, Peer, O], Awaitable[HandOver]]:
        setattr(method, _OPERATION, kind)
        return method

    return register


class Dispatcher:
    """Passes requests to handlers.

    Args:
        audit: Where refusals are recorded.
        services: Objects whose methods handle operations; each operation must have one handler.
    """

    def __init__(self, audit: AuditLog, services: Iterable[object]) -> None:
        self._audit = audit
        self._handlers: dict[type[Operation[Any]], tuple[object, str]] = {}
        for service in services:
            for name, member in vars(type(service)).items():
                if (kind := getattr(member, _OPERATION, None)) is None:
                    continue
                if kind in self._handlers:
                    raise TypeError(f"The operation {kind.method} has two handlers.")
                self._handlers[kind] = service, name
        if missing := set(protocol.OPERATIONS.values()) - self._handlers.keys():
            names = ", ".join(sorted(kind.method for kind in missing))
            raise TypeError(f"No handler for these operations: {names}.")

    async def answer(self, peer: Peer, line: bytes) -> Any:
        """The result of one request line. Raises the error that the peer gets."""
        try:
            request = _parse(line)
        except InvalidRequest as error:
            self._audit.record(peer, "malformed", None, error.code)
            raise
        try:
            require_rights(peer, request.rights)
            service, name = self._handlers[type(request)]
            return await getattr(service, name)(peer, request)
        except (Denied, NotFound) as error:
            # Services look for jobs that Slurm has forgotten; a user who asks for others' is worth a line.
            if isinstance(error, Denied) or not peer.trusted:
                about = {name: getattr(request, name, None) for name in ("user", "job_id")}
                self._audit.record(peer, request.method, result=error.code, message=error.message, **about)
            raise


def _parse(line: bytes) -> Operation[Any]:
    try:
        return protocol.request_adapter.validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        where = detail["loc"]
        if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
            raise InvalidRequest(
                _("The broker does not know this method."),
                _("It knows: {operations}.", operations=", ".join(sorted(protocol.OPERATIONS))),
                field="method",
            ) from None
        # A method that takes no request may be sent one all the same.
        if where[1:2] == ("request",) and (len(where) > 2 or detail["type"] not in UNKNOWN_FIELD):
            raise refusal(error, JobRequest, skip=2) from None
        kind = protocol.OPERATIONS.get(str(where[0])) if where else None
        raise refusal(error, kind or protocol.Answer, skip=1) from None
