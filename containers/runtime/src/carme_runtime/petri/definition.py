"""What a net consists of: its places and transitions, by their names. It runs nothing."""

import math
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from carme_runtime.petri.commands import Command
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Arc, Flow, Place, Transition, parse_needs

Function = TypeVar("Function", bound=Callable[..., Any])

_CLASS = type  # `place` has a parameter of that name

#: Every net that this process has made: resuming runs the script of a run and finds its net here.
nets: "weakref.WeakSet[Definition]" = weakref.WeakSet()


class Definition:
    """The places and transitions of a net; `Net` is what users make."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise PetriError(
                f"'{name}' is not a valid name of a net.", "Use letters, digits, '-', '_' and '.'."
            )
        self.name = name
        caller = sys._getframe(1).f_globals
        #: The module and the file that made it, to resume a run of it.
        self.origin: tuple[str, str] = (caller.get("__name__", ""), caller.get("__file__") or "")
        #: Which micro-batch a token is of: traces show it with the firing that gave it.
        self.number_of: Callable[[Any], int] | None = None
        self.places: dict[str, Place] = {}
        self.transitions: dict[str, Transition] = {}
        nets.add(self)

    def place(
        self,
        name: str,
        type: type = object,
        *,
        capacity: int | None = None,
        tokens: Iterable[Any] = (),
        entry: bool = False,
    ) -> Place:
        """Add a place.

        Args:
            name: Unique in the net; commands use it as `{name}`.
            type: What its tokens are instances of.
            capacity: The most tokens that it holds; transitions wait for room.
            tokens: Those that it has when a run starts.
            entry: The program puts tokens here, although a transition does too.

        Raises:
            PetriError: The name is taken, the capacity too small, or a token of another type.
        """
        if name in self.places:
            raise PetriError(f"Net {self.name} has a place {name} already.", "Choose another name.")
        if not name.isidentifier():
            raise PetriError(f"'{name}' is not a valid name of a place.", "Use letters, digits and '_'.")
        if not isinstance(type, _CLASS):
            raise PetriError(f"The type of place {name} is {type!r}, which is not a class.", "Give a class.")
        place = Place(name, type, capacity, tuple(tokens), entry, len(self.places))
        if capacity is not None and capacity < max(1, len(place.tokens)):
            raise PetriError(
                f"Place {name} has a capacity of {capacity}.", "Give at least 1, and enough for its tokens."
            )
        for refusal in filter(None, map(place.refusal, place.tokens)):
            raise PetriError(refusal, "Give tokens of the place's type.")
        self.places[name] = place
        return place

    @overload
    def transition(
        self,
        flow: Flow,
        /,
        *,
        name: str = "",
        guard: Callable[..., Any] | None = None,
        priority: int = 0,
        retries: int = 0,
        needs: str = "",
        limit: float | None = None,
    ) -> Callable[[Function], Function]: ...

    @overload
    def transition(
        self,
        command: str | Sequence[str],
        flow: Flow,
        /,
        *,
        name: str = "",
        guard: Callable[..., Any] | None = None,
        priority: int = 0,
        retries: int = 0,
        needs: str = "",
        limit: float | None = None,
        gives: str | Sequence[str] = "{stdout}",
    ) -> Transition: ...

    def transition(self, first: Any, second: Any = None, /, **options: Any) -> Any:
        """Add a transition: decorate a function, or give a command and its arcs.

        Args:
            first: `inputs >> outputs`, or a command whose words may have fields such as `{mesh}`: what the
                input place of that name gives. No shell sees it.
            second: `inputs >> outputs` of a command.
            options: `name` (default: the function's or program's), `guard` (a function of the inputs;
                runs in the coordinator or a worker: let it depend on them alone, be quick, and have no
                effects), `priority` (higher ones start first), `retries` (how often a task that fails
                runs again), `needs` (such as "gpu:1"), `limit` (seconds after which a task is ended,
                which counts as a failure), and for commands `gives`: the text of each output's token,
                default what the program printed.

        Raises:
            PetriError: Something does not fit.
        """
        if isinstance(first, Flow):
            return lambda body: self._decorate(body, first, options)
        if not isinstance(first, str | list | tuple) or not isinstance(second, Flow):
            raise PetriError(
                "A transition needs its arcs.",
                "Write @net.transition(inputs >> outputs) or net.transition('program {input}', "
                "inputs >> outputs).",
            )
        command = Command(first, second, options.pop("gives", "{stdout}"))
        return self.add(options.pop("name", "") or command.name, second, command, **options)

    def _decorate(self, body: Callable[..., Any], flow: Flow, options: dict[str, Any]) -> Callable[..., Any]:
        named = dict(options)
        self.add(named.pop("name", "") or getattr(body, "__name__", "transition"), flow, body, **named)
        return body

    def add(
        self,
        name: str,
        flow: Flow,
        body: Callable[..., Any] | None = None,
        *,
        guard: Callable[..., Any] | None = None,
        priority: int = 0,
        retries: int = 0,
        needs: str = "",
        limit: float | None = None,
    ) -> Transition:
        """Add a transition by its parts; without a body it moves plain tokens.

        Raises:
            PetriError: The name is taken, an arc goes to a place of another net, or a number makes no sense.
        """
        if name in self.transitions:
            raise PetriError(
                f"Net {self.name} has a transition {name} already.", "Give it a name= of its own."
            )
        for arc in (*flow.inputs, *flow.outputs):
            if self.places.get(arc.place.name) is not arc.place:
                raise PetriError(
                    f"Place {arc.place.name} of transition {name} is not of net {self.name}.",
                    "Make it with net.place.",
                )
        if retries < 0:
            raise PetriError(f"Transition {name} has {retries} retries.", "Give 0 or more.")
        index = len(self.transitions)
        transition = Transition(name, flow, None, guard, priority, retries, parse_needs(needs), index)
        transition.limit = _limit_of(name, limit)
        transition.use(body)
        self.transitions[name] = transition
        return transition

    def implementation(
        self, of: str, *, needs: str = "", retries: int = 0, limit: float | None = None
    ) -> Callable[[Function], Function]:
        """Decorate another function that can do what a transition does, with other needs.

        Those added first start rather, wherever what they need is free: a GPU first, and cores when all GPUs
        are busy or where a run offers none.

        Args:
            of: The name of the transition.
            needs: What this function needs.
            retries: How often a task of it that fails runs again.
            limit: Seconds after which a task of it is ended.

        Raises:
            PetriError: There is no such transition, or the function does not fit.
        """
        if of not in self.transitions:
            raise PetriError(f"Net {self.name} has no transition {of}.", "Its names are in net.transitions.")

        def decorate(body: Function) -> Function:
            last = first = self.transitions[of]
            for each in self.transitions.values():
                if each.instead_of is last:
                    last = each
            name = getattr(body, "__name__", of)
            name = name if name not in self.transitions else f"{of}_{1 - last.preference}"
            added = self.add(
                name,
                first.flow,
                body,
                guard=first.guard,
                priority=first.priority,
                retries=retries,
                needs=needs,
                limit=limit,
            )
            added.instead_of = last
            return body

        return decorate

    def include(self, part: "Definition", name: str, **places: Place) -> dict[str, Place]:
        """Make the places and transitions of another net part of this one: a subnet.

        A net that is made by a function is a template: each call gives another one.

        Args:
            part: The net to include; it stays as it is.
            name: Goes ahead of the names of what is included, with a "_".
            places: By their names in the part those of this net that are to stand for them.

        Returns:
            The places of this net by their names in the part.

        Raises:
            PetriError: The part has no such place, or one of another type, or a name is taken.
        """
        existing = ", ".join(f"{each.name} of {each.type.__name__}" for each in part.places.values())
        for own, place in places.items():
            if own not in part.places or part.places[own].type is not place.type:
                raise PetriError(
                    f"Net {part.name} has no place {own} of {place.type.__name__} to be place {place.name}.",
                    f"There are {existing}.",
                )
        found = dict(places)
        for own, place in part.places.items():
            if own not in found:
                found[own] = self.place(
                    f"{name}_{own}",
                    place.type,
                    capacity=place.capacity,
                    tokens=place.tokens,
                    entry=place.entry,
                )
        copies: dict[Transition, Transition] = {}
        for own, each in part.transitions.items():
            inputs, outputs = (
                tuple(Arc(found[arc.place.name], arc.weight, arc.kind) for arc in arcs)
                for arcs in (each.flow.inputs, each.flow.outputs)
            )
            copied = Transition(
                f"{name}_{own}",
                Flow(inputs, outputs),
                None,
                each.guard,
                each.priority,
                each.retries,
                dict(each.needs),
                len(self.transitions),
                instead_of=copies.get(each.instead_of) if each.instead_of else None,
                limit=each.limit,
            )
            if copied.name in self.transitions:
                raise PetriError(
                    f"Net {self.name} has a transition {copied.name} already.", "Include it by another name."
                )
            copied.use(each.body)
            copies[each] = self.transitions[copied.name] = copied
        return found

    def bind(self, name: str, body: Callable[..., Any]) -> None:
        """Give a transition, of an imported net for example, what it does.

        Raises:
            PetriError: There is no such transition, or the function does not fit.
        """
        if name not in self.transitions:
            raise PetriError(
                f"Net {self.name} has no transition {name}.", "Its names are in net.transitions."
            )
        self.transitions[name].use(body)


def _limit_of(name: str, seconds: float | None) -> float | None:
    """A limit of a transition. Raises PetriError where it is none."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise PetriError(f"Transition {name} has a limit of {seconds!r}.", "Give it in seconds, such as 600.")
    return float(seconds)
