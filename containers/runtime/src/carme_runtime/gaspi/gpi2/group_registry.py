"""The groups of a rank of GPI-2, by the keys that their messages have."""

import hashlib
import threading
import weakref
from typing import Protocol

_EARLY_REPORTS = 256  # that are kept


class Reported(Protocol):
    """A group, to which other members report why they broke it up."""

    def receive_report(self, sender: int, content: bytes) -> None:
        """Another member has broken up."""
        ...


class GroupRegistry:
    """Does not hold the groups: they end when nobody has them any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generations: dict[tuple[int, ...], int] = {}
        self._groups: weakref.WeakValueDictionary[int, Reported] = weakref.WeakValueDictionary()
        # By key, of members that broke a group up before it was formed here.
        self._early: dict[int, tuple[int, bytes]] = {}

    def new_key(self, ranks: tuple[int, ...]) -> int:
        """A number for the next group of these ranks, the same on all of them."""
        with self._lock:
            self._generations[ranks] = self._generations.get(ranks, 0) + 1
            identity = repr((ranks, self._generations[ranks])).encode()
        # The lowest bit is set in keys of point-to-point messages only; small numbers are reserved.
        return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") & ~1 | 2**63

    def add(self, key: int, group: Reported) -> None:
        """Give this group what its other members report, and have reported already."""
        with self._lock:
            self._groups[key] = group
            early = self._early.pop(key, None)
        if early:
            group.receive_report(*early)

    def on_message(self, sender: int, content: bytes) -> None:
        """Another rank reports: a group's key, and what its `receive_report` takes."""
        key = int.from_bytes(content[:8], "little")
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                self._early[key] = sender, content[8:]
                if len(self._early) > _EARLY_REPORTS:  # groups that are gone here get reports, too
                    del self._early[next(iter(self._early))]
        if group:
            group.receive_report(sender, content[8:])
