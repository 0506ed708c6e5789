"""How an operation of the broker is declared: once, for dispatch, clients, audit log and documentation.

An operation is a class: its fields are the request, its type argument the result, its docstring the help.

    @operation("job")
    class GetJob(Operation[Job]):
        "One job."

        job_id: JobId
        user: User = None
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

__all__ = ["EVERYONE", "OPERATIONS", "Operation", "Rights", "observers", "operation", "services"]

R_co = TypeVar("R_co", covariant=True)
O = TypeVar("O", bound="Operation[Any]")  # noqa: E741

#: Every operation by its name on the wire.
OPERATIONS: dict[str, type["Operation[Any]"]] = {}


@dataclasses.dataclass(frozen=True)
class Rights:
    """Who may request an operation.

    Attributes:
        group: Everyone, the site's services (and root), or observers (and services).
        message, remedy: The error for all others; the message begins with their account's name.
    """

    group: Literal["everyone", "services", "observers"]
    message: str = ""
    remedy: str = ""

    @property
    def text(self) -> str:
        """The rule in words; empty for everyone."""
        return {"everyone": "", "services": "Services only.", "observers": "Services and observers only."}[
            self.group
        ]


EVERYONE = Rights("everyone")


def services(what: str, by: str = "portal does", remedy: str = "Use the portal.") -> Rights:
    """Services only: all others `may not` do what, but the site's portal does it."""
    return Rights("services", f"may not {what}; the site's {by}.", remedy)


def observers(what: str, by: str, remedy: str) -> Rights:
    """Services and observers only: all others `may not` do what."""
    return Rights("observers", f"may not {what}; the site's {by}.", remedy)


class Operation(Generic[R_co]):
    """What a peer requests from the broker; `R_co` is the type of the result.

    Attributes:
        method: Its name on the wire, and of the clients' method.
        rights: Who may request it.
        result: Reads and writes the result.
        is_audited: Whether it goes into the audit log, with what `audit` returns.
    """

    method: ClassVar[str]
    rights: ClassVar[Rights]
    result: ClassVar[TypeAdapter[Any]]
    is_audited: ClassVar[bool]

    def audit(self) -> dict[str, Any]:
        """What of the request goes into the audit log: no command, environment or other value of a user."""
        return {}

    @classmethod
    def result_type(cls) -> Any:
        """The type of the result."""
        (result,) = get_args(vars(cls)["__orig_bases__"][0])
        return None if result is type(None) else result

    @classmethod
    def help(cls) -> str:
        """What it does, and who may request it."""
        text = inspect.getdoc(cls) or ""
        return f"{text}\n\n{cls.rights.text}" if cls.rights.text else text

    @classmethod
    def signature(cls) -> inspect.Signature:
        """The request's fields as a function's parameters, without their limits."""
        hints = get_type_hints(cls)
        parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
            if field.name != "method"
        ]
        return inspect.Signature(parameters, return_annotation=cls.result_type())


@dataclass_transform(frozen_default=True)
def operation(method: str, rights: Rights = EVERYONE) -> Callable[[type[O]], type[O]]:
    """Declare an operation: its name on the wire, and who may request it."""

    def declare(kind: type[O]) -> type[O]:
        declared: Any = kind
        # On the wire the name distinguishes one operation from another; in a program the class does.
        declared.__annotations__ = {"method": Literal[method], **vars(kind).get("__annotations__", {})}
        declared.method = dataclasses.field(default=method, kw_only=True)
        operation_class: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(declared)
        operation_class.rights = rights
        operation_class.result = TypeAdapter(operation_class.result_type())
        operation_class.is_audited = "audit" in vars(kind)
        OPERATIONS[method] = operation_class
        return operation_class

    return declare
