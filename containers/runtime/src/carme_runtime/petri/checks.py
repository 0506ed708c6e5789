"""What is wrong with a net, seen before it runs.

The state space is that of plain tokens: guards are taken to pass at times, and what generators give is
unknown. What depends on them is not reported.
"""

import inspect
import math
import operator
import typing
from collections import deque
from dataclasses import dataclass
from typing import Any

from carme_runtime.petri.commands import Command
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.model import Arc, Place, Transition

#: So many states are explored at most; a net with more is not judged by them.
MOST_STATES = 4_000
#: The most tokens that are assumed in a place that the program puts tokens into.
MOST_ASSUMED = 12


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: `kind` is types, capacity, unreachable, unbounded or deadlock."""

    kind: str
    where: str
    sentence: str


def check(net: Definition) -> list[Finding]:
    """All findings, the gravest first."""
    found = [finding for transition in net.transitions.values() for finding in _local(transition)]
    if not found:
        found = _unreachable(net)
    return found or _states(net)


def _local(transition: Transition) -> list[Finding]:
    found = [*_types(transition), *_capacities(transition)]
    takes = {arc.place for arc in transition.flow.inputs if arc.kind in ("take", "read")}
    for arc in transition.flow.inputs:
        if arc.kind == "empty" and arc.weight == 1 and arc.place in takes:
            found.append(
                Finding(
                    "unreachable",
                    arc.place.name,
                    f"Transition {transition.name} can never start: it needs a token in place "
                    f"{arc.place.name} "
                    "and the place empty.",
                )
            )
    return found


def _capacities(transition: Transition) -> list[Finding]:
    found = []
    for arc in (*transition.flow.arguments, *transition.flow.outputs):
        capacity = arc.place.capacity
        if capacity is not None and arc.weight > capacity:
            found.append(
                Finding(
                    "capacity",
                    arc.place.name,
                    f"Transition {transition.name} has an arc of weight {arc.weight} to place "
                    f"{arc.place.name}, "
                    f"whose capacity is {capacity}.",
                )
            )
    if transition.generates:
        for arc in transition.flow.outputs:
            if arc.place.capacity is not None:
                found.append(
                    Finding(
                        "capacity",
                        arc.place.name,
                        f"Generator {transition.name} fills place {arc.place.name}, which has a "
                        "capacity: the number of tokens that it gives is unknown before it ends.",
                    )
                )
    return found


def _types(transition: Transition) -> list[Finding]:
    body = transition.body
    if body is None or isinstance(body, Command):
        return []
    try:
        hints = typing.get_type_hints(body)
        parameters = [
            name for name in inspect.signature(body).parameters if name not in ("attempt", "memory")
        ]
    except Exception:  # names that are not there at run time, built-in functions
        return []
    found = []
    for name, arc in zip(parameters, transition.flow.arguments, strict=False):
        if arc.kind != "count" and arc.weight == 1 and _differ(hints.get(name), arc.place.type):
            found.append(
                Finding(
                    "types",
                    arc.place.name,
                    f"Place {arc.place.name} holds {arc.place.type.__name__}, and parameter {name} of "
                    "transition "
                    f"{transition.name} is {hints[name].__name__}.",
                )
            )
    outputs = transition.flow.outputs
    if len(outputs) == 1 and outputs[0].weight == 1 and not transition.generates:
        place = outputs[0].place
        if "return" in hints and _differ(place.type, hints["return"]):
            found.append(
                Finding(
                    "types",
                    place.name,
                    f"Place {place.name} holds {place.type.__name__}, and transition "
                    f"{transition.name} returns "
                    f"{hints['return'].__name__}.",
                )
            )
    return found


def _differ(wanted: Any, actual: Any) -> bool:
    """Whether two classes have nothing to do with each other; what is not a class is not judged."""
    if not isinstance(wanted, type) or not isinstance(actual, type) or typing.get_origin(wanted):
        return False
    # Since Python 3.11 Any is a class.
    if {object, Any} & {wanted, actual} or (wanted is float and actual is int):
        return False
    return not issubclass(actual, wanted) and not issubclass(wanted, actual)


def _entries(net: Definition) -> list[Place]:
    """Places that the program puts tokens into: no transition does, and they begin without any."""
    filled = {arc.place for transition in net.transitions.values() for arc in transition.flow.outputs}
    return [p for p in net.places.values() if p.entry or (p not in filled and not p.tokens)]


def _unreachable(net: Definition) -> list[Finding]:
    marked = {*_entries(net), *(place for place in net.places.values() if place.tokens)}
    waiting = list(net.transitions.values())
    while True:
        able = [t for t in waiting if all(arc.place in marked for arc in _needed(t))]
        if not able:
            break
        marked |= {arc.place for t in able for arc in t.flow.outputs}
        waiting = [t for t in waiting if t not in able]
    found = []
    for transition in waiting:
        place = next(arc.place for arc in _needed(transition) if arc.place not in marked)
        found.append(
            Finding(
                "unreachable",
                place.name,
                f"Transition {transition.name} can never start: no token ever comes to place {place.name} "
                "(give it tokens=, or entry=True if your program puts some).",
            )
        )
    return found


Marking = tuple[int, ...]


class _Space:
    """The plain net."""

    def __init__(self, net: Definition) -> None:
        self.net = net
        self.places = list(net.places.values())
        self.rules = list(net.transitions.values())
        assumed = min(MOST_ASSUMED, math.lcm(*(arc.weight for t in self.rules for arc in _arcs(t))))
        self.entries = {place.index for place in _entries(net)}
        self.start: Marking = tuple(
            len(p.tokens) + (min(assumed, p.capacity or assumed) if p.index in self.entries else 0)
            for p in self.places
        )
        self.limited = {p.index for p in self.places if p.capacity is not None} | {
            arc.place.index for t in self.rules for arc in t.flow.inputs if arc.kind == "empty"
        }
        self.uncertain = {
            t.index
            for t in self.rules
            if t.guard or t.generates or any(arc.kind == "count" for arc in t.flow.inputs)
        }

    def fire(self, marking: Marking, rule: Transition) -> Marking | None:
        """What a transition makes of a marking, or None where it cannot start."""
        for arc in rule.flow.inputs:
            count = marking[arc.place.index]
            if arc.kind == "count":
                continue
            if count >= arc.weight if arc.kind == "empty" else count < arc.weight:
                return None
        after = list(marking)
        for arc in rule.flow.inputs:
            if arc.kind == "take":
                after[arc.place.index] -= arc.weight
        for arc in rule.flow.inputs:
            if after[arc.place.index] < (arc.weight if arc.kind == "read" else 0):
                return None
        for arc in rule.flow.outputs:
            after[arc.place.index] += arc.weight
        for arc in rule.flow.outputs:
            capacity = arc.place.capacity
            if capacity is not None and after[arc.place.index] > capacity:
                return None
        return tuple(after)


def _states(net: Definition) -> list[Finding]:
    """Unbounded places and deadlocks, in the states from the first marking on."""
    if not net.transitions:
        return []
    space = _Space(net)
    before: dict[Marking, tuple[Marking, int] | None] = {space.start: None}
    waiting, dead = deque([space.start]), []
    while waiting:
        marking = waiting.popleft()
        ends = True
        for rule in space.rules:
            after = space.fire(marking, rule)
            if after is None:
                continue
            ends = False
            if after in before:
                continue
            before[after] = (marking, rule.index)
            if (place := _grows(space, before, after)) is not None:
                return [_unbounded(space, place, rule)]
            if len(before) > MOST_STATES:
                return []
            waiting.append(after)
        if ends:
            dead.append(marking)
    if any(rule.generates for rule in space.rules):
        return []
    return next(([finding] for finding in (_deadlock(space, m) for m in dead) if finding), [])


def _grows(space: _Space, before: dict[Marking, Any], after: Marking) -> int | None:
    """A place that grows for ever: the steps from a smaller marking to this one can be repeated."""
    marking = after
    while (step := before[marking]) is not None:
        marking, rule = step
        if rule in space.uncertain:
            return None
        if not all(map(operator.ge, after, marking)):
            continue
        differences = [new - old for new, old in zip(after, marking, strict=True)]
        if not any(differences[index] for index in space.limited):
            return max(range(len(differences)), key=lambda index: differences[index])
    return None


def _unbounded(space: _Space, place: int, rule: Transition) -> Finding:
    name = space.places[place].name
    return Finding(
        "unbounded",
        name,
        f"Place {name} can grow without bound: transition {rule.name} can start again and again "
        "(give the place a capacity, or take a token that nothing gives back).",
    )


def _deadlock(space: _Space, marking: Marking) -> Finding | None:
    """What is stuck where nothing can start: tokens that were not there at the beginning, and are awaited."""
    for place in space.places:
        if place.index in space.entries or marking[place.index] <= len(place.tokens):
            continue
        takers = [t for t in space.rules if any(a.place is place and a.kind == "take" for a in t.flow.inputs)]
        if not takers:
            continue
        return Finding(
            "deadlock",
            place.name,
            f"The net can come to a standstill with a token in place {place.name}: transition "
            f"{takers[0].name} "
            f"waits for {_awaited(space, takers[0], marking)}.",
        )
    return None


def _awaited(space: _Space, rule: Transition, marking: Marking) -> str:
    for arc in rule.flow.inputs:
        count = marking[arc.place.index]
        if arc.kind == "empty" and count >= arc.weight:
            return f"place {arc.place.name} to be empty"
        if arc.kind in ("take", "read") and count < arc.weight:
            return f"a token in place {arc.place.name}"
    full = (arc.place.name for arc in rule.flow.outputs if arc.place.capacity is not None)
    return f"room in place {next(full, 'none')}"


def _needed(transition: Transition) -> list[Arc]:
    return [arc for arc in transition.flow.inputs if arc.kind in ("take", "read")]


def _arcs(transition: Transition) -> list[Arc]:
    return [*transition.flow.inputs, *transition.flow.outputs]
