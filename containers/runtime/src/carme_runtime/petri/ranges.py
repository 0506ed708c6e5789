"""The ranges of a run as its coordinator knows them: which count, which are to go, and where they are."""

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.petri import forks
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.holders import Holders, Reply
from carme_runtime.petri.journal import HOMES, RANGES, Journal, read
from carme_runtime.petri.memory import Changes, Memory
from carme_runtime.petri.range_files import Description
from carme_runtime.petri.serving import RangeServer
from carme_runtime.petri.store import ON_DISK, Store, sweep


def _weakly(commit: Callable[[Changes], None]) -> Callable[[Changes], None]:
    """Call a method as long as somebody has its object."""
    method = weakref.WeakMethod(commit)

    def call(changes: Changes) -> None:
        found = method()
        if found is None:
            raise PetriError(
                "Nobody has the run any more, so it is closed.", "Keep the run as long as you use its memory."
            )
        found(changes)

    return call


def lasting(folder: Path, identity: str, node: str) -> set[str]:
    """Ranges of a node that a run may be resumed with."""
    try:
        state = read(folder / "journal")
    except PetriError:
        return set()
    if state.memory.get("identity") != identity:
        return set()
    return {name for name in state.ranges if node in state.homes[name]}


class Ranges:
    """The ranges of a run.

    Args:
        journal: Of the run; it knows which ranges it had.
        limit: Bytes that they may take of shared memory; None: half of what is free.
        several: Whether other nodes may have ranges, too.

    Raises:
        PetriError: They are on another node.
    """

    def __init__(self, journal: Journal, limit: int | None, has_peers: bool = False) -> None:
        state = journal.state
        self.known: dict[str, Description] = dict(state.ranges)
        self.store = Store(
            state.memory["identity"],
            journal.folder,
            limit,
            [Path(each) for each in state.memory["spills"]],
        )
        self.store.has_peers = has_peers
        #: Whether nobody is to resume the run, so that nothing is to last.
        self.discarded = False
        #: What the programs on other nodes get; the limit is for each node.
        self.settings = {
            "identity": self.store.identity,
            "limit": limit,
            "spills": state.memory["spills"],
            "secret": secrets.token_bytes(32),
        }
        self.holders = Holders(self.store.node, self.known, dict(state.homes), self._send, self._note_homes)
        self._notify: Callable[..., None] = lambda *_: None
        self._server: RangeServer | None = None
        self._lock: Any = threading.RLock()
        #: What was lost with the memory of a node.
        self.lost: list[str] = []
        self._lost: dict[str, Description] = {}  # since the run began
        self._removals: list[tuple[str, str]] = []
        self._old_copies: list[str] = []  # in the run's folder
        self._entries: list[Any] = []  # for the journal, when it is written next
        self._memory: Memory | None = None
        sweep(self.store.identity, lasting)
        if self.known:
            self.begin()

    def begin(self) -> None:
        """Take them over; what no task that has ended well has allocated goes."""
        if self.store.begun:
            return
        self.store.begin()
        forks.open_descriptors.add(self.store.alive)
        descriptions = self.store.descriptions()
        own_node, homes = self.store.node, self.holders.homes
        for name in sorted(self.known):
            # What has moved to the disk is there for all.
            if name in descriptions and (own_node in homes[name] or self._is_on_disk(name)):
                homes[name] = [own_node, *(each for each in homes[name] if each != own_node)]
                self.holders.copies[name] = {own_node: descriptions[name].copy}
                continue
            homes[name] = [each for each in homes[name] if each != own_node]
            if homes[name] and not self.store.has_peers and not self._take_copy(name):
                self._let_go()
                raise PetriError(
                    f"Range {name} of this run is in the memory of {homes[name][0]}.",
                    'Resume the run there, or with workers="job" in a job that has that node.',
                )
        self._find_lost()
        self.store.clean({name for name in self.known if own_node in homes[name]})
        self.store.clean_copies(set(self.known))

    def share(self, members: Iterable[str], host: str, notify: Callable[..., None], lock: Any) -> list[str]:
        """Begin to share them with other nodes: ranges that were lost with nodes which are not there.

        Args:
            members: The other nodes.
            host: The address of this one.
            notify: Sends a message to the program on another node: (node, kind, ...).
            lock: Of the run.
        """
        self._notify, self._lock = notify, lock
        present = {self.store.node, *members}
        for nodes in self.holders.homes.values():
            nodes[:] = [each for each in nodes if each in present]
        self.lost.clear()
        self.holders.awaited = present - {self.store.node}
        self._server = RangeServer(self.store, host, self.settings["secret"], self._ask)
        self.holders.report(self.store.node, self._server.where, self.store.descriptions())
        self._find_lost()
        return self.lost

    @property
    def are_awaited(self) -> bool:
        """Whether nodes have yet to say which ranges they have."""
        return bool(self.holders.awaited)

    def of_program(self, commit: Callable[[Changes], None]) -> Memory:
        """What the program that runs the net changes them with.

        Args:
            commit: A method of the run, which its memory alone does not keep.
        """
        if self._memory is None:
            self.begin()
            self._memory = Memory(self.store, _weakly(commit))
            self._memory.register()
        return self._memory

    def refusal(self, node: str, changes: Changes) -> str:
        """Why what a task on a node has changed cannot count, see `Holders.is_refused`."""
        return self.holders.is_refused(node, changes[0], changes[2]) if self.store.has_peers else ""

    def take(self, node: str, changes: Changes, entries: list[Any]) -> None:
        """A task has ended well, or the program wants it: journal what has changed."""
        allocated, deleted, written = changes
        if allocated or deleted:
            entries.append((RANGES, [each.fields() for each in allocated], deleted))
        self.known.update((each.name, each) for each in allocated)
        for name in deleted:
            gone = self.known.pop(name, None)
            self._old_copies += [name] if gone and gone.copies > 1 else []
        copies = {name: copy for name, copy in written.items() if name in self.known}
        before = {name: self.holders.homes.get(name) for name in copies}
        before |= {each.name: [each.node] for each in allocated}
        self._removals += self.holders.change(node, [each.name for each in allocated], copies)
        self._removals += self.holders.forget(deleted)
        for name, nodes in before.items():
            if self.holders.homes[name] != nodes:
                entries.append((HOMES, name, self.holders.homes[name]))
            is_safe = len(self.holders.homes[name]) > 1 or copies.get(name) == ON_DISK
            self._old_copies += [name] if is_safe and self.known[name].copies > 1 else []

    def settle(self) -> None:
        """The journal has what was taken: free what was deleted, and old copies."""
        for node, name in self._removals:
            self._send(node, "drop", [name])
        for name in self._old_copies:
            self.store.remove_copy(name)
        self._removals.clear()
        self._old_copies.clear()
        if self.holders.single:  # after the old copies were sent away
            names, self.holders.single = self.holders.single, set()
            self.holders.restore_copies(names)

    def restore(self, known: dict[str, Description], homes: dict[str, list[str]]) -> None:
        """The journal has not got it: know what it knows."""
        self.known.clear()
        self.known.update(known)
        self.holders.homes = dict(homes)
        self._removals.clear()
        self._old_copies.clear()

    def give_back(self, task: int) -> None:
        """A task was killed: what it has allocated goes."""
        if self.store.begun:
            self.store.clean(set(self.known), task)
            for node in self.holders.addresses:
                if node != self.store.node:
                    self._notify(node, "clean", list(self.known), task)

    def drop(self, node: str, changes: Changes) -> None:
        """What a task has changed does not count: what its node has of ranges that lie elsewhere goes."""
        for name in (*(each.name for each in changes[0]), *changes[2]):
            if name in self.known and node not in self.holders.copies.get(name, {}):
                self._send(node, "drop", [name])

    def take_message(self, kind: str, node: str, *arguments: Any) -> list[str]:
        """What a node says of its ranges; for its loss the names of those that were lost with it."""
        if kind == "held":
            keep = self.holders.report(node, *arguments)
            self._notify(node, "keep", keep)
            return self._find_lost()
        if kind == "ask":
            number, question, name = arguments
            reply = lambda answer: self._notify(node, "answer", number, answer)  # noqa: E731
            self.holders.answer(node, question, name, reply)
        elif kind == "pulled":
            self.holders.take_pulled(node, *arguments)
        elif kind in ("gone", "lost"):
            self.holders.lose(node, kind == "lost")
            if kind == "lost":
                self.holders.restore_copies(self.known)
            return self._find_lost()
        return []

    def take_entries(self) -> list[Any]:
        """Entries for the journal that nobody else writes."""
        entries, self._entries = self._entries, []
        return entries

    def finish_elsewhere(self, wait: Callable[[], list[tuple[Any, ...]]]) -> list[str]:
        """The net has ended: what is to last of other nodes' ranges goes to the disk, the rest goes.

        Args:
            wait: Gives what nodes say.

        Returns:
            What went wrong.
        """
        left, trouble = self._ends_elsewhere(), list[str]()
        for host, names in left.items():
            self._notify(host, "finish", names)
        while left:
            for kind, *arguments in wait():
                if kind == "refused":  # nobody says more
                    trouble.append(arguments[0])
                    left.clear()
                if kind not in ("finished", "gone", "lost"):
                    continue
                host = arguments[1] if kind == "lost" else arguments[0]
                if kind == "finished":
                    trouble += arguments[1]
                names = left.pop(host, [])
                if kind != "finished":
                    trouble += [f"Range {name} was lost with the memory of {host}." for name in names]
        return trouble

    def _ends_elsewhere(self) -> dict[str, list[str]]:
        """By node other than this the ranges that are to last and that it is to move to the disk."""
        found: dict[str, list[str]] = {node: [] for node in self.holders.addresses if node != self.store.node}
        for name, each in self.known.items() if not self.discarded else ():
            homes = self.holders.homes.get(name, [])
            if each.lifetime == "kept" and homes and self.store.node not in homes and homes[0] in found:
                found[homes[0]].append(name)
        return found

    def close(self, journal: Journal, ended: bool) -> list[str]:
        """Let go of them. When the net has ended, what is to last is on disk, and the rest is gone.

        Returns:
            Why something had to stay in memory.
        """
        if self._memory is not None:
            self._memory.close()
        if self._server is not None:
            self._server.close()
        if not self.store.begun:
            return []
        try:
            if self.discarded:
                self.store.clean(set())
                self.store.clean_copies(set())
                self.store.end()
                return []
            return self._end(journal) if ended else []
        finally:
            self._let_go()

    def _end(self, journal: Journal) -> list[str]:
        entries: list[Any] = []
        ended = {name: each for name, each in (self._lost | self.known).items() if each.lifetime == "net"}
        self.take(self.store.node, ([], list(ended), {}), entries)
        journal.write(entries)
        self.settle()
        for name in self._lost.keys() & ended:
            self.store.remove(name)  # which another net has moved to the disk meanwhile, see `sweep`
        trouble = []
        for each in self.known.values():
            try:
                self.store.move_to_disk(each.name)
            except OSError as error:
                trouble.append(
                    f"Range {each.name} of {show_size(each.size)} stays in the memory of this node until "
                    f"the run is resumed: {error.strerror}."
                )
        self.store.clean_copies(set())
        if not trouble:
            self.store.end()
        return trouble

    def _let_go(self) -> None:
        forks.open_descriptors.discard(self.store.alive)
        self.store.let_go()

    def _find_lost(self) -> list[str]:
        """Forget ranges that no node has, unless there is a copy of them in the run's folder."""
        lost = [name for name in self.holders.missing() if not self._take_copy(name)]
        for name in lost:
            self._lost[name] = self.known.pop(name)
            self.holders.forget([name])
        self.holders.lost.update(lost)
        self.lost += lost
        return lost

    def _take_copy(self, name: str) -> bool:
        """Whether a range that its node has not any more is in the run's folder: it is this node's then.

        Another program may have moved it there that found the run without one, or there is a copy of it.
        """
        with contextlib.suppress(OSError):
            has_copy = self.known[name].copies > 1 and not self._is_on_disk(name)
            if has_copy and not self.store.take_copy(name):
                return False
            found = self.store.find(name)
            if found is not None and found[0].parent == self.store.disk:
                self.holders.homes[name] = [self.store.node]
                self.holders.copies[name] = {self.store.node: found[1].copy}
                self._note_homes(name)
                return True
        return False

    def _note_homes(self, name: str) -> None:
        self._entries.append((HOMES, name, list(self.holders.homes[name])))

    def _is_on_disk(self, name: str) -> bool:
        found = self.store.find(name)
        return found is not None and found[0].parent == self.store.disk

    def _ask(self, kind: str, name: str, reply: Reply) -> None:
        with self._lock:
            self.holders.answer(self.store.node, kind, name, reply)

    def _send(self, node: str, kind: str, *arguments: Any) -> None:
        if node != self.store.node:
            self._notify(node, kind, *arguments)
        elif kind == "drop":
            for name in arguments[0]:
                self.store.remove(name)
        else:
            threading.Thread(target=self._pull, args=arguments, daemon=True).start()

    def _pull(self, name: str, copy: int, source: tuple[str, int]) -> None:
        assert self._server is not None
        try:
            well = self._server.pull(name, copy, source)
        except PetriError:  # no room
            well = False
        with self._lock:
            self.holders.take_pulled(self.store.node, name, copy, well)
