"""Where tasks run: which nodes have what they need, and the bytes of their ranges."""

import contextlib
import io
import pickle
from typing import Any

from carme_runtime.petri import memory
from carme_runtime.petri.activation import Activation, Task
from carme_runtime.petri.pool import Connection
from carme_runtime.petri.range_files import Description
from carme_runtime.petri.ranges import Ranges
from carme_runtime.petri.store import node_name

#: Tokens of a journal name the module that described ranges when they were written.
_DESCRIBED_BY = (Description.__module__, "carme_runtime.petri.store")


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
        self, task: Task, current: Connection, accepting: list[Connection], ranges: Ranges
    ) -> Connection:
        """Of the workers that accept a task the one whose node has most bytes of its ranges."""
        names = ranges_of(task)
        if not names:
            return current
        bytes_of_hosts = ranges.holders.bytes_at(names)
        bytes_at = {number: bytes_of_hosts.get(host, 0) for number, host in self.hosts.items()}
        best = current
        for each in accepting:
            is_nearer = bytes_at.get(each.node, 0) > bytes_at.get(best.node, 0)
            if is_nearer and each.accepts() and self._has_room(each.node, task.rule.transition.needs):
                best = each
        return best

    def _has_room(self, node: int | None, needs: dict[str, int]) -> bool:
        free = self._free.get(node, {})
        return all(free.get(name, 0) >= count for name, count in needs.items())


def ranges_of(task: Task) -> list[str]:
    """Names of the ranges in the tokens that a task gets, however deep they lie in them."""
    return [name for token in task.tokens if _MARK in token.data for name in _names_in(token.data)]


#: What is in a pickle that has a range.
_MARK = memory.__name__.encode()


class _Placeholder:
    """Stands for what a token is made of: nothing of it is run here."""

    def __new__(cls, *_: Any, **__: Any) -> "_Placeholder":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Placeholder":
        return self

    def append(self, item: object) -> None:
        """For classes that are lists."""

    def extend(self, items: object) -> None:
        """For classes that are lists."""

    def add(self, item: object) -> None:
        """For classes that are sets."""


class _Names(pickle.Unpickler):
    """Reads the names of ranges in a token."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        """The functions that note ranges; all else stands for itself."""
        if module == memory.__name__ and name.lstrip("_") == memory.restore.__name__:
            return self._note
        is_description = module in _DESCRIBED_BY and name == Description.__qualname__
        return Description if is_description else _Placeholder

    def persistent_load(self, pid: Any) -> Any:
        """None of ours has such."""
        return _Placeholder()

    def _note(self, identity: str, folder: str, description: Description) -> _Placeholder:
        self.found.append(description.name)
        return _Placeholder()


def _names_in(data: bytes) -> list[str]:
    names = _Names(data)
    with contextlib.suppress(Exception):  # of classes that are too unlike: then less is known
        names.load()
    return names.found
