"""Where tasks run: which nodes have what they need, and the bytes of their ranges."""

from typing import Any

from carme_runtime.petri.activation import Activation, Task
from carme_runtime.petri.memory import Range
from carme_runtime.petri.pool import Connection
from carme_runtime.petri.ranges import Ranges
from carme_runtime.petri.store import node_name


class Placing:
    """The nodes of a run, as tasks take them.

    Args:
        units: What each node offers for `needs`.
    """

    def __init__(self, units: dict[str, int]) -> None:
        self._units = units
        # What each node has left of them; None is the coordinator's.
        self._free: dict[int | None, dict[str, int]] = {None: dict(units)}
        #: The names of the nodes by their numbers.
        self.hosts: dict[int | None, str] = {None: node_name()}

    def begin(self, activation: Activation, members: dict[int, Any]) -> None:
        """All nodes are free: the marking gets what they offer together."""
        nodes = [None, *members]
        self.hosts |= {number: member.host for number, member in members.items()}
        self._free = {node: dict(self._units) for node in nodes}
        activation.units = {name: count * len(nodes) for name, count in self._units.items()}

    def lose(self, activation: Activation, node: int) -> None:
        """A node is gone."""
        self._free.pop(node, None)
        for name, count in self._units.items():
            activation.units[name] -= count

    def unfit(self, activation: Activation, node: int | None, without_ranges: bool) -> list[int]:
        """Transitions that cannot start on a node of the job now."""
        return [
            rule.index
            for rule in activation.rules
            if (without_ranges and rule.uses_ranges) or not self._has_room(node, rule.transition.needs)
        ]

    def reserve(self, connection: Connection, task: Task, sign: int = -1) -> None:
        """Take what a task needs of its node, or with a sign of 1 give it back."""
        if task.rule.transition.needs and (free := self._free.get(connection.node)):
            for name, count in task.rule.transition.needs.items():
                free[name] += sign * count

    def nearest(
        self, task: Task, here: Connection, accepting: list[Connection], ranges: Ranges
    ) -> Connection:
        """Of the workers that accept a task the one whose node has most bytes of its ranges."""
        names = ranges_of(task)
        if not names:
            return here
        there = ranges.holders.bytes_at(names)
        bytes_at = {number: there.get(host, 0) for number, host in self.hosts.items()}
        best = here
        for each in accepting:
            is_nearer = bytes_at.get(each.node, 0) > bytes_at.get(best.node, 0)
            if is_nearer and each.accepts() and self._has_room(each.node, task.rule.transition.needs):
                best = each
        return best

    def _has_room(self, node: int | None, needs: dict[str, int]) -> bool:
        free = self._free.get(node, {})
        return all(free.get(name, 0) >= count for name, count in needs.items())


def ranges_of(task: Task) -> list[str]:
    """Names of the ranges that a task gets as tokens."""
    if not task.rule.gets_ranges:
        return []
    values: list[Any] = [token.value for token in task.tokens]
    return [value.name for value in values if isinstance(value, Range)]
