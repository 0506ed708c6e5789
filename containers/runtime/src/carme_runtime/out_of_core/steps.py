"""Follows a program through its steps: records one, and then knows what comes next."""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence

from carme_runtime.out_of_core.blocks import Block, State
from carme_runtime.out_of_core.store import Store
from carme_runtime.out_of_core.trace import NEVER, DoesNotFit, Operation, Order, Trace

_FARTHEST = 400  # operations that are looked ahead
_CHANGE, _CHANGE_WITHIN = 64, 8  # parts of the room: such a change counts, at a step's begin and within it
_OTHER = 4  # part of the room; with a larger change other spare rooms may be better
_AHEAD = 4  # blocks, of the largest, whose room is for what comes before its time, at most
_SMOOTHING = 0.5  # the weight of the newest time of an operation


class Steps:
    """Which operation of a step is next, as far as the last step shows it.

    A step that goes another way than the one before is right as well: blocks then leave by their last use,
    and the step is recorded anew.
    """

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.count = 0  # steps that have ended
        self.operations = 0  # ever
        self.in_step = True  # this step goes as the last one went
        self.followed = False  # the last step went as the one before
        self.seconds = 0.0  # of the last step
        self.had_additional = False  # the last step made blocks that the recorded one did not
        # The last step left the recorded one after blocks of it had been others: the two do not go together.
        self.is_mixed = False
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
        # Of operations that have been examined and are to come, those that need more room than all later
        # ones: their numbers, and the bytes, less those that are freed from the step's begin until then.
        self._peaks: deque[tuple[int, int]] = deque()
        # Which tensors can be blocks is up to the allocator, and may differ from the recorded step.
        self._missing: set[int] = set()  # labels of that step that have no block in this one
        self._has_additional = False  # as `had_additional`, of this step
        self._differs = False  # the same, or lacked blocks that the recorded one has
        self._additional: set[int] = set()  # labels of blocks of this step that that one does not have
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
        for block in uses:
            block.last_use = self.operations
            self._by_label[block.label] = block
        if self.trace is None or not self.in_step:
            return None
        if self.position < len(self.trace):
            planned = self.trace.operations[self.position]
            if planned.name == name and self._are_used(planned, uses):
                for block in uses:
                    self._look_up(block)
                return planned
        self._leave_trace()
        return None

    def end(self, operation: Operation, planned: Operation | None, made: Sequence[Block]) -> None:
        """It has ended.

        Args:
            operation: What it was; `makes` is filled in here.
            planned: What `begin` returned.
            made: Blocks that are new.
        """
        if planned is not None:
            planned.seconds += _SMOOTHING * (operation.seconds - planned.seconds)
            planned.workspace = max(planned.workspace, operation.workspace)
            self._match(planned, made)
            return
        for block in made:
            self._take(block, block.label)
        operation.makes = tuple((block.label, block.size) for block in made)
        self._record.append(operation)
        for block in (*made, *(self._by_label[label] for label in operation.uses)):
            self._sizes[block.label] = block.size

    def _are_used(self, planned: Operation, uses: Sequence[Block]) -> bool:
        """Whether these blocks are those of a recorded operation."""
        labels = tuple(block.label for block in uses if block.label not in self._additional)
        if self._missing:
            return labels == tuple(label for label in planned.uses if label not in self._missing)
        return labels == planned.uses

    def _match(self, planned: Operation, made: Sequence[Block]) -> None:
        """Give blocks that an operation made the labels that they had in the recorded step."""
        expected = list(planned.makes)
        for block in made:
            same = (each for each in expected if len(made) == len(planned.makes) or each[1] == block.size)
            found = next(same, None)
            if found is None:
                self._additional.add(block.label)
                self._has_additional = True
                self._take(block, block.label)
            else:
                expected.remove(found)
                self._missing.discard(found[0])
                self._take(block, found[0])
        self._missing.update(label for label, _ in expected)
        self._differs = self._differs or self._has_additional or bool(expected)

    def bury(self, dead: Sequence[Block]) -> None:
        """These are gone since the last operation."""
        recording = self._record and not (self.trace and self.in_step)
        for block in dead:
            if self._by_label.get(block.label) is block:
                del self._by_label[block.label]
            self._additional.discard(block.label)
            if recording and block.label in self._sizes:
                # Outputs that were kept over several steps have the same label.
                if block.label not in self._record[-1].dies:
                    self._record[-1].dies += (block.label,)
            elif recording and block.label > 0:
                self._leftovers_end = len(self._record)

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
            # The same operations, with newer times.
            self.trace = Trace(self.trace.operations, self.trace.sizes, self.trace.leftovers_end)
        else:
            if self.trace is not None and self.in_step:
                self._leave_trace(whole=True)
            if self._record:
                self.trace = Trace(self._record, self._sizes, self._leftovers_end)
        self._record, self._sizes, self._leftovers_end = [], {}, 0
        self.position, self.in_step = -1, True
        self.is_mixed = not self.followed and self._differs
        self.had_additional, self._has_additional, self._differs = self._has_additional, False, False
        self._missing.clear()
        self.count += 1
        if not self.followed:
            self._additional.clear()
            self.now = -1
            self._seen = 0
            for block in self._by_label.values():
                self._look_up(block)

    def record_anew(self) -> None:
        """Record the step that begins, even as far as it goes as the last one went.

        What it makes may be gone earlier.
        """
        self.in_step = False
        self._record, self._sizes, self._leftovers_end = [], {}, 0

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
        if self.position == trace.leftovers_end:
            self.bury(store.collect())
        elif self.position > 0 and (dies := trace.operations[self.position - 1].dies):
            self.bury(store.collect_of(self.blocks_of(dies)))
        self._plan(store, trace)
        if self.order is not None:
            store.leave_ahead(self.blocks_of(self.order.leaving.get(self.position, ())))
        depth = min(store.capacity // 4, 256 << 20)
        if store.queued_bytes() > depth // 2:
            return
        if store.surprises != self._surprises or self._seen <= self.now:
            self._surprises, self._seen = store.surprises, self.now + 1
            self._peaks.clear()
        while self._peaks and self._peaks[0][0] <= self.now:
            self._peaks.popleft()
        while self._seen <= self.now + min(_FARTHEST, len(trace)):
            if not self._prepare(store, trace, self._seen) or store.queued_bytes() > depth:
                return
            self._seen += 1

    def _plan(self, store: Store, trace: Trace) -> None:
        """Find out what leaves when, by the recorded step and the room that there is.

        Some room is left out, in which blocks come while others are used. More is moved in less room.
        """
        capacity, file = store.capacity, store.file
        enough = capacity // (_CHANGE if self.position <= 0 else _CHANGE_WITHIN)
        if self._ordered is trace.operations and abs(capacity - self._ordered_in) <= enough:
            return
        known = self._known_for(trace, capacity)
        if known is None:
            self._tried_in, self._known = capacity, None
        self._ordered, self._ordered_in, self.order = trace.operations, capacity, None
        with contextlib.suppress(DoesNotFit):
            self.order = order = trace.order(capacity, _AHEAD, file.write_rate, file.read_rate, known)
            if self._known is None or order.traffic.moved:
                self._known = order

    def _known_for(self, trace: Trace, capacity: int) -> Order | None:
        """The order whose spare room is taken again.

        None for a new step, where the room is another one than when all of it was tried, and where blocks
        have to move for the first time: all of it is tried.
        """
        known = self._known
        if self._ordered is not trace.operations or abs(capacity - self._tried_in) > capacity // _OTHER:
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
        for label in operation.uses:
            block = self._by_label.get(label)
            if block is None or (wrapped > self.now // len(trace) and label in trace.made):
                continue  # it will be another one
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
        former = self._by_label.get(label)
        if former is not None:
            former.next_use = NEVER  # this one has its place from now on
        block.label = label
        block.last_use = self.operations
        self._by_label[label] = block
        self._look_up(block)

    def _look_up(self, block: Block) -> None:
        """When a block is used next."""
        if self.trace is not None and self.in_step:
            begin = self.now - self.position  # of this step
            block.next_use = begin + self.trace.next_use(block.label, self.position)
            block.gone = begin + self.trace.gone.get(block.label, NEVER)

    def _leave_trace(self, whole: bool = False) -> None:
        """This step goes another way; what it had in common with the last one is recorded."""
        assert self.trace is not None
        self.in_step = False
        end = self.position + 1 if whole else self.position
        self._record = [_copy(operation) for operation in self.trace.operations[:end]]
        self._sizes = {
            label: self.trace.sizes[label]
            for operation in self._record
            for label in (*operation.uses, *(label for label, _ in operation.makes))
        }
        self._leftovers_end = min(self.trace.leftovers_end, end)


def _copy(operation: Operation) -> Operation:
    return Operation(
        operation.name,
        operation.uses,
        operation.writes,
        operation.makes,
        operation.workspace,
        operation.seconds,
        operation.dies,
    )
