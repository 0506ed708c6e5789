"""Nets whose functions run elsewhere: the net's own workers hand each task on and wait for what it gives."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from carme_runtime.petri.commands import Command
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.memory import Range
from carme_runtime.petri.model import Transition


def forwarded(
    net: Definition, forwarder: Callable[[Transition], Callable[..., Any]], limited: bool = True
) -> Definition:
    """The net as its workers have it.

    Args:
        net: Which.
        forwarder: Makes what is called instead of a transition's function. Functions that use ranges, and
            commands, stay as they are: they run where the ranges are.
        limited: Whether the net's workers see to limits of what they hand on; otherwise `forwarder` does.
    """
    forwarding = copy.copy(net)
    forwarding.transitions = {
        name: each
        if _is_local(each)
        else replace(each, body=forwarder(each), limit=each.limit if limited else None)
        for name, each in net.transitions.items()
    }
    return forwarding


def _is_local(transition: Transition) -> bool:
    places = [arc.place for arc in (*transition.flow.inputs, *transition.flow.outputs)]
    has_ranges = transition.wants_memory or any(place.type is Range for place in places)
    return transition.body is None or has_ranges or isinstance(transition.body, Command)


def call_all(body: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """What a generator yields, as a list, which can travel."""
    return list(body(*arguments, **keywords))
