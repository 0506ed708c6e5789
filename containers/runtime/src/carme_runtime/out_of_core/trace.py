"""A recorded step: which blocks each operation uses, and what follows from it for a limit of memory.

Needs nothing but Python, so that plans can be made and tested anywhere.
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

NEVER = math.inf
_MOST_SPARE = 16  # one block's spare room is at most this part of the memory
_STEPS = 3  # that are played with each room: from the second one on each begins as the one before
_MOST_PLAYED = 100_000  # operations, after which no other spare room is tried
_LOOKED_AT = 8  # blocks that may leave in place of one that is soon gone


@dataclass(slots=True)
class Operation:
    """One operation of a step; blocks are numbers.

    Attributes:
        name: What it does.
        uses: Blocks that it reads or writes and that were there before.
        writes: Those of them that it changes.
        makes: Blocks that it makes, with their bytes.
        workspace: Bytes that it takes while it runs.
        seconds: How long it runs when all is in memory.
        dies: Blocks that are gone before the next operation begins.
    """

    name: str
    uses: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    makes: tuple[tuple[int, int], ...] = ()
    workspace: int = 0
    seconds: float = 0.0
    dies: tuple[int, ...] = ()

    @property
    def made_bytes(self) -> int:
        return sum(size for _, size in self.makes)


@dataclass(slots=True)
class Traffic:
    """What a step costs with a limit.

    Attributes:
        read: Bytes from the disk.
        written: Bytes to the disk.
        seconds: Predicted duration.
    """

    read: int = 0
    written: int = 0
    seconds: float = 0.0

    @property
    def moved(self) -> int:
        return self.read + self.written


class DoesNotFit(Exception):
    """An operation needs more memory than there is."""


@dataclass
class Trace:
    """The operations of a step, which come again in the same order.

    Args:
        operations: In their order.
        sizes: Bytes of each block.
        leftovers_end: The operation by which blocks that the step before left behind are gone.
    """

    operations: Sequence[Operation]
    sizes: dict[int, int]
    leftovers_end: int = 0
    made: dict[int, int] = field(init=False)  # the operation that makes a block
    gone: dict[int, int] = field(init=False)  # the operation after which a block that is made is gone
    clock: list[float] = field(init=False)  # seconds from the step's begin until each operation
    freed: list[int] = field(init=False)  # bytes that are gone before each operation, less those made by then
    played: int = field(init=False, default=0)  # operations that orders were found with

    def __post_init__(self) -> None:
        self.made = {}
        self.clock = [0.0]
        uses: defaultdict[int, list[int]] = defaultdict(list)
        for position, operation in enumerate(self.operations):
            self.clock.append(self.clock[-1] + operation.seconds)
            for block in operation.uses:
                uses[block].append(position)
            for block, _ in operation.makes:
                self.made.setdefault(block, position)
        self._uses = dict(uses)
        # What is left goes in the next step.
        self.gone = dict.fromkeys(self.made, len(self.operations) + self.leftovers_end)
        for position, operation in enumerate(self.operations):
            self.gone.update(dict.fromkeys(operation.dies, position))
        self.freed = [0]
        for operation in self.operations:
            gone = sum(self.sizes.get(block, 0) for block in operation.dies if block in self.made)
            self.freed.append(self.freed[-1] + gone - operation.made_bytes)

    def __len__(self) -> int:
        return len(self.operations)

    def next_use(self, block: int, position: int) -> float:
        """The next operation after `position` that uses a block; those of the next step count on."""
        uses = self._uses.get(block)
        if uses is None:
            return NEVER
        index = bisect_right(uses, position)
        if index < len(uses):
            return uses[index]
        return NEVER if block in self.made else len(self) + uses[0]

    @property
    def seconds(self) -> float:
        """How long a step takes when all is in memory."""
        return self.clock[-1]

    @property
    def least(self) -> int:
        """Bytes that the most demanding operation needs: its blocks, and its workspace."""
        return max((self.need(each) for each in self.operations), default=0)

    def need(self, operation: Operation) -> int:
        """Bytes that an operation needs."""
        used = sum(self.sizes[block] for block in set(operation.uses))
        return used + operation.made_bytes + operation.workspace

    @property
    def whole(self) -> int:
        """Bytes that a step needs when nothing is moved: the most that is alive at a time."""
        alive = sum(self.sizes[block] for block in self._uses if block not in self.made)
        most = alive
        for operation in self.operations:
            alive += operation.made_bytes
            most = max(most, alive + operation.workspace)
            alive -= sum(self.sizes.get(block, 0) for block in operation.dies)
        return most

    def traffic(self, room: int, write_rate: float, read_rate: float, spare: int = 0) -> Traffic:
        """What a step costs in `room` bytes, if always that block leaves whose next use is farthest.

        Args:
            room: Bytes for blocks and workspaces.
            write_rate: Bytes in a second that the disk takes.
            read_rate: Bytes in a second that it gives.
            spare: Bytes besides in which blocks come before others have left.

        Raises:
            DoesNotFit: An operation alone needs more.
        """
        run = _Belady(self, room, (write_rate, read_rate), spare)
        run.step()
        return run.step()  # the first one began with an empty memory

    def order(
        self,
        capacity: int,
        largest_spare: int,
        write_rate: float,
        read_rate: float,
        known: "Order | None" = None,
    ) -> "Order":
        """How a step goes in `capacity` bytes.

        Of spare rooms for up to `largest_spare` blocks it takes that with the shortest step; for one block at
        least where anything is moved, as transfers take longer now and then than expected. Long steps are
        tried with few of them, as the trainer waits meanwhile.

        Args:
            capacity: Bytes.
            largest_spare: Blocks.
            write_rate: Bytes in a second that the disk takes.
            read_rate: Bytes in a second that it gives.
            known: What was found for another capacity. Its number of blocks is taken, but one at least where
                anything is moved, and none where nothing is; no other is tried unless these have no room.

        Raises:
            DoesNotFit: An operation alone needs more.
        """
        # A model may have one block that is far larger than all others.
        block = min(max(self.sizes.values(), default=0), capacity // _MOST_SPARE)
        rates = write_rate, read_rate
        again = self._ordered_as(known, capacity, block, rates) if known is not None else None
        if again is not None:
            return again
        found: list[Order] = []
        before = self.played
        for blocks in range(largest_spare + 1):
            if found and (capacity - blocks * block < self.least or not found[0].traffic.moved):
                break
            if len(found) > 1 and self.played - before + _STEPS * len(self) > _MOST_PLAYED:
                break
            found.append(self._ordered(capacity, block, blocks, rates, spares_short_lived=False))
        best = min(found[1:] or found, key=lambda order: order.traffic.seconds)
        if not best.traffic.written:
            return best
        other = self._ordered(capacity, block, best.spare, rates, spares_short_lived=True)
        is_better = other.traffic.moved < best.traffic.moved and other.traffic.seconds <= best.traffic.seconds
        return other if is_better else best

    def _ordered_as(
        self, known: "Order", capacity: int, block: int, rates: tuple[float, float]
    ) -> "Order | None":
        """With as much spare room as in another capacity; None where there is too little room for that."""
        # What the step before left behind may have to move although all of one step fits.
        if capacity >= self.whole:
            order = self._ordered(capacity, block, 0, rates, spares_short_lived=False)
            if not order.traffic.moved:
                return order
        spare = max(known.spare, 1)
        if capacity - spare * block < self.least:
            return None
        return self._ordered(capacity, block, spare, rates, known.spares_short_lived)

    def _ordered(
        self, capacity: int, block: int, spare: int, rates: tuple[float, float], spares_short_lived: bool
    ) -> "Order":
        """With spare room for so many blocks."""
        room = capacity - spare * block
        run = _Belady(self, room, rates, capacity - room, spares_short_lived)
        traffic = Traffic()
        for _ in range(_STEPS):
            traffic = run.step()
        self.played += _STEPS * len(self)
        return Order(room, traffic, run.leaving, spare, spares_short_lived)


@dataclass(slots=True)
class Order:
    """What leaves when in a step.

    The block whose next use is farthest leaves (Belady 1966), and as early as that can be: its place is of no
    use from then on (the conservative order of Cao, Felten, Karlin and Li 1995).

    Attributes:
        room: Bytes that blocks are chosen for; what is left of the memory is for those that come early.
        traffic: What the step costs.
        leaving: Blocks that leave, by the operation that uses them last before they do.
        spare: Blocks of the largest size, for which there is room besides.
        spares_short_lived: Whether also changed blocks leave in place of those that are soon gone.
    """

    room: int
    traffic: Traffic
    leaving: Mapping[int, Sequence[int]]
    spare: int
    spares_short_lived: bool


class _Belady:
    """Plays steps through, one after the other.

    What nothing uses again before it is gone would be written for nothing, but for its room until then. A
    clean block whose next use comes after that gives as much room and is only read again, if it would not
    leave later anyway. A changed one costs more where it would not, so it takes the place where a caller
    finds that this moves less.
    """

    def __init__(
        self,
        trace: Trace,
        room: int,
        rates: tuple[float, float],
        spare: int,
        spares_short_lived: bool = False,
    ) -> None:
        self.trace = trace
        self.room = room
        self.rates = rates  # of writing and reading
        self.spares_short_lived = spares_short_lived
        self.present: dict[int, float] = {}  # when it was used last, in seconds
        self.used = 0
        self.dirty: set[int] = set()
        self.computed = self.transferred = 0.0  # when the processor and the disk are ready
        self.traffic = Traffic()
        self.number = -1  # of the operation, counted through all steps
        self.last: dict[int, int] = {}  # the operation that used a block last, counted so
        self.next: dict[int, float] = {}  # the one that uses it next
        self.gone: dict[int, float] = {}  # the one after which it is gone
        self.farthest: list[tuple[float, int]] = []  # a heap of the same, and of what was so before
        # Changed blocks that nothing uses again, in a heap of when they are gone, the last one first.
        self.short_lived: list[tuple[float, int]] = []
        self.leaving: dict[int, list[int]] = {}  # in this step: see `Order`
        self.free = deque([(0.0, room + spare)])  # when places were free, in seconds, and their bytes

    def step(self) -> Traffic:
        self.traffic, self.leaving = Traffic(), {}
        begin = max(self.computed, self.transferred)
        self.computed = self.transferred = begin
        leftovers = set(self.trace.made)
        for position, operation in enumerate(self.trace.operations):
            if position == self.trace.leftovers_end:
                for block in leftovers:
                    self._forget(block)
            leftovers -= {block for block, _ in operation.makes}
            self._operation(position, operation)
        self.traffic.seconds = self.computed - begin
        return self.traffic

    def _operation(self, position: int, operation: Operation) -> None:
        self.number += 1
        uses, ready = set(operation.uses), 0.0
        for block in uses:
            if block not in self.present:
                size = self.trace.sizes[block]
                self._make_room(size, uses)
                self.traffic.read += size
                self.transferred = max(self.transferred, self._enter(block, size)) + size / self.rates[1]
                ready = self.transferred
        for block, _ in operation.makes:
            self._forget(block)
        self._make_room(operation.made_bytes + operation.workspace, uses)
        for block, size in operation.makes:
            ready = max(ready, self._enter(block, size))
            self.dirty.add(block)
        self.computed = max(self.computed, ready) + operation.seconds
        self.dirty.update(operation.writes)
        for block in (*uses, *(block for block, _ in operation.makes)):
            self.present[block] = self.computed
            self.last[block] = self.number
            self.next[block] = self.number - position + self.trace.next_use(block, position)
            self.gone[block] = self.number - position + self.trace.gone.get(block, NEVER)
            if block in self.dirty and self.next[block] == NEVER:
                heappush(self.short_lived, (-self.gone[block], block))
            else:
                heappush(self.farthest, (-self.next[block], block))
        for block in operation.dies:
            self._forget(block)

    def _make_room(self, size: int, pinned: set[int]) -> None:
        while self.used + size > self.room:
            victim = self._victim(pinned)
            own, left = self.trace.sizes[victim], self.present[victim]
            if victim in self.dirty:
                self.dirty.discard(victim)
                self.traffic.written += own
                # It cannot leave before its last use has ended.
                self.transferred = left = max(self.transferred, left) + own / self.rates[0]
            self.leaving.setdefault(self.last[victim] % len(self.trace), []).append(victim)
            self._leave(victim, left)

    def _victim(self, pinned: set[int]) -> int:
        """The block that leaves: the one whose next use is farthest, but for these and what is soon gone."""
        soon_gone = self._soon_gone(pinned)
        until = NEVER if soon_gone is None else self.gone[soon_gone]
        passed: list[tuple[float, int]] = []
        looked_at = 0
        try:
            while self.farthest and looked_at < _LOOKED_AT:
                entry = heappop(self.farthest)
                following, block = -entry[0], entry[1]
                if block not in self.present or self.next[block] != following:
                    continue  # it was so before
                if block not in pinned:
                    if soon_gone is None or following == NEVER:
                        return block
                    if following > until and self._takes_place(block, soon_gone):
                        return block
                    looked_at += 1
                passed.append(entry)
        finally:
            for entry in passed:
                heappush(self.farthest, entry)
        if soon_gone is None:
            raise DoesNotFit
        return soon_gone

    def _soon_gone(self, pinned: set[int]) -> int | None:
        """Of blocks that would be written although nothing reads them before they are gone, the last one.

        Not one of those that are used now, as what the step before left behind may be.
        """
        passed: list[tuple[float, int]] = []
        found = None
        while self.short_lived and found is None:
            gone, block = -self.short_lived[0][0], self.short_lived[0][1]
            is_so = block in self.present and block in self.dirty
            if not is_so or self.next[block] < NEVER or self.gone[block] != gone:
                heappop(self.short_lived)  # it was so before
            elif block in pinned:
                passed.append(heappop(self.short_lived))
            else:
                found = block
        for entry in passed:
            heappush(self.short_lived, entry)
        return found

    def _takes_place(self, block: int, soon_gone: int) -> bool:
        """Whether a block leaves in place of one that is gone before the block is used again."""
        if block in self.dirty and not self.spares_short_lived:
            return False
        sizes = self.trace.sizes
        return sizes[block] / self.rates[1] <= sizes[soon_gone] / self.rates[0]

    def _enter(self, block: int, size: int) -> float:
        """Give a block the place that was free first. Returns when it was."""
        self.present[block] = self.computed
        self.used += size
        since = 0.0
        while size > 0:
            since, length = self.free.popleft()
            if length > size:
                self.free.appendleft((since, length - size))
            size -= length
        return since

    def _leave(self, block: int, since: float) -> None:
        del self.present[block]
        self.used -= self.trace.sizes[block]
        self.free.append((since, self.trace.sizes[block]))

    def _forget(self, block: int) -> None:
        self.dirty.discard(block)
        if block in self.present:
            self._leave(block, self.computed)
