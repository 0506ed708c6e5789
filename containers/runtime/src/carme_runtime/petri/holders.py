"""Which nodes of a job have which ranges of a run.

A task that opens a range on a node that does not have it gets a copy. When a task has ended well that may
have written to one, its copy is the range from there on and those of other nodes go. A task whose copy went
while it ran has to run again, so what tasks write at the same time on two nodes is not lost.

`homes` are the nodes that have a range by the journal. Other copies last as long as this program.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from carme_runtime.petri.store import ON_DISK, Description

Reply = Callable[[Any], None]
Address = tuple[str, int]


class Holders:
    """The places of a run's ranges.

    Args:
        me: The node of the program that runs the net.
        known: The ranges that count.
        homes: The nodes that have them by the journal.
        send: Sends a message to a node: (node, kind, name, copy, source) asks it to copy a range, and
            (node, "drop", names) to remove some.
    """

    def __init__(
        self,
        me: str,
        known: dict[str, Description],
        homes: dict[str, list[str]],
        send: Callable[..., None],
    ) -> None:
        self.me, self.known, self.homes, self._send = me, known, homes, send
        #: Copies that are good, by name and node.
        self.copies: dict[str, dict[str, int]] = {}
        #: Where nodes serve their ranges, of those that do.
        self.addresses: dict[str, Address] = {}
        #: Nodes of the job that have yet to say what they have.
        self.awaited: set[str] = set()
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[str, str, str, Reply]] = []
        self._unsure: set[tuple[str, str]] = set()  # copies that are under way
        #: Nodes that got a copy from a task which has not ended yet.
        self._pushed: dict[str, set[str]] = {}
        self._pulls: dict[int, tuple[str, str, str, Reply]] = {}  # name, target, source

    def answer(self, node: str, kind: str, name: str, reply: Reply) -> None:
        """Answer a question of a node, or do so later; see `asking` and `serving`."""
        if kind == "names":
            reply(sorted(self.known))
        elif kind == "holders":
            copies = self.copies.get(name, {})
            reply([*sorted(copies), self.known[name].size] if copies and name in self.known else [])
        elif kind == "where":
            self._say_where(node, name, reply)
        elif kind == "confirm":
            number, _, name = name.partition(" ")
            reply(self._confirm(node, int(number), name))
        elif kind == "copy":
            self._copy(node, name, reply)
        else:
            reply(None)

    def report(self, node: str, address: Address, there: dict[str, Description]) -> list[str]:
        """A node serves its ranges: the names of those that it is to keep."""
        self.addresses[node] = address
        self.awaited.discard(node)
        for name in self.known:
            copies = self.copies.setdefault(name, {})
            copies.pop(node, None)
            if node in self.homes.get(name, ()):
                if name in there:
                    copies[node] = there[name].copy
                else:
                    self.homes[name].remove(node)
        self._answer_waiting()
        return [name for name, nodes in self.homes.items() if node in nodes]

    def lose(self, node: str, for_good: bool) -> None:
        """A node does not serve its ranges any more; `for_good`: nor will it again."""
        self.addresses.pop(node, None)
        if for_good:
            self.awaited.discard(node)
        else:
            self.awaited.add(node)
        for name, copies in self.copies.items():
            copies.pop(node, None)
            homes = self.homes.get(name, [])
            if for_good and node in homes:
                homes.remove(node)
                homes += [each for each in copies if not homes]
        for number, (name, target, source, reply) in list(self._pulls.items()):
            if node in (target, source):
                del self._pulls[number]
                if node == target:
                    self._copy(source, name, reply)
                else:
                    reply("none")
        self._answer_waiting()

    def is_refused(self, node: str, allocated: Iterable[Description], written: dict[str, int]) -> str:
        """Why what a task has changed cannot count: "taken NAME" or "changed NAME"; empty: it can."""
        for each in allocated:
            if each.name in self.known:
                return f"taken {each.name}"
        for name, copy in written.items():
            if copy != ON_DISK and name in self.known and self.copies.get(name, {}).get(node) != copy:
                return f"changed {name}"
        return ""

    def change(self, node: str, allocated: Iterable[str], written: dict[str, int]) -> list[tuple[str, str]]:
        """A task on a node has ended well: copies that are to go, as (node, name)."""
        old: list[tuple[str, str]] = []
        for name in allocated:
            self.copies.setdefault(name, {})[node] = 0
        for name in (*allocated, *written):
            copies, pushed = self.copies.setdefault(name, {}), self._pushed.pop(name, set())
            # What lies in the run's folder is this node's.
            pushed.add(self.me if written.get(name) == ON_DISK else node)
            good = {each: number for each, number in copies.items() if each in pushed}
            old += [(each, name) for each in copies if each not in good]
            self.copies[name], self.homes[name] = good, list(good)
        return old

    def forget(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Ranges were deleted: copies that are to go."""
        old = [(node, name) for name in names for node in self.copies.pop(name, ())]
        for name in names:
            self.homes.pop(name, None)
        return old

    def take_pulled(self, node: str, name: str, copy: int, well: bool) -> None:
        """A node has copied a range, as it was asked to."""
        _, target, _, reply = self._pulls.pop(copy, ("", "", "", None))
        if reply is None or target != node:
            return
        if well:
            self.copies.setdefault(name, {})[node] = copy
            self._pushed.setdefault(name, set()).add(node)
        reply("there" if well else "none")

    def restore_copies(self, entries: Callable[[str], None]) -> None:
        """After a node was lost: have a second copy made of ranges that are to have one."""
        for name, description in self.known.items():
            homes = self.homes.get(name, [])
            if description.copies > 1 and len(homes) == 1 and homes[0] in self.addresses:

                def add_home(answer: str, name: str = name) -> None:
                    pushed = self._pushed.pop(name, set())
                    if answer == "there" and name in self.homes:
                        self.homes[name] += [each for each in pushed if each not in self.homes[name]]
                        entries(name)

                self._copy(homes[0], name, add_home)

    def missing(self) -> list[str]:
        """Ranges that no node has, nor will say that it has."""
        return [
            name
            for name, homes in self.homes.items()
            if not homes and not self.copies.get(name) and name in self.known
        ]

    def bytes_at(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of ranges that nodes have."""
        found: dict[str, int] = {}
        for name in names:
            if name in self.known:
                for node in self.copies.get(name, ()):
                    found[node] = found.get(node, 0) + self.known[name].size
        return found

    def _say_where(self, node: str, name: str, reply: Reply) -> None:
        if name not in self.known:
            reply(None)
            return
        copies, homes = self.copies.setdefault(name, {}), self.homes.get(name, [])
        sources = [
            each
            for each in copies
            if each != node and each in self.addresses and (name, each) not in self._unsure
        ]
        if sources:
            copies[node] = number = next(self._numbers)
            self._unsure.add((name, node))
            reply([self.addresses[sources[0]], number])
        elif self.awaited & {*homes, *copies}:
            self._waiting.append((node, "where", name, reply))
        else:
            reply(None)

    def _confirm(self, node: str, copy: int, name: str) -> bool:
        self._unsure.discard((name, node))
        return self.copies.get(name, {}).get(node) == copy

    def _copy(self, node: str, name: str, reply: Reply) -> None:
        """Have another node copy a range of this one."""
        others = [each for each in self.addresses if each != node]
        if not others or node not in self.addresses:
            reply("none")
            return
        number = next(self._numbers)
        homes = self.homes.get(name, ())
        target = min(
            others, key=lambda each: (each not in homes, (others.index(each) + number) % len(others))
        )
        self._pulls[number] = (name, target, node, reply)
        self._send(target, "pull", name, number, self.addresses[node])

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for question in waiting:
            self.answer(*question)
