"""A recorded step: which blocks each operation uses, and what follows from it for a limit of memory.

Needs nothing but Python, so that plans can be made and tested anywhere.
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

NEVER = math.inf
_MOST_SPARE = 16  # one block's spare room is at most this part of the memory
_STEPS = 3  # that are played with each room: from the second one on each begins as the one before
_MOST_PLAYED = 100_000  # operations, after which no other spare room is tried
_MOST_MOVED = 1.04  # times what is moved without spare room, with more spare room than for one block
_LONGER = 2  # spare rooms that make a step no shorter, after which no other is tried
_IDLE = 16  # times in which the disk waited; later transfers take some of them
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
        places: Which of its results each block is that it makes; empty: the first one.
    """

    name: str
    uses: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    makes: tuple[tuple[int, int], ...] = ()
    workspace: int = 0
    seconds: float = 0.0
    dies: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def made_bytes(self) -> int:
        return sum(size for _, size in self.makes) if self.makes else 0


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
        carried: Of blocks that a step makes and the next one uses, their numbers there.
        until: Of those that it leaves behind the operation by which they are gone, where that is known.
    """

    operations: Sequence[Operation]
    sizes: dict[int, int]
    leftovers_end: int = 0
    carried: Mapping[int, int] = field(default_factory=dict)
    until: Mapping[int, int] = field(default_factory=dict)
    carriers: dict[int, int] = field(init=False)  # the other way round
    made_at: dict[int, int] = field(init=False)  # the operation that makes a block
    gone: dict[int, int] = field(init=False)  # the operation after which a block that is made is gone
    clock: list[float] = field(init=False)  # seconds from the step's begin until each operation
    left: dict[int, list[int]] = field(init=False)  # what of the step before is gone by an operation
    freed: list[int] = field(init=False)  # bytes that are gone before each operation, less those made by then
    played: int = field(init=False, default=0)  # operations that orders were found with

    def __post_init__(self) -> None:
        self.made_at = {}
        self.renew()
        uses: defaultdict[int, list[int]] = defaultdict(list)
        for position, operation in enumerate(self.operations):
            for block in operation.uses:
                uses[block].append(position)
            for block, _ in operation.makes:
                self.made_at.setdefault(block, position)
        self._uses = dict(uses)
        self.carriers = {following: block for block, following in self.carried.items()}
        # What is left goes in the next step.
        self.left = {}
        for block in self.made_at:
            self.left.setdefault(self.left_until(block), []).append(block)
        self.gone = {block: len(self.operations) + self.left_until(block) for block in self.made_at}
        for position, operation in enumerate(self.operations):
            self.gone.update(dict.fromkeys(operation.dies, position))
        in_next = {block: self.gone[f] for block, f in self.carried.items() if f in self.gone}
        self.gone.update({block: len(self.operations) + position for block, position in in_next.items()})
        self.freed, own = [0], self.made_at.keys() | self.carriers.keys()
        for operation in self.operations:
            gone = sum(self.sizes.get(block, 0) for block in operation.dies if block in own)
            self.freed.append(self.freed[-1] + gone - operation.made_bytes)

    def renew(self) -> None:
        """Begin the next step, which goes as this one: operations took other times."""
        self.clock = [*accumulate((operation.seconds for operation in self.operations), initial=0.0)]
        self.played = 0

    def __len__(self) -> int:
        return len(self.operations)

    def next_use(self, block: int, position: int) -> float:
        """The next operation after `position` that uses a block; those of the next step count on."""
        if self.is_leftover(block, position):
            return NEVER
        uses = self._uses.get(block, ())
        index = bisect_right(uses, position)
        if index < len(uses):
            return uses[index]
        if block in self.carried:
            following = self._uses.get(self.carried[block])
        else:
            following = None if block in self.made_at or block in self.carriers else uses
        return len(self) + following[0] if following else NEVER

    def gone_after(self, block: int, position: int) -> float:
        """The operation after which the block is gone that has this number then."""
        return self.left_until(block) if self.is_leftover(block, position) else self.gone.get(block, NEVER)

    def left_until(self, block: int) -> int:
        """By which operation a block is gone that the step before left behind."""
        return self.until.get(block, self.leftovers_end)

    def is_leftover(self, block: int, position: int) -> bool:
        """Whether the block that has this number then is that of the step before."""
        return position < self.made_at.get(block, -1)

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
        alive = sum(self.sizes[block] for block in self._uses if block not in self.made_at)
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
        least where anything is moved, as transfers take longer now and then than expected, and for more where
        that moves little more. Long steps are tried with few of them, as the trainer waits meanwhile.

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
            if found and blocks - _shortest(found).spare > _LONGER:
                break
            order = self._ordered(capacity, block, blocks, rates, spares_short_lived=False)
            if blocks > 1 and order.traffic.moved > _MOST_MOVED * found[0].traffic.moved:
                break
            found.append(order)
        best = _shortest(found)
        if not best.traffic.written:
            return best
        sparing = self._ordered(capacity, block, best.spare, rates, spares_short_lived=True)
        is_better = (
            sparing.traffic.moved < best.traffic.moved and sparing.traffic.seconds <= best.traffic.seconds
        )
        return sparing if is_better else best

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


def _shortest(orders: Sequence[Order]) -> Order:
    """That with the shortest step, but the first one only if there is no other."""
    return min(orders[1:] or orders, key=lambda order: order.traffic.seconds)


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
        self.idle: deque[tuple[float, float]] = deque(maxlen=_IDLE)  # when the disk waited until then
        self.traffic = Traffic()
        self.number = -1  # of the operation, counted through all steps
        self.begun = 0  # the number of this step's first operation
        self.last: dict[int, int] = {}  # the operation that used a block last, counted so
        self.next: dict[int, float] = {}  # the one that uses it next
        self.gone: dict[int, float] = {}  # the one after which it is gone
        self.farthest: list[tuple[float, int]] = []  # a heap of the same, and of what was so before
        # Changed blocks that nothing uses again, in a heap of when they are gone, the last one first.
        self.short_lived: list[tuple[float, int]] = []
        self.leaving: dict[int, list[int]] = {}  # in this step: see `Order`
        self.free = deque([(0.0, room + spare)])  # when places were free, in seconds, and their bytes

    def step(self) -> Traffic:
        self.traffic, self.leaving, self.begun = Traffic(), {}, self.number + 1
        begin = max(self.computed, self.transferred)
        self.computed = self.transferred = begin
        self.idle.clear()
        leftovers = set(self.trace.made_at)
        for position, operation in enumerate(self.trace.operations):
            for block in self.trace.left.get(position, ()):
                if block in leftovers:
                    self._forget(block)
            leftovers -= {block for block, _ in operation.makes}
            self._operation(position, operation)
        self._carry()
        self.traffic.seconds = max(self.computed, self.transferred) - begin
        return self.traffic

    def _carry(self) -> None:
        """Give blocks that the next step uses the numbers that they have there."""
        carried = self.trace.carried
        in_memory = {block for block in carried if block in self.present}
        moved = {
            carried[b]: (self.present[b], self.last[b], self.next[b], b in self.dirty) for b in in_memory
        }
        for block in (*carried, *carried.values()):
            self._forget(block)
        for block, (used, last, following, is_dirty) in moved.items():
            size = self.trace.sizes[block]
            if self.used + size > self.room:  # it is larger than what it was before
                self._leave_out(block, last, is_dirty)
                continue
            self._enter(block, size)
            self.present[block], self.last[block], self.next[block] = used, last, following
            self.gone[block] = self.number + 1 + self.trace.gone.get(block, NEVER)
            if is_dirty:
                self.dirty.add(block)
            heappush(self.farthest, (-self.next[block], block))

    def _leave_out(self, block: int, last: int, is_dirty: bool) -> None:
        """What the next step uses does not fit beside what else it uses: it leaves after its last use."""
        if is_dirty:
            size = self.trace.sizes[block]
            self.traffic.written += size
            self._transfer(self.computed, size / self.rates[0])
        self.leaving.setdefault(last % len(self.trace), []).append(self.trace.carriers[block])

    def _operation(self, position: int, operation: Operation) -> None:
        self.number += 1
        uses, ready = set(operation.uses), 0.0
        for block in uses:
            if block not in self.present:
                size = self.trace.sizes[block]
                self._make_room(size, uses)
                self.traffic.read += size
                ready = max(ready, self._transfer(self._enter(block, size), size / self.rates[1]))
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
            victim = self._victim(self.used + size - self.room, pinned)
            own, left = self.trace.sizes[victim], self.present[victim]
            if victim in self.dirty:
                self.dirty.discard(victim)
                self.traffic.written += own
                # It cannot leave before its last use has ended.
                left = self._transfer(left, own / self.rates[0])
            # One that the step before used last has the number that it has in that one.
            before = self.last[victim] < self.begun
            name = self.trace.carriers.get(victim, victim) if before else victim
            self.leaving.setdefault(self.last[victim] % len(self.trace), []).append(name)
            self._leave(victim, left)

    def _transfer(self, since: float, seconds: float) -> float:
        """When something has been moved that can be from then on: also in time in which the disk waited."""
        gaps, self.idle = self.idle, deque(maxlen=_IDLE)
        for begin, end in gaps:
            start = max(begin, since)
            taken = min(max(end - start, 0.0), seconds)
            if not taken:
                self.idle.append((begin, end))
                continue
            seconds, done = seconds - taken, start + taken
            self.idle.extend(gap for gap in ((begin, start), (done, end)) if gap[0] < gap[1])
            if not seconds:
                self.idle.extend(gap for gap in gaps if gap[0] >= end)
                return done
        start = max(self.transferred, since)
        if start > self.transferred:
            self.idle.append((self.transferred, start))
        self.transferred = start + seconds
        return self.transferred

    def _victim(self, needed: int, pinned: set[int]) -> int:
        """The block that leaves: the one whose next use is farthest, but for these and what is soon gone.

        In place of what is soon gone others leave only if they give all the bytes that are needed.
        """
        soon_gone = self._soon_gone(pinned)
        until = NEVER if soon_gone is None else self.gone[soon_gone]
        passed: list[tuple[float, int]] = []
        leaving: list[int] = []  # that leave in its place, the farthest first
        looked_at = gained = 0
        try:
            while self.farthest and looked_at < _LOOKED_AT:
                entry = heappop(self.farthest)
                following, block = -entry[0], entry[1]
                if block not in self.present or self.next[block] != following:
                    continue  # it was so before
                passed.append(entry)
                if block in pinned:
                    continue
                if soon_gone is None or following == NEVER:
                    passed.pop()
                    return block
                if following <= until:
                    break  # and so are all others
                if not self._takes_place(block, soon_gone):
                    looked_at += 1
                    continue
                leaving.append(block)
                gained += self.trace.sizes[block]
                if gained >= needed:
                    return leaving[0]
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
