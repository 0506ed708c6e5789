"""One attack: what the attacker does, and the same done by someone who may do it.

An attack counts as stopped only if its control works, so that none is stopped by a mistake of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from carme.validation.attacks.actions import Outcome
from carme.validation.attacks.fixture import Fixture

#: For a small job to come to its end, on a cluster that has other things to do.
JOB_SECONDS = 120.0

Step = Callable[[Fixture], Outcome]
Arguments = Callable[[Fixture], dict[str, Any]]


@dataclass(frozen=True)
class Attack:
    """One attempt. `attack` must not reach what it is after, `control` must."""

    name: str
    area: str
    what: str
    attack: Step
    control: Step
    needs_gpus: bool = False
    needs_metrics: bool = False


@dataclass(frozen=True)
class Area:
    """What is attacked, and all attacks on it in the order in which they are made."""

    name: str
    attacks: list[Attack] = field(default_factory=list)


def add(area: Area, name: str, what: str, attack: Step, control: Step, **needs: bool) -> None:
    """Add an attack to an area."""
    area.attacks.append(Attack(name, area.name, what, attack, control, **needs))


# On the node: the attacker's job runs beside the victim's, outside of any container; the control is made by
# the victim within the job.


def on_node(area: Area, name: str, what: str, action: str, arguments: Arguments, **more: Any) -> None:
    """The same action by the attacker beside the job, and by the victim in it."""
    add(
        area,
        name,
        what,
        lambda s: s.attacker_node.run(action, **arguments(s)),
        lambda s: s.victim_node.run(action, **arguments(s)),
        **more,
    )


def on_head(area: Area, name: str, what: str, action: str, arguments: Arguments) -> None:
    """The same action by both on the head."""
    add(
        area,
        name,
        what,
        lambda s: s.attacker_head.run(action, **arguments(s)),
        lambda s: s.victim_head.run(action, **arguments(s)),
    )
