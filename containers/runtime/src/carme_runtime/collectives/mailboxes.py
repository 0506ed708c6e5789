"""Mailboxes: messages that one rank puts into another's memory, at places that are set beforehand.

A box has slots. Its sender fills one and puts it into the receiver's memory with a notification; the receiver
uses it there, and gives it up with a notification when it does not need it any more. Nobody has to receive
while somebody sends. So no order of sending and receiving can block, as long as the sender needs at most as
many slots at a time as there are.
"""

import gc
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from carme_runtime import activity, profile
from carme_runtime.collectives.core import load
from carme_runtime.collectives.errors import InvalidCall, PeerLost, Timeout
from carme_runtime.collectives.group import Group

_ALIGNMENT = 128
_POLL_MS = 200  # between two checks of whether the others still run
_QUEUE = 7
_COLLECT_FROM = 8  # mailboxes that somebody seems to have


@dataclass(frozen=True)
class Box:
    """Messages from one rank of a run to another.

    Args:
        source: The sender's rank.
        target: The receiver's rank.
        slots: How many messages may be there at once.
        size: Of a message at most, in bytes.
        like: The name of a box before it of the same sender, slots and size, whose messages go to this
            target as well: the sender fills a slot once for both.
    """

    source: int
    target: int
    slots: int
    size: int
    like: Any = None

    @property
    def room(self) -> int:
        """Of one slot."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Mailboxes:
    """The mailboxes of a context on this rank.

    Args:
        living: Those that somebody has.
        dropped: Of the others, which nobody has closed: their segments by rank.
        collect_at: How many must be living before garbage is collected.
    """

    living: "weakref.WeakSet[Mailboxes]" = field(default_factory=weakref.WeakSet)
    dropped: list[dict[int, int]] = field(default_factory=list)
    collect_at: int = _COLLECT_FROM


_by_context: "weakref.WeakKeyDictionary[Any, _Mailboxes]" = weakref.WeakKeyDictionary()


class Mailboxes:
    """The boxes of a group; all its members make it with the same boxes, in the same order.

    Its memory is given up with `close`, or after nobody has it any more, with `free_dropped`.

    Args:
        context: The transport's.
        group: Whose members they are, for no other use meanwhile.
        boxes: By name.
        timeout: Milliseconds after which waiting is given up; -1: never.
    """

    def __init__(self, context: Any, group: Group, boxes: Mapping[Any, Box], timeout: int = -1) -> None:
        self._context, self._group, self._timeout = context, group, timeout
        self._boxes = dict(boxes)
        self._rank = group.ranks[group.index]
        self._first: dict[tuple[Any, int], int] = {}  # where a box's notifications begin in that segment
        self._at: dict[tuple[Any, int], int] = {}  # where a box begins in the segment of a rank
        ends = dict.fromkeys(group.ranks, 0)
        notifications = dict.fromkeys(group.ranks, 0)
        for name, box in self._boxes.items():
            for rank in (box.source, box.target):
                self._first[name, rank] = notifications[rank]
                notifications[rank] += box.slots
                if rank == box.source and box.like is not None:
                    self._at[name, rank] = self._at[box.like, rank]
                    continue
                self._at[name, rank] = ends[rank]
                ends[rank] += box.slots * box.room
        self._numbers = segments_of(context, group, max(ends[self._rank], 1), timeout)
        self._memory = context.segment_array(self._numbers[self._rank])
        mailboxes = _by_context.setdefault(context, _Mailboxes())
        mailboxes.living.add(self)
        self._drop = weakref.finalize(self, mailboxes.dropped.append, self._numbers)
        self._drop.atexit = False
        self._checked = 0.0  # whether the others still run
        self._put = dict.fromkeys(self._boxes, 0)
        self._taken = dict.fromkeys(self._boxes, 0)

    def close(self) -> None:
        """Give the memory up, when all members have come here and all that they have sent has arrived."""
        _follow(self._context, self._rank, self._numbers)
        self.flush()
        self._group.barrier(timeout=self._timeout)
        self._drop.detach()
        self._context.segment_delete(self._numbers[self._rank])

    def is_free(self, name: Any, milliseconds: int = 0) -> bool:
        """Whether `slot` has not to wait, after waiting so long. Raises PeerLost as `slot`, if it waits."""
        box, count = self._boxes[name], self._put[name]
        notification = self._first[name, self._rank] + count % box.slots
        return count < box.slots or self._is_set(notification, box.target, milliseconds)

    def is_there(self, name: Any, milliseconds: int = 0) -> bool:
        """Whether `take` has not to wait, after waiting so long. Raises PeerLost as `take`, if it waits."""
        box, count = self._boxes[name], self._taken[name]
        notification = self._first[name, self._rank] + count % box.slots
        return self._is_set(notification, box.source, milliseconds)

    def slot(self, name: Any) -> Any:
        """The memory of the next message to be sent, as bytes; waits until it is free."""
        box, count = self._boxes[name], self._put[name]
        if count >= box.slots:
            self._wait(self._first[name, self._rank] + count % box.slots, box.target)
        return self._bytes(name, count)

    def put(self, name: Any, size: int) -> None:
        """Send the first `size` bytes of what `slot` gave."""
        box, count = self._boxes[name], self._put[name]
        slot = count % box.slots
        offset = slot * box.room
        part = (
            self._numbers[self._rank],
            self._at[name, self._rank] + offset,
            self._numbers[box.target],
            self._at[name, box.target] + offset,
            size,
        )
        notice = (self._numbers[box.target], self._first[name, box.target] + slot, 1)
        self._context.write(box.target, [part], notice, _QUEUE)
        self._put[name] = count + 1

    def take(self, name: Any) -> tuple[Any, int]:
        """The next message, as bytes that stay until they are given up, and its number."""
        box, count = self._boxes[name], self._taken[name]
        self._wait(self._first[name, self._rank] + count % box.slots, box.source)
        self._taken[name] = count + 1
        return self._bytes(name, count), count

    def give_up(self, name: Any, number: int) -> None:
        """Let the sender use the slot of a message again."""
        box = self._boxes[name]
        notice = (self._numbers[box.source], self._first[name, box.source] + number % box.slots, 1)
        self._context.write(box.source, [], notice, _QUEUE)

    def flush(self) -> None:
        """Wait until all messages that were sent have arrived.

        Slots that were given up may be on their way: who is to use them again may have ended meanwhile.
        """
        if not self._context.wait(_QUEUE, self._timeout):
            raise Timeout("Messages did not arrive in time.", "See what the other ranks do.")

    def _bytes(self, name: Any, count: int) -> Any:
        box = self._boxes[name]
        begin = self._at[name, self._rank] + count % box.slots * box.room
        return self._memory[begin : begin + box.room]

    def _wait(self, notification: int, peer: int) -> None:
        """Wait for a notification from `peer`, and clear it."""
        began, started = time.monotonic(), time.perf_counter()
        while not self._is_set(notification, peer, _POLL_MS):
            if 0 <= self._timeout <= 1000 * (time.monotonic() - began):
                raise Timeout(
                    f"No message came from rank {peer} in time{_activity()}.", "See what that rank does."
                )
        self._context.notify_reset(self._numbers[self._rank], notification)
        if profile.recorder:
            profile.recorder.add(profile.WAITING, f"message from rank {peer}", started)

    def _is_set(self, notification: int, peer: int, milliseconds: int) -> bool:
        number, context = self._numbers[self._rank], self._context
        if context.notify_waitsome(number, notification, 1, milliseconds) >= 0:
            return True
        # Transports may ask the others themselves, which takes long where one was stopped.
        if not milliseconds or time.monotonic() - self._checked < _POLL_MS / 1000:
            return False
        self._checked = time.monotonic()
        states = context.state_vector()
        lost = [rank for rank in self._group.ranks if states[rank]]
        if not lost:
            return False
        if context.notify_waitsome(number, notification, 1, 0) < 0:
            raise PeerLost(
                f"Rank {lost[0]} ended while rank {self._rank} waited for a message from rank {peer}"
                f"{_activity()}.",
                "See the output of that rank.",
            )
        return True


class Counter:
    """Draws numbers: 0, 1, 2 and so on, each for one rank of a group alone, by atomic operations.

    All members of the group make it in the same order. The number lies in the memory of the first member.

    Args:
        context: The transport's.
        group: Who draws, for no other use meanwhile.
        timeout: Milliseconds after which waiting is given up; -1: never.
    """

    def __init__(self, context: Any, group: Group, timeout: int = -1) -> None:
        self._context, self._group, self._timeout = context, group, timeout
        self._numbers = segments_of(context, group, _ALIGNMENT, timeout)

    def draw(self) -> int:
        """The next number. Raises Timeout where the first member does not answer in time."""
        first = self._group.ranks[0]
        found = self._context.fetch_add(first, self._numbers[first], 0, 1, self._timeout)
        if found is None:
            raise Timeout(f"Rank {first} did not answer in time.", "See what that rank does.")
        return found

    def close(self) -> None:
        """Give the memory up, when all members have come here."""
        self._group.barrier(timeout=self._timeout)
        self._context.segment_delete(self._numbers[self._group.ranks[self._group.index]])


def segments_of(context: Any, group: Group, size: int, timeout: int) -> dict[int, int]:
    """Make a segment of so many bytes on this rank, known to the group; the numbers of all by rank.

    Raises InvalidCall where all segments are in use.
    """
    own_rank = group.ranks[group.index]
    number = numpy.zeros(1, numpy.int64)
    number[0] = _alloc(context, size)
    for rank in group.ranks:
        if rank != own_rank:
            context.segment_register(int(number[0]), rank, timeout)
    numbers = numpy.zeros(group.size, numpy.int64)
    group.allgather(numbers, number, timeout=timeout)
    group.barrier(timeout=timeout)
    return dict(zip(group.ranks, map(int, numbers), strict=True))


def _alloc(context: Any, size: int) -> int:
    for number in range(load().SEGMENTS - 1, 0, -1):
        try:
            context.segment_alloc(number, size)
        except InvalidCall:
            continue  # somebody has it
        return number
    raise InvalidCall("All segments are in use.", "Close a pipeline that is no longer needed.")


def _follow(context: Any, own_rank: int, numbers: Mapping[int, int]) -> None:
    """Send the other ranks a write without bytes, behind all that was sent to their segments.

    Waiting for the queue waits for writes, not for notifications alone, such as slots that were given up. A
    barrier overtakes these, and then they reach outside of a segment, or into the next one.
    """
    for rank in sorted(numbers.keys() - {own_rank}):
        context.write(rank, [(numbers[own_rank], 0, numbers[rank], 0, 0)], None, _QUEUE)


def free_dropped(context: Any, group: Group, timeout: int = -1) -> None:
    """Give up the memory of mailboxes that none of their ranks has any more, and none has closed.

    One rank alone cannot do that: others may still write there. So all members of `group` call this
    together. What a rank outside of it is in stays.

    Args:
        context: The transport's.
        group: For no other use meanwhile.
        timeout: Milliseconds after which waiting is given up; -1: never.
    """
    mailboxes = _by_context.setdefault(context, _Mailboxes())
    if len(mailboxes.living) >= mailboxes.collect_at:
        gc.collect()  # a model and what is attached to it hold each other
        mailboxes.collect_at = max(_COLLECT_FROM, 2 * len(mailboxes.living))
    dropped = list(mailboxes.dropped)
    own_rank = group.ranks[group.index]
    for numbers in dropped:
        _follow(context, own_rank, {rank: numbers[rank] for rank in group.ranks if rank in numbers})
    if not context.wait(_QUEUE, timeout):  # what this rank wrote into the others' memory
        raise Timeout("Messages did not arrive in time.", "See what the other ranks do.")
    own = numpy.zeros(load().SEGMENTS, numpy.uint8)
    own[[numbers[own_rank] for numbers in dropped]] = 1
    flags = numpy.zeros(group.size * len(own), numpy.uint8)
    group.allgather(flags, own, timeout=timeout)
    dropped_by = dict(zip(group.ranks, flags.reshape(group.size, -1), strict=True))
    for numbers in dropped:
        if all(rank in dropped_by and dropped_by[rank][number] for rank, number in numbers.items()):
            context.segment_delete(numbers[own_rank])
            mailboxes.dropped.remove(numbers)


def _activity() -> str:
    """In which stage and micro-batch, where this thread is in one."""
    where = activity.of_thread()
    return f" ({where})" if where else ""
