"""Places, arcs and transitions: what a net is made of.

    2 * parts + tool.read + stop.empty >> product

reads: take two tokens of `parts`, look at one of `tool`, only while `stop` is empty; give one to `product`.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.petri.errors import PetriError

Class = type  # places have an attribute of that name
Kind = Literal["take", "read", "empty", "count"]


@dataclass(frozen=True, eq=False)
class Arc:
    """Between a place and a transition.

    Of kind `empty` it asks for fewer tokens than its weight; of kind `count` it asks for none, and gives
    their number.
    """

    place: "Place"
    weight: int = 1
    kind: Kind = "take"


class _Operand:
    """What can stand on a side of `>>`."""

    def arcs(self) -> tuple[Arc, ...]:
        raise NotImplementedError

    def __add__(self, other: "_Operand") -> "Side":
        if not isinstance(other, _Operand):
            return NotImplemented
        return Side((*self.arcs(), *other.arcs()))

    def __mul__(self, weight: int) -> "Side":
        if not isinstance(weight, int) or isinstance(weight, bool):
            return NotImplemented
        if weight < 1:
            raise PetriError(f"The weight {weight} of an arc is not positive.", "Give one of at least 1.")
        for arc in self.arcs():
            if arc.kind == "count":
                raise PetriError(
                    f"The number of tokens in place {arc.place.name} has no weight.", "Leave it out."
                )
        return Side(tuple(Arc(arc.place, arc.weight * weight, arc.kind) for arc in self.arcs()))

    __rmul__ = __mul__

    def __rshift__(self, outputs: "_Operand | None") -> "Flow":
        if outputs is not None and not isinstance(outputs, _Operand):
            return NotImplemented
        return Flow(self.arcs(), outputs.arcs() if outputs is not None else ())

    def __rrshift__(self, inputs: None) -> "Flow":
        if inputs is not None:
            return NotImplemented
        return Flow((), self.arcs())


class Side(_Operand):
    """Several arcs of one side of a transition."""

    def __init__(self, arcs: tuple[Arc, ...]) -> None:
        self._arcs = arcs

    def arcs(self) -> tuple[Arc, ...]:
        return self._arcs


@dataclass(eq=False)
class Place(_Operand):
    """Where tokens lie.

    `capacity` is the most that it holds. `entry` says that the program puts tokens here, which is taken
    for granted where no transition does.
    """

    name: str
    type: Class = object
    capacity: int | None = None
    tokens: tuple[Any, ...] = ()
    entry: bool = False
    index: int = 0

    def arcs(self) -> tuple[Arc, ...]:
        return (Arc(self),)

    @property
    def read(self) -> Side:
        """An arc that needs a token and leaves it where it is."""
        return Side((Arc(self, kind="read"),))

    @property
    def empty(self) -> Side:
        """An inhibitor arc: `p.empty` needs no token in p, `3 * p.empty` fewer than three."""
        return Side((Arc(self, kind="empty"),))

    @property
    def count(self) -> Side:
        """An arc that gives the number of tokens here, with those of tasks that run, to guard and body."""
        return Side((Arc(self, kind="count"),))

    def refusal(self, value: Any) -> str:
        """Why a value cannot be a token here, or nothing."""
        if self.type is object or isinstance(value, self.type):
            return ""
        if self.type is float and type(value) is int:
            return ""
        return f"Place {self.name} holds {self.type.__name__}, not {type(value).__name__} ({short(value)})."


@dataclass(frozen=True, eq=False)
class Flow:
    """The arcs of a transition: what `inputs >> outputs` gives."""

    inputs: tuple[Arc, ...]
    outputs: tuple[Arc, ...]

    def __post_init__(self) -> None:
        for arc in self.outputs:
            if arc.kind != "take":
                raise PetriError(
                    f"Place {arc.place.name} stands with .{arc.kind} among the outputs of a transition.",
                    "Outputs are places, with a weight at most.",
                )

    @property
    def arguments(self) -> tuple[Arc, ...]:
        """The arcs whose tokens the body gets, in its parameters' order."""
        return tuple(arc for arc in self.inputs if arc.kind != "empty")


@dataclass(eq=False)
class Transition:
    """What takes tokens, does something, and gives tokens.

    `body` gets a token for each input (a list where the weight is above 1) and returns a token for each
    output; a generator yields any number. Without a body plain tokens (None) are moved. `instead_of` is what
    it is another implementation of, which starts rather where it can. A task that takes longer than `limit`
    seconds is ended.
    """

    @property
    def preference(self) -> int:
        """Less than 0 for other implementations."""
        return self.instead_of.preference - 1 if self.instead_of else 0

    name: str
    flow: Flow
    body: Callable[..., Any] | None = None
    guard: Callable[..., Any] | None = None
    priority: int = 0
    retries: int = 0
    needs: dict[str, int] = field(default_factory=dict)
    index: int = 0
    instead_of: "Transition | None" = None
    limit: float | None = None
    generates: bool = False
    wants_attempt: bool = False
    wants_memory: bool = False

    def use(self, body: Callable[..., Any] | None) -> None:
        """Take `body` as what the transition does.

        Raises:
            PetriError: Its parameters do not fit the inputs.
        """
        self.body = body
        if body is None:
            return
        self.generates = inspect.isgeneratorfunction(body)
        try:
            parameters = inspect.signature(body).parameters
        except (TypeError, ValueError):  # built-in functions
            return
        self.wants_attempt, self.wants_memory = "attempt" in parameters, "memory" in parameters
        own = [None] * len(self.flow.arguments)
        more = {name: None for name in ("attempt", "memory") if name in parameters}
        try:
            inspect.signature(body).bind(*own, **more)
        except TypeError as error:
            names = ", ".join(arc.place.name for arc in self.flow.arguments) or "nothing"
            raise PetriError(
                f"Transition {self.name} gets tokens of {names}, and its function takes "
                f"({', '.join(parameters)}): "
                f"{error}.",
                "Give the function one parameter for each input, and perhaps some called attempt and memory.",
            ) from None


def parse_needs(text: str) -> dict[str, int]:
    """Resources such as `gpu:1,license:2,memory:4GiB`; a size is its number of bytes.

    Raises:
        PetriError: It is nothing of the kind.
    """
    needs: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, count = part.partition(":")
        amount = _amount(count or "1")
        if not name.isidentifier() or amount < 1:
            raise PetriError(
                f"'{part}' is not a resource.",
                "Write a name and a number or size, such as gpu:1 or memory:4GiB.",
            )
        needs[name] = needs.get(name, 0) + amount
    return needs


def _amount(text: str) -> int:
    """A number, or the bytes of a size with its unit; 0 for anything else."""
    if text.isascii() and text.isdigit():
        return int(text)
    with contextlib.suppress(CarmeRuntimeError):
        return parse_size(text) if text[-1].isalpha() else 0
    return 0


def show_amount(count: int) -> str:
    """How much of a resource is needed, as `parse_needs` reads it."""
    return f"{count >> 20}MiB" if count and count % (1 << 20) == 0 else str(count)


def group(arcs: Sequence[Arc], values: Sequence[Any]) -> list[Any]:
    """Values in the order of arcs as arguments: a list for each arc whose weight is above 1."""
    if len(arcs) == len(values):
        return list(values)
    grouped, rest = [], iter(values)
    for arc in arcs:
        grouped.append(next(rest) if arc.weight == 1 else [next(rest) for _ in range(arc.weight)])
    return grouped


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
