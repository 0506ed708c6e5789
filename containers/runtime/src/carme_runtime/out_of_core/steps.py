"""Follows a program through its steps: records one, and then knows what comes next."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from carme_runtime.logs import log
from carme_runtime.out_of_core.blocks import Block, State, measured_rates
from carme_runtime.out_of_core.store import Store
from carme_runtime.out_of_core.trace import NEVER, DoesNotFit, Operation, Order, Trace

_FARTHEST, _TOGETHER = 400, 32  # operations that are looked ahead, and that are examined at a time
_CHANGE, _CHANGE_WITHIN = 64, 8  # parts of the room: such a change counts, at a step's begin and within it
_LARGE = 4  # part of the room; with a larger change other spare rooms may be better
_AHEAD = 8  # blocks, of the largest, whose room is for what comes before its time, at most
_SMOOTHING = 0.5  # the weight of the newest time of an operation


class Steps:
    """Which operation of a step is next, as far as the last step shows it.

    A step that goes another way than the one before is right as well: blocks then leave by their last use,
    and the step is recorded anew. Which tensors can be blocks is up to the allocator, and what a step takes
    from the one before is another block each time: neither makes it another way. What the record lacks is
    added to it.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.count = 0  # steps that have ended
        self.operations = 0  # ever
        self.in_step = True  # this step goes as the last one went
        self.followed = False  # the last step went as the one before
        self.seconds = 0.0  # of the last step
        self.moved = (0, 0)  # bytes that the last step read and wrote
        self.position = -1  # of the last operation that began
        self.now = -1  # the same, counted through all steps that go as the recorded one
        self._record: list[Operation] = []
        self._sizes: dict[int, int] = {}
        self._labels = 0
        self._by_label: dict[int, Block] = {}
        self._leftovers_end = 0
        self._began = time.perf_counter()
        self._before = (0, 0)
        self._seen = 0  # what came before this operation, counted as `now`, has been examined
        self._surprises = 0  # of the store, until then
        self._is_held_up = True  # what comes next waits for room
        # Of operations that have been examined and are to come, those that need more room than all later
        # ones: their numbers, and the bytes, less those that are freed from the step's begin until then.
        self._peaks: deque[tuple[int, int]] = deque()
        self._missing: set[int] = set()  # labels of the record that have no block now
        self._additional: set[int] = set()  # labels that operations may use where the record lacks them
        self._undated: set[int] = set()  # of blocks whose end the record does not know
        self._leftovers: set[Block] = set()  # of the step before, whose end it does not know, either
        self._until: dict[int, int] = {}  # by which operation of this step those that are gone now were
        self._carried: dict[int, int] = {}  # what `Trace.carried` lacks
        self._is_amended = False  # something was added to the record in this step
        self._is_dated = False  # or the end of a block
        self.order: Order | None = None  # of what leaves
        self._ordered: object = None  # the operations that it is of
        self._ordered_in = 0  # bytes that the store had then
        self._tried_in = 0  # and had when several spare rooms were tried last
        self._known: Order | None = None  # the last that moves blocks; before that what was found then

    def new_label(self) -> int:
        """A number for a block that no recorded step knows."""
        self._labels += 1
        return self._labels

    def blocks_of(self, labels: Iterable[int]) -> list[Block]:
        """The blocks that have these numbers in this step, as far as they are there."""
        return [self._by_label[label] for label in labels if label in self._by_label]

    def distance(self, block: Block) -> float:
        """How far the next use of a block is: by the recorded step, else the longer ago it was used."""
        if self.trace is None or not self.in_step:
            return self.operations - block.last_use
        return block.next_use - self.now

    def begin(self, name: str, uses: Sequence[Block]) -> Operation | None:
        """An operation begins. Returns the recorded one, if it is the same."""
        self.operations += 1
        self.position += 1
        self.now += 1
        planned = self._planned(name, uses)
        for block in uses:
            block.last_use = self.operations
            if planned is None and self._by_label.get(block.label, block) is not block:
                self._relabel(block, self.new_label())  # a newer one has that label
            self._by_label[block.label] = block
            self._look_up(block)
        return planned

    def _planned(self, name: str, uses: Sequence[Block]) -> Operation | None:
        """The recorded operation, if the one that begins is the same; else the step goes another way."""
        if self.trace is None or not self.in_step:
            return None
        if self.position < len(self.trace):
            planned = self.trace.operations[self.position]
            if planned.name == name and self._are_used(self.trace, planned, uses):
                return planned
        self._leave_trace()
        return None

    def end(self, operation: Operation, planned: Operation | None, new_blocks: Sequence[Block]) -> None:
        """It has ended.

        Args:
            operation: What it was; `makes` is filled in here.
            planned: What `begin` returned.
            new_blocks: Those that it made.
        """
        if planned is not None:
            planned.seconds += _SMOOTHING * (operation.seconds - planned.seconds)
            planned.workspace = max(planned.workspace, operation.workspace)
            if lacking := set(operation.writes) - set(planned.writes):
                planned.writes += tuple(lacking)
                self._is_amended = True
            self._match(planned, new_blocks)
            return
        for block in new_blocks:
            self._take(block, block.label)
        operation.makes = tuple((block.label, block.size) for block in new_blocks)
        operation.places = tuple(block.place for block in new_blocks)
        self._record.append(operation)
        for block in (*new_blocks, *(self._by_label[label] for label in operation.uses)):
            self._sizes[block.label] = block.size

    def _are_used(self, trace: Trace, planned: Operation, uses: Sequence[Block]) -> bool:
        """Whether these blocks are those of a recorded operation, but for what changes no order."""
        # What a step before made is not what has its label in this one.
        former = [block for block in uses if block.made_in < self.count and block.label in trace.made_at]
        labels = tuple(block.label for block in uses if block not in former)
        if labels == planned.uses and not former:
            return True
        if any(label not in planned.uses and label not in self._additional for label in labels):
            return False
        free = [label for label in planned.uses if label not in labels and label not in self._missing]
        places: list[tuple[Block, int | None]] = []
        for block in former:
            same = (each for each in free if each not in trace.made_at and trace.sizes[each] == block.size)
            places.append((block, place := next(same, None)))
            free = [each for each in free if each != place]
        # What has no block any more is no block in this step.
        if any(label in trace.made_at or label in self._by_label for label in free):
            return False
        for block, place in places:
            self._carry(trace, block, self.new_label() if place is None else place)
        lacking = tuple(block.label for block in uses if block.label not in planned.uses)
        if lacking:
            planned.uses += lacking
            self._is_amended = True
        return True

    def _carry(self, trace: Trace, block: Block, label: int) -> None:
        """A block of the step before has this number in those that go as the recorded one."""
        self._carried[block.label] = label
        trace.sizes[label] = block.size
        self._is_amended = True
        self._relabel(block, label)

    def _match(self, planned: Operation, new_blocks: Sequence[Block]) -> None:
        """Give blocks that an operation made the labels that they had in the recorded step."""
        assert self.trace is not None
        places = planned.places or (0,) * len(planned.makes)
        expected = list(zip(planned.makes, places, strict=True))
        is_whole = len(new_blocks) == len(expected)
        for block in new_blocks:
            found = next(
                (e for e in expected if e[1] == block.place and (is_whole or e[0][1] == block.size)), None
            )
            if found is None:
                planned.makes += ((block.label, block.size),)
                planned.places = (*places, block.place)
                places = planned.places
                self.trace.sizes[block.label] = block.size
                self._additional.add(block.label)
                self._undated.add(block.label)
                self._is_amended = True
                self._take(block, block.label)
            else:
                expected.remove(found)
                self._missing.discard(found[0][0])
                if found[0][1] != block.size:
                    self._resize(self.trace, planned, found[0][0], block.size)
                self._take(block, found[0][0])
        self._missing.update(label for (label, _), _ in expected)

    def _resize(self, trace: Trace, planned: Operation, label: int, size: int) -> None:
        """What an operation makes has another size than it was recorded with, also in the next step."""
        planned.makes = tuple((each, size if each == label else old) for each, old in planned.makes)
        trace.sizes[label] = size
        if label in trace.carried:
            trace.sizes[trace.carried[label]] = size
        self._is_amended = True

    def look_for_gone(self, store: Store) -> None:
        """Notice which blocks are gone since the last operation, where the record has to know it."""
        if self.trace is None or not self.in_step:
            self.bury(store.collect())
        elif blocks := [*self.blocks_of(self._undated), *self._leftovers]:
            self.bury(store.collect_of(blocks))

    def bury(self, dead: Sequence[Block]) -> None:
        """These are gone since the last operation."""
        recording = self._record and not (self.trace and self.in_step)
        for block in dead:
            if self._by_label.get(block.label) is block:
                del self._by_label[block.label]
            if recording and block.label in self._sizes:
                # Outputs that were kept over several steps have the same label.
                if block.label not in self._record[-1].dies:
                    self._record[-1].dies += (block.label,)
            elif recording and block.label > 0:
                self._leftovers_end = len(self._record)
            elif block in self._leftovers:
                self._until[block.label] = self.position + 1
            elif block.label in self._undated and block.made_in == self.count:
                assert self.trace is not None
                self.trace.operations[self.position].dies += (block.label,)
                self._undated.discard(block.label)
                self._is_dated = True
        if self._leftovers:
            self._leftovers.difference_update(dead)

    def end_step(self, read: int, written: int) -> None:
        """A step has ended; the next operation begins another one.

        Args:
            read: Bytes that have ever been read.
            written: Bytes that have ever been written.
        """
        now = time.perf_counter()
        self.seconds, self._began = now - self._began, now
        self.moved = (read - self._before[0], written - self._before[1])
        self._before = (read, written)
        self.followed = self.trace is not None and self.in_step and self.position + 1 == len(self.trace)
        if self.followed and self.trace is not None:
            self._keep(self.trace)
        else:
            if self.trace is not None and self.in_step:
                self._leave_trace(whole=True)
            if self._record:
                self.trace = Trace(self._record, self._sizes, self._leftovers_end, until=self._until)
                # What was no block in this step, but was one before, the rest of the record lacks.
                self._additional = {label for label in self._missing if label in self.trace.made_at}
                self._undated = set(self._additional)
        is_new = self._is_amended or not self.followed
        self._record, self._sizes, self._leftovers_end = [], {}, 0
        self.position, self.in_step = -1, True
        self.count += 1
        self._carried, self._is_amended, self._is_dated = {}, False, False
        if self.followed and self.trace is not None:
            self._carry_over(self.trace)
        else:
            self._missing.clear()
            self.now = -1
            self._seen = 0
        self._until = {}
        self._leftovers.clear()
        if self.trace is not None and not self.followed:
            self._leftovers.update(
                each for each in self._by_label.values() if each.label in self.trace.made_at
            )
        if is_new:
            for block in self._by_label.values():
                self._look_up(block)

    def _keep(self, trace: Trace) -> None:
        """The step that begins goes as the one that has ended, with newer times and what was added."""
        operations = trace.operations
        if any(trace.left_until(label) != position for label, position in self._until.items()):
            self._is_amended = True
        if self._is_amended:
            operations = list(operations)
            if self._ordered is trace.operations:  # another order is found, as for another capacity
                self._ordered, self._ordered_in = operations, -1
        if self._is_amended or self._is_dated or self._carried or self._until:
            carried = {**trace.carried, **self._carried} if self._carried else trace.carried
            until = {**trace.until, **self._until} if self._until else trace.until
            self.trace = Trace(operations, trace.sizes, trace.leftovers_end, carried, until)
        else:
            trace.renew()
        self._additional &= self._missing
        self._undated &= self._missing

    def _carry_over(self, trace: Trace) -> None:
        """Give blocks that the next step takes from this one the labels that they have there."""
        self._missing = {trace.carried[label] for label in self._missing if label in trace.carried}
        blocks = [(self._by_label.get(label), next_label) for label, next_label in trace.carried.items()]
        for block, next_label in blocks:
            if block is not None:
                self._relabel(block, next_label)

    def record_anew(self) -> None:
        """Record the step that begins, even as far as it goes as the last one went.

        What it makes may be gone earlier.
        """
        self.in_step = False
        self._record, self._sizes, self._leftovers_end = [], {}, 0
        self._missing.clear()

    def order_of(self, trace: Trace) -> Order | None:
        """What leaves when in steps that go as this one; None where that is not known yet."""
        return self.order if self._ordered is trace.operations else None

    def look_ahead(self, store: Store) -> None:
        """Let blocks leave whose places are of no use until they are used again, and others come there.

        Operations are examined once, as long as none finds its blocks otherwise.
        """
        trace = self.trace
        if trace is None or not self.in_step:
            return
        if self.position in trace.left:
            self.bury(store.collect())
        elif self.position > 0 and (dies := trace.operations[self.position - 1].dies):
            self.bury(store.collect_of(self.blocks_of(dies)))
        self._plan(store, trace)
        if self.order is not None and (leaving := self.order.leaving.get(self.position)):
            store.leave_ahead(self.blocks_of(leaving))
        farthest = self.now + min(_FARTHEST, len(trace))
        enough = farthest - min(_TOGETHER, len(trace) // 4)
        if not self._is_held_up and store.surprises == self._surprises and self._seen > enough:
            return
        depth = min(store.capacity // 4, 256 << 20)
        if store.queued_bytes() > depth // 2:
            return
        if store.surprises != self._surprises or self._seen <= self.now:
            self._surprises, self._seen = store.surprises, self.now + 1
            self._peaks.clear()
        while self._peaks and self._peaks[0][0] <= self.now:
            self._peaks.popleft()
        self._is_held_up = True
        while self._seen <= farthest:
            if not self._prepare(store, trace, self._seen) or store.queued_bytes() > depth:
                return
            self._seen += 1
        self._is_held_up = False

    def _plan(self, store: Store, trace: Trace) -> None:
        """Find out what leaves when, by the recorded step and the room that there is.

        Some room is left out, in which blocks come while others are used. More is moved in less room.
        """
        capacity = store.capacity
        enough = capacity // (_CHANGE if self.position <= 0 else _CHANGE_WITHIN)
        if self._ordered is trace.operations and abs(capacity - self._ordered_in) <= enough:
            return
        known = self._known_for(trace, capacity)
        if known is None:
            self._tried_in, self._known = capacity, None
        self._ordered, self._ordered_in, self.order = trace.operations, capacity, None
        read_rate, write_rate = measured_rates(store)
        try:
            self.order = order = trace.order(capacity, _AHEAD, write_rate, read_rate, known)
        except DoesNotFit:
            return
        except Exception:  # whatever it is, training goes on without an order
            log.exception("No order was found in which blocks leave; they leave by their next use.")
            return
        if self._known is None or order.traffic.moved:
            self._known = order

    def _known_for(self, trace: Trace, capacity: int) -> Order | None:
        """The order whose spare room is taken again.

        None for a new step, where the room is another one than when all of it was tried, and where blocks
        have to move for the first time: all of it is tried.
        """
        known = self._known
        if self._ordered is not trace.operations or abs(capacity - self._tried_in) > capacity // _LARGE:
            return None
        if known is not None and not known.traffic.moved and capacity < trace.whole:
            return None
        return known

    def _prepare(self, store: Store, trace: Trace, number: int) -> bool:
        """Have the blocks of an operation come. False when that must wait until others have left."""
        wrapped, place = divmod(number, len(trace))
        operation = trace.operations[place]
        begun, following = divmod(self.now + 1, len(trace))
        before = trace.freed[following] + begun * trace.freed[-1]
        # What it makes takes room, less what operations until then free.
        peak = operation.made_bytes + operation.workspace - trace.freed[place] - wrapped * trace.freed[-1]
        highest = max(peak, self._peaks[0][1] if self._peaks else peak) + before
        is_in_next = wrapped > self.now // len(trace)
        for label in operation.uses:
            if is_in_next and label in trace.made_at:
                continue  # it will be another one
            block = self._by_label.get(trace.carriers.get(label, label) if is_in_next else label)
            if block is None:
                continue
            if block.state not in (State.ABSENT, State.LEAVING):
                continue
            if store.expected_free() - max(highest, 0) < block.size:
                return False
            if block.state is State.LEAVING and not store.stay(block):
                return False  # it is fetched when it has left
            store.fetch_ahead(block)
        while self._peaks and self._peaks[-1][1] <= peak:
            self._peaks.pop()
        self._peaks.append((number, peak))
        return True

    def _take(self, block: Block, label: int) -> None:
        block.made_in = self.count
        block.last_use = self.operations
        self._relabel(block, label)

    def _relabel(self, block: Block, label: int) -> None:
        former = self._by_label.get(label)
        if former is not None and former is not block:
            former.next_use = NEVER  # this one has its place from now on
        if self._by_label.get(block.label) is block:
            del self._by_label[block.label]
        block.label = label
        self._by_label[label] = block
        self._look_up(block)

    def _look_up(self, block: Block) -> None:
        """When a block is used next."""
        if self.trace is not None and self.in_step:
            begin = self.now - self.position  # of this step
            block.next_use = begin + self.trace.next_use(block.label, self.position)
            block.gone = begin + self.trace.gone_after(block.label, self.position)

    def _leave_trace(self, whole: bool = False) -> None:
        """This step goes another way; what it had in common with the last one is recorded."""
        assert self.trace is not None
        self.in_step = False
        end = self.position + 1 if whole else self.position
        self._record = [replace(operation) for operation in self.trace.operations[:end]]
        self._sizes = {
            label: self.trace.sizes[label]
            for operation in self._record
            for label in (*operation.uses, *(label for label, _ in operation.makes))
        }
        self._leftovers_end = min(self.trace.leftovers_end, end)
