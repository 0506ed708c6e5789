"""Which nodes of a job have which ranges of a run.

A task that opens a range on a node that does not have it gets a copy. When a task has ended well that may
have written to one, its copy is the range from there on and those of other nodes go. A task whose copy went
while it ran has to run again, so what tasks write at the same time on two nodes is not lost.

`homes` are the nodes that have a range by the journal. Other copies last as long as this program.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from carme_runtime.petri.range_files import Description
from carme_runtime.petri.store import ON_DISK

Reply = Callable[[Any], None]
Address = tuple[str, int]


@dataclass(frozen=True)
class _Pull:
    """A node was requested to copy a range.

    Attributes:
        name: Of the range.
        target: The node that copies it.
        source: The node that it copies from.
        of: The copy that the source had then; None: of a range that a task has just made there.
        reply: Called with how it went.
    """

    name: str
    target: str
    source: str
    of: int | None
    reply: Reply


class Holders:
    """The places of a run's ranges.

    Args:
        me: The node of the program that runs the net.
        known: The ranges that count.
        homes: The nodes that have them by the journal.
        send: Sends a message to a node: (node, kind, name, copy, source) asks it to copy a range, and
            (node, "drop", names) to remove some.
        note: Called with a range whose homes change without a task that has ended, for the journal.
    """

    def __init__(
        self,
        own_node: str,
        known: dict[str, Description],
        homes: dict[str, list[str]],
        send: Callable[..., None],
        note: Callable[[str], None],
    ) -> None:
        self.own_node, self.known, self.homes, self._send, self._note = own_node, known, homes, send, note
        #: Copies that are good, by name and node.
        self.copies: dict[str, dict[str, int]] = {}
        #: Where nodes serve their ranges, of those that do.
        self.addresses: dict[str, Address] = {}
        #: Nodes of the job that have yet to say what they have.
        self.awaited: set[str] = set()
        #: Ranges whose second copy was another task's: they are to have one again.
        self.single: set[str] = set()
        #: Ranges that were lost with their nodes.
        self.lost: set[str] = set()
        self._numbers = itertools.count(1)
        self._waiting: list[tuple[str, str, str, Reply]] = []
        self._fetching: dict[tuple[str, str], int] = {}  # copies that a node fetches, by name and node
        self._sources: dict[tuple[str, str], str] = {}  # and where it was last sent for it
        #: By name and node: copies that others got from a task there which has not ended yet.
        self._pushed: dict[tuple[str, str], dict[str, int]] = {}
        self._pulls: dict[int, _Pull] = {}

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
        elif kind == "lost":
            reply(name in self.lost)
        else:
            reply(None)

    def report(self, node: str, address: Address, descriptions: dict[str, Description]) -> list[str]:
        """A node serves its ranges: the names of those that it is to keep."""
        self.addresses[node] = address
        self.awaited.discard(node)
        for name in self.known:
            copies = self.copies.setdefault(name, {})
            copies.pop(node, None)
            self._fetching.pop((name, node), None)
            if node in self.homes.get(name, ()):
                if name in descriptions:
                    copies[node] = descriptions[name].copy
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
                if homes and name in self.known:
                    self._note(name)
        self._fetching = {key: number for key, number in self._fetching.items() if key[1] != node}
        self._pushed = {key: pushed for key, pushed in self._pushed.items() if key[1] != node}
        for pushed in self._pushed.values():
            pushed.pop(node, None)
        for number, pull in list(self._pulls.items()):
            if node == pull.target:
                del self._pulls[number]
                self._copy(pull.source, pull.name, pull.reply)
            elif node == pull.source:
                del self._pulls[number]
                pull.reply("none")
        self._answer_waiting()

    def is_refused(self, node: str, allocated: Iterable[Description], written: dict[str, int]) -> str:
        """Why what a task has changed cannot count: "taken NAME" or "changed NAME"; empty: it can."""
        for each in allocated:
            if each.name in self.known:
                return f"taken {each.name}"
        for name, copy in written.items():
            expected_copies = self.copies.get(name, {}).get(node), self._fetching.get((name, node))
            if copy != ON_DISK and name in self.known and copy not in expected_copies:
                return f"changed {name}"
        return ""

    def change(self, node: str, allocated: Iterable[str], written: dict[str, int]) -> list[tuple[str, str]]:
        """A task on a node has ended well: copies that are to go, as (node, name)."""
        old: list[tuple[str, str]] = []
        for name in allocated:
            self.lost.discard(name)
            self.copies.setdefault(name, {})[node] = 0
        for name in (*allocated, *written):
            copies, pushed = self.copies.setdefault(name, {}), self._pushed.pop((name, node), {})
            fetched = self._fetching.get((name, node))
            if fetched is not None and written.get(name) == fetched:  # its node has yet to confirm it
                copies[node] = fetched
            self._stop_fetching(name)
            # What lies in the run's folder is this node's.
            own = self.own_node if written.get(name) == ON_DISK else node
            good = {
                each: number for each, number in copies.items() if each == own or pushed.get(each) == number
            }
            old += [(each, name) for each in copies if each not in good]
            if pushed.keys() - good.keys():
                self.single.add(name)
            self.copies[name], self.homes[name] = good, list(good)
        return old

    def forget(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Ranges were deleted: copies that are to go."""
        old = [(node, name) for name in names for node in self.copies.pop(name, ())]
        for name in names:
            self.homes.pop(name, None)
            self._stop_fetching(name)
        return old

    def _stop_fetching(self, name: str) -> None:
        """Copies that are under way are old when they have come."""
        for table in (self._fetching, self._sources):
            for key in [key for key in table if key[0] == name]:
                del table[key]

    def take_pulled(self, node: str, name: str, copy: int, well: bool) -> None:
        """A node has copied a range, as requested."""
        pull = self._pulls.pop(copy, None)
        if not well:
            if pull is not None:
                pull.reply("none")
            return
        if pull is None:  # its source was lost meanwhile; what was there before is no more
            if node in self.copies.get(name, {}):
                self.copies[name][node] = copy
            return
        now = self._copy_at(name, pull.source)
        if now != pull.of or (now is None and name in self.known):
            # Another task's bytes count meanwhile, and these took the place of what the node had of them.
            self._forget_copy(node, name)
            pull.reply("none")
            return
        self.copies.setdefault(name, {})[node] = copy
        self._pushed.setdefault((name, pull.source), {})[node] = copy
        pull.reply("there")

    def _copy_at(self, name: str, node: str) -> int | None:
        """The copy that a node has or fetches."""
        return self.copies.get(name, {}).get(node, self._fetching.get((name, node)))

    def _forget_copy(self, node: str, name: str) -> None:
        self.copies.get(name, {}).pop(node, None)
        self._send(node, "drop", [name])
        homes = self.homes.get(name, [])
        if node in homes and len(homes) > 1:
            homes.remove(node)
            self.single.add(name)
            self._note(name)

    def restore_copies(self, names: Iterable[str]) -> None:
        """Have a second copy made of those of these ranges that are to have one and lack it."""
        for name in names:
            description = self.known.get(name)
            if description is None:
                continue
            homes = self.homes.get(name, [])
            if description.copies > 1 and len(homes) == 1 and homes[0] in self.addresses:

                def add_home(answer: str, name: str = name, source: str = homes[0]) -> None:
                    pushed = self._pushed.pop((name, source), {})
                    if answer == "there" and name in self.homes:
                        self.homes[name] += [each for each in pushed if each not in self.homes[name]]
                        self._note(name)

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
        in_vain = self._sources.get((name, node)) if self._fetching.pop((name, node), 0) else None
        copies, homes = self.copies.setdefault(name, {}), self.homes.get(name, [])
        sources = [each for each in copies if each != node and each in self.addresses]
        if sources:
            copies.pop(node, None)  # it would not ask if it had it
            self._fetching[name, node] = number = next(self._numbers)
            # After one that stands still the next.
            place = (sources.index(in_vain) + 1) % len(sources) if in_vain in sources else 0
            self._sources[name, node] = sources[place]
            reply([self.addresses[sources[place]], number])
        elif self.awaited & {*homes, *copies}:
            self._waiting.append((node, "where", name, reply))
        else:
            reply(None)

    def _confirm(self, node: str, copy: int, name: str) -> bool:
        if self._fetching.get((name, node)) == copy:
            del self._fetching[name, node]
            self.copies.setdefault(name, {})[node] = copy
        return self.copies.get(name, {}).get(node) == copy

    def _copy(self, node: str, name: str, reply: Reply) -> None:
        """Have another node copy a range of this one."""
        self._pushed.pop((name, node), None)  # of a task before, that has not ended well
        peers = [each for each in self.addresses if each != node]
        copy = self._copy_at(name, node)
        if not peers or node not in self.addresses or (copy is None and name in self.known):
            reply("none")
            return
        number = next(self._numbers)
        homes = self.homes.get(name, ())
        target = min(peers, key=lambda each: (each not in homes, (peers.index(each) + number) % len(peers)))
        self._pulls[number] = _Pull(name, target, node, copy, reply)
        self._send(target, "pull", name, number, self.addresses[node])

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for question in waiting:
            self.answer(*question)
