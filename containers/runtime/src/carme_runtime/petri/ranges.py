"""The ranges of a run as its coordinator knows them: those that count, and those that are to go."""

import socket
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.petri import forks
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.journal import RANGES, Journal
from carme_runtime.petri.memory import Changes, Memory
from carme_runtime.petri.store import Description, Store, sweep


class Ranges:
    """The ranges of a run.

    Args:
        journal: Of the run; it knows which ranges it had.
        limit: Bytes that they may take of shared memory; None: half of what is free.

    Raises:
        PetriError: They are on another node.
    """

    def __init__(self, journal: Journal, limit: int | None) -> None:
        state = journal.state
        self.known: dict[str, Description] = dict(state.ranges)
        self.store = Store(
            state.memory["identity"],
            journal.folder,
            limit,
            [Path(each) for each in state.memory["spills"]],
        )
        #: What was lost with the memory of the machine.
        self.lost: list[str] = []
        self._removals: list[str] = []
        self._memory: Memory | None = None
        sweep(self.store.identity)
        if self.known:
            self.begin()

    def begin(self) -> None:
        """Take them over; what no task that has ended well has allocated goes."""
        if self.store.begun:
            return
        self.store.begin()
        forks.ours.add(self.store.alive)
        there = self.store.descriptions()
        self.lost = sorted(self.known.keys() - there.keys())
        for name in self.lost:
            if (node := self.known[name].node) != socket.gethostname():
                self._let_go()
                raise PetriError(
                    f"Range {name} of this run is in the memory of {node}.", "Resume the run there."
                )
        for name in self.lost:
            del self.known[name]
        self.store.clean(set(self.known))

    def of_program(self, commit: Callable[[Changes], None]) -> Memory:
        """What the program that runs the net changes them with."""
        if self._memory is None:
            self.begin()
            self._memory = Memory(self.store, commit)
            self._memory.register()
        return self._memory

    def take(self, changes: Changes, entries: list[Any]) -> None:
        """A task has ended well, or the program wants it: journal what has changed."""
        allocated, deleted = changes
        entries.append((RANGES, [astuple(each) for each in allocated], deleted))
        self.known.update((each.name, each) for each in allocated)
        for name in deleted:
            self.known.pop(name, None)
        self._removals += deleted

    def settle(self) -> None:
        """The journal has what was taken: free what was deleted."""
        for name in self._removals:
            self.store.remove(name)
        self._removals.clear()

    def restore(self, known: dict[str, Description]) -> None:
        """The journal has not got it: know what it knows."""
        self.known = dict(known)
        self._removals.clear()

    def give_back(self, task: int) -> None:
        """A task was killed: what it has allocated goes."""
        if self.store.begun:
            self.store.clean(set(self.known), task)

    def close(self, journal: Journal, ended: bool) -> list[str]:
        """Let go of them. When the net has ended, what is to last is on disk, and the rest is gone.

        Returns:
            Why something had to stay in memory.
        """
        if self._memory is not None:
            self._memory.close()
        if not self.store.begun:
            return []
        try:
            return self._end(journal) if ended else []
        finally:
            self._let_go()

    def _end(self, journal: Journal) -> list[str]:
        entries: list[Any] = []
        self.take(([], [each.name for each in self.known.values() if each.lifetime == "net"]), entries)
        journal.write(entries)
        self.settle()
        trouble = []
        for each in self.known.values():
            try:
                self.store.move_to_disk(each.name)
            except OSError as error:
                trouble.append(
                    f"Range {each.name} of {show_size(each.size)} stays in the memory of this node until "
                    f"the run is resumed: {error.strerror}."
                )
        if not trouble:
            self.store.end()
        return trouble

    def _let_go(self) -> None:
        forks.ours.discard(self.store.alive)
        self.store.let_go()
