"""What leaves memory and what comes ahead of need, with a file on the disk and without PyTorch."""

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from carme_runtime.out_of_core.blocks import Block, State, leaves_first, measured_rates
from carme_runtime.out_of_core.spill import SpillFile
from carme_runtime.out_of_core.steps import Steps
from carme_runtime.out_of_core.store import Store
from carme_runtime.out_of_core.trace import Operation, Trace
from patience import HANG

SIZE = 1 << 20  # bytes of a block


class Memory:
    """The owner of a block, which lives until it is ended."""

    def __init__(self, size: int = SIZE) -> None:
        self._pages = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.ended = False

    def expired(self) -> bool:
        return self.ended

    def hold(self) -> object | None:
        return None if self.ended else self

    def forget(self) -> None:
        pass


class Program:
    """Operations on blocks, as PyTorch's would run."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.steps = Steps()
        file = SpillFile(folder)
        file.measure()
        self.store = Store(file, self.steps.distance)
        self.store.capacity = capacity
        self._moved: list[int] = []

    @property
    def moved(self) -> int:
        """Bytes that one of the last three steps moved; a late transfer makes another one move more."""
        return min(self._moved[-3:])

    def new_block(self, size: int = SIZE, place: int = 0) -> Block:
        memory = Memory(size)
        block = Block(memory, memory.address, size, self.steps.new_label(), place=place)
        self.store.add(id(memory), block)
        return block

    def run(
        self, uses: list[Block], create: Callable[[], list[Block]] = list, *, changes: bool = True
    ) -> list[Block]:
        """One operation, which changes what it uses or does not. Returns what it made."""
        writes = uses if changes else []
        self.steps.look_for_gone(self.store)
        planned = self.steps.begin("operation", uses)
        labels = tuple(block.label for block in uses)
        self.store.acquire(uses, writes, planned.made_bytes if planned else 2 * SIZE)
        blocks = create()
        self.store.release(uses)
        self.steps.end(Operation("operation", labels, labels if changes else ()), planned, blocks)
        self.steps.look_ahead(self.store)
        return blocks

    def end_step(self) -> None:
        self.steps.end_step(self.store.read, self.store.written)
        self.store.end_step()
        self._moved.append(sum(self.steps.moved))


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path, 64 * SIZE)
    yield program
    program.store.settle()
    program.store.close()


def end(blocks: Iterable[Block]) -> None:
    """Nobody has these any more."""
    for block in blocks:
        block.owner.ended = True  # type: ignore[attr-defined]


class Held(Memory):
    """An owner that is gone when nobody holds its memory any more."""

    def __init__(self) -> None:
        super().__init__()
        self._weak = weakref.ref(self._pages)

    def let_go(self) -> None:
        del self._pages

    def expired(self) -> bool:
        return self._weak() is None

    def hold(self) -> object | None:
        return self._weak()


@contextlib.contextmanager
def held_writes(program: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is written until the block ends."""
    may_write, write = threading.Event(), program.store.file.write

    def waiting(*arguments: Any) -> Any:
        assert may_write.wait(HANG)
        return write(*arguments)

    monkeypatch.setattr(program.store.file, "write", waiting)
    try:
        yield
    finally:
        may_write.set()


def test_what_only_a_queued_transfer_held_is_not_moved(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = [Held() for _ in range(8)]
    blocks = [Block(owner, owner.address, SIZE, program.steps.new_label()) for owner in owners]
    for owner, block in zip(owners, blocks, strict=True):
        program.store.add(id(owner), block)
        block.next_use = 1e9
    with held_writes(program, monkeypatch):
        program.store.leave_ahead(blocks)
        owners[-1].let_go()  # no thread has begun it: there are fewer threads than blocks
        assert program.store.collect_of([blocks[0]]) == [blocks[-1]]
    program.store.settle()
    assert [block.is_forgotten for block in blocks] == 7 * [False] + [True]


def test_outputs_of_several_steps_may_be_let_go_together(program: Program) -> None:
    weight, outputs = program.new_block(), []
    for step in range(8):
        (output,) = program.run([weight], lambda: [program.new_block()])
        outputs.append(output)
        if step >= 4:
            program.run([weight, output])
            for block in outputs:
                block.owner.ended = True  # type: ignore[attr-defined]
            outputs.clear()
        program.run([weight])
        program.end_step()
    assert program.steps.followed and program.steps.trace is not None
    assert [len(operation.dies) for operation in program.steps.trace.operations] == [0, 1, 0]


def test_what_a_step_makes_and_loses_is_not_moved_where_all_fits(program: Program) -> None:
    weights = [program.new_block() for _ in range(20)]
    for _ in range(4):
        for weight in weights:
            (result,) = program.run([weight], lambda: [program.new_block()])
            program.run([weight, result])
            result.owner.ended = True  # type: ignore[attr-defined]
        program.end_step()
    assert program.steps.followed
    assert program.store.read == program.store.written == 0


def test_an_operation_is_prepared_once_if_the_step_is_as_expected(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [program.new_block() for _ in range(20)]
    distances: list[int] = []
    prepare = Steps._prepare

    def counted(steps: Steps, store: Store, trace: object, distance: int) -> bool:
        distances.append(distance)
        return prepare(steps, store, trace, distance)  # type: ignore[arg-type]

    monkeypatch.setattr(Steps, "_prepare", counted)
    steps = 5
    for _ in range(steps):
        for weight in 5 * weights:
            program.run([weight])
        program.end_step()
    assert program.steps.followed
    assert 0 < len(distances) <= (steps + 1) * 5 * len(weights)


def test_blocks_come_back_as_they_left_and_ahead_of_their_use(program: Program) -> None:
    blocks = [program.new_block() for _ in range(16)]
    for block in blocks:
        ctypes.memset(block.address, block.label, SIZE)
    program.store.capacity = 10 * SIZE
    for _ in range(5):
        for block in blocks:
            program.run([block])
        program.end_step()
    assert program.steps.followed
    for block in blocks:
        program.store.acquire([block], [], 0)
        assert ctypes.string_at(block.address, SIZE) == bytes([block.label]) * SIZE
        program.store.release([block])
    assert program.store.used <= 10 * SIZE
    assert program.store.surprises < 5 * len(blocks)


@pytest.mark.parametrize("blocks", [20, 40, 60])
def test_steps_move_as_much_as_beladys_rule_in_the_room_that_is_not_for_what_comes_early(
    program: Program, blocks: int
) -> None:
    """As in training: forward, backward that makes gradients, two passes over these, and a step."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(blocks)]
    gradients: list[Block] = []
    for _ in range(6):
        for block in gradients:
            block.owner.ended = True  # type: ignore[attr-defined]
        gradients.clear()
        for weight in weights:
            program.run([weight], changes=False)
        for weight in reversed(weights):
            gradients[:0] = program.run([weight], lambda: [program.new_block()], changes=False)
        for changes in (False, True):
            for gradient in gradients:
                program.run([gradient], changes=changes)
        for weight, gradient in zip(weights, gradients, strict=True):
            program.run([weight, gradient])
        program.store.settle()  # what a step begins to move counts as its own
        program.end_step()
    assert program.steps.followed and program.steps.trace is not None
    assert program.steps.order is not None and program.steps.order.room < 16 * SIZE
    fewest = program.steps.trace.traffic(program.steps.order.room, 1.0, 1.0).moved
    assert program.moved <= 1.05 * fewest + SIZE


def test_another_capacity_makes_the_trainer_wait_for_three_played_steps_at_most(program: Program) -> None:
    program.store.capacity = 16 * SIZE
    blocks = [program.new_block() for _ in range(24)]
    for _ in range(3):
        for block in blocks:
            program.run([block])
        program.store.settle()
        program.end_step()
    program.store.capacity -= SIZE
    for block in blocks:
        program.run([block])
    assert program.steps.in_step and program.steps.trace is not None
    assert program.steps.trace.played == 3 * len(program.steps.trace)


def test_spare_room_is_tried_when_blocks_move_first_and_comes_back_after_all_has_fitted(
    program: Program,
) -> None:
    blocks = [program.new_block() for _ in range(24)]

    spares: list[int] = []
    played: list[int] = []  # operations, to find out
    for capacity in (27, 27, 22, 27, 22):
        program.store.capacity = capacity * SIZE
        for block in blocks:
            program.run([block])
        program.store.settle()
        if program.steps.order is not None and program.steps.trace is not None:
            spares.append(program.steps.order.spare)
            played.append(program.steps.trace.played)
        program.end_step()
    once = 3 * len(blocks)
    assert spares[0] == spares[2] == 0 < spares[1] == spares[3]
    assert played[0] == played[2] == played[3] == once < played[1]


@dataclass
class Speed:
    """Of a disk that reads as fast as it writes, unless given otherwise."""

    write_rate: float = 1.0
    read_rate: float = 1.0


def soon_gone_at(operation: float, block: Block) -> Block:
    """A changed block that nothing uses again, and that is gone after an operation."""
    block.next_use, block.gone = math.inf, operation
    return block


def clean_until(operation: float, block: Block) -> Block:
    """A block that the disk has, and that an operation uses next."""
    block.next_use, block.saved = operation, block.version
    return block


next_use = attrgetter("next_use")


def test_what_is_soon_gone_stays_where_a_clean_block_gives_as_much_room(program: Program) -> None:
    rates = Speed()
    soon_gone = soon_gone_at(5.0, program.new_block())
    clean, near = clean_until(9.0, program.new_block()), clean_until(4.0, program.new_block())
    changed = program.new_block()
    changed.next_use = 20.0
    several = [soon_gone, near, clean, changed]
    assert leaves_first(several, next_use, SIZE, rates) is clean
    assert leaves_first([soon_gone, near, changed], next_use, SIZE, rates) is soon_gone
    # To read a block of the same size again takes as long as to write this one.
    assert leaves_first(several, next_use, SIZE, Speed(write_rate=1.1)) is soon_gone
    large = clean_until(9.0, program.new_block(2 * SIZE))
    assert leaves_first([soon_gone, large], next_use, SIZE, rates) is soon_gone
    assert leaves_first([soon_gone, large], next_use, SIZE, Speed(read_rate=2.0)) is large
    soon_gone.saved = soon_gone.version  # nothing has to be written
    assert leaves_first(several, next_use, SIZE, rates) is soon_gone
    assert leaves_first([], next_use, SIZE, rates) is None


def test_of_unused_blocks_a_clean_one_leaves_first_then_the_one_freed_last(
    program: Program,
) -> None:
    rates = Speed()
    several = [soon_gone_at(operation, program.new_block()) for operation in (5.0, 8.0, 6.0)]
    assert leaves_first(several, next_use, SIZE, rates) is several[1]
    clean = clean_until(math.inf, program.new_block(2 * SIZE))
    assert leaves_first([*several, clean], next_use, SIZE, rates) is clean


def test_clean_blocks_that_give_too_little_room_do_not_leave_beside_what_is_soon_gone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.store, "_distance", next_use)
    # Here to read a block takes as long as to write it.
    monkeypatch.setattr(program.store.file, "read_rate", program.store.file.write_rate)
    soon_gone = soon_gone_at(5.0, program.new_block())
    clean = [clean_until(9.0, program.new_block(SIZE // 4)) for _ in range(3)]
    program.store.capacity = 2 * SIZE
    program.store.acquire([], [], SIZE // 2)
    assert program.store.written == 0 and [block.state for block in clean].count(State.ABSENT) == 1
    program.store.release([])
    program.store.acquire([], [], 2 * SIZE - SIZE // 2)  # two clean blocks, that are there, are not enough
    assert program.store.written == SIZE and soon_gone.state is State.ABSENT
    assert [block.state for block in clean].count(State.ABSENT) == 1
    program.store.release([])


def test_room_for_what_is_made_later_is_not_taken_by_what_comes_early(program: Program) -> None:
    """Operations that make much, between others whose blocks would fit beside it only afterwards."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(24)]

    def create_blocks() -> list[Block]:
        return [program.new_block() for _ in range(6)]

    surprises = 0
    for _ in range(6):
        surprises = program.store.surprises
        for weight in weights:
            for block in program.run([weight], create_blocks):
                block.owner.ended = True  # type: ignore[attr-defined]
            program.run([weight])
        program.end_step()
    assert program.steps.followed
    assert program.store.surprises <= surprises + len(weights)  # 64 without that room


def test_results_that_can_leave_in_one_step_and_not_in_another_change_no_step(program: Program) -> None:
    """The allocator puts small ones into its heap now and then, where they are not blocks."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(20)]
    followed: list[bool] = []
    for step in range(8):
        for place, weight in enumerate(weights):
            is_block = (place + step) % 7 > 0
            results = program.run([weight], lambda: [program.new_block()] if is_block else [])  # noqa: B023
            program.run([weight, *results])
            for block in results:
                block.owner.ended = True  # type: ignore[attr-defined]
        program.end_step()
        followed.append(program.steps.followed)
    assert followed == [False] + 7 * [True]


def test_what_the_record_lacks_after_a_step_went_another_way_is_added_to_it(program: Program) -> None:
    """In step 3 no result can leave, and from then on it has an operation more between its two halves."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(20)]
    followed: list[bool] = []
    for step in range(8):
        saved = [program.run([w], lambda: [] if step == 3 else [program.new_block()]) for w in weights]  # noqa: B023
        if step >= 3:
            program.run([weights[0]])
        while saved:
            results = saved.pop()
            program.run([weights[len(saved)], *results])
            end(results)
        program.end_step()
        followed.append(program.steps.followed)
    assert followed == [False, True, True, False, True, True, True, True]
    assert program.steps.trace is not None
    backward = program.steps.trace.operations[21:40]  # what the last one uses is gone after the step
    assert [(len(each.uses), len(each.writes), len(each.dies)) for each in backward] == 19 * [(2, 2, 1)]


def test_what_is_a_block_for_the_first_time_is_planned_from_the_next_step_on(program: Program) -> None:
    """Until then it is what is used last, so that it is written although it is used next."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(20)]
    for step in range(6):
        saved = [program.run([w], lambda: [program.new_block()] if step else []) for w in weights]  # noqa: B023
        while saved:
            results = saved.pop()
            program.run([weights[len(saved)], *results], changes=False)
            end(results)
        program.store.settle()
        program.end_step()
        assert program.steps.followed == (step > 0)
    assert program.steps.trace is not None and program.steps.order is not None
    assert len(program.steps.trace.made_at) == len(weights)
    fewest = program.steps.trace.traffic(program.steps.order.room, 1.0, 1.0).moved
    assert 0 < program.moved <= 1.05 * fewest + SIZE


def test_which_of_two_results_can_leave_changes_no_step(program: Program) -> None:
    weights = [program.new_block() for _ in range(6)]
    for step in range(6):
        for weight in weights:
            places = (0, 1) if step == 0 else (step % 2,)
            results = program.run([weight], lambda: [program.new_block(place=each) for each in places])  # noqa: B023
            for used in (0, 1):
                program.run([weight, *(block for block in results if block.place == used)])
            end(results)
        program.end_step()
        assert program.steps.followed == (step > 0)


def test_what_each_step_takes_from_the_one_before_changes_no_step(program: Program) -> None:
    """As the state of a recurrent network, and what is used after the optimizer's step."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(20)]
    state, output = program.new_block(), program.new_block()
    for step in range(8):
        program.run([output], changes=False)
        end([output])
        for place, weight in enumerate(weights):
            if place == 10:
                before = state
                (state,) = program.run([weight, before], lambda: [program.new_block()], changes=False)
                program.run([before, state], changes=False)
                end([before])
            program.run([weight])
        (output,) = program.run([weights[0]], lambda: [program.new_block()])
        program.store.settle()
        program.end_step()
        assert program.steps.followed == (step > 0)
    trace, order = program.steps.trace, program.steps.order
    assert trace is not None and order is not None
    assert sorted(trace.carried) == sorted(trace.made_at)
    # Both are used in the next step, and their places are free from their last use there on.
    assert [trace.next_use(label, len(trace) - 1) - len(trace) for label in trace.made_at] == [11, 0]
    fewest = trace.traffic(order.room, 1.0, 1.0).moved  # 14 blocks; without an order it would be 40
    assert 0 < program.moved <= 1.25 * fewest + SIZE  # a busy machine's late transfers come to two or three


@pytest.mark.parametrize("is_longer", [False, True], ids=["as long", "longer"])
def test_what_a_step_hands_on_may_grow(program: Program, *, is_longer: bool) -> None:
    """From step 3 on it is larger, also where each step has an operation more since then."""
    unit = SIZE // 16
    program.store.capacity = 150 * unit
    weights = [program.new_block(40 * unit) for _ in range(4)]
    output = program.new_block(50 * unit)
    for step in range(8):
        size = (50 if step < 3 else 80) * unit
        for weight in weights:
            program.run([weight])
        program.run([output], changes=False)
        end([output])
        (output,) = program.run([weights[0]], lambda: [program.new_block(size)])  # noqa: B023
        if is_longer and step >= 3:
            program.run([weights[1]])
        program.store.settle()
        program.end_step()
        trace = program.steps.trace
        assert trace is not None
        assert dict(trace.operations[5].makes).items() <= trace.sizes.items()
        assert [trace.sizes[label] for label in trace.made_at] == [size]
        assert all(trace.sizes[there] == trace.sizes[label] for label, there in trace.carried.items())
    assert program.steps.order is not None and program.steps.followed


def test_the_disk_is_as_fast_as_at_the_beginning_until_a_transfer_is_counted(program: Program) -> None:
    file = program.store.file
    program.store.busy_seconds = 0.5  # of the first transfer, whose bytes are counted a moment later
    assert measured_rates(program.store) == (file.read_rate, file.write_rate)
    program.store.read = round(file.read_rate)
    assert measured_rates(program.store) == pytest.approx((2 * file.read_rate, 2 * file.write_rate))


def test_a_planner_that_fails_ends_no_training(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("pop from an empty deque")

    monkeypatch.setattr(Trace, "order", fail)
    program.store.capacity = 4 * SIZE
    weights = [program.new_block() for _ in range(8)]
    for _ in range(4):
        for weight in weights:
            program.run([weight])
        program.end_step()
    assert program.steps.followed and program.steps.order is None and program.store.read > 0


def test_what_a_step_leaves_behind_is_gone_when_it_was_gone_in_the_step_before(program: Program) -> None:
    """Gradients that the program lets go before the backward pass; the first step finds none."""
    program.store.capacity = 16 * SIZE
    weights = [program.new_block() for _ in range(20)]
    gradients: list[Block] = []
    for step in range(5):
        for weight in weights:
            program.run([weight], changes=False)
        end(gradients)
        gradients = [program.run([w], lambda: [program.new_block()], changes=False)[0] for w in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            program.run([weight, gradient])
        program.store.settle()
        program.end_step()
        assert program.steps.followed == (step > 0)
    trace, order = program.steps.trace, program.steps.order
    assert trace is not None and order is not None
    assert {trace.left_until(label) for label in trace.made_at} == {len(weights)}
    assert program.moved <= 1.05 * trace.traffic(order.room, 1.0, 1.0).moved + SIZE


def test_what_is_read_does_not_wait_for_what_is_written_ahead_of_need(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = program.new_block()
    program.store.acquire([], [], program.store.capacity)  # so that it leaves
    program.store.release([])
    assert absent.state is State.ABSENT
    blocks = [program.new_block() for _ in range(8)]
    read, has_come = program.store.file.read, threading.Event()

    def seen(*arguments: Any) -> Any:
        has_come.set()
        return read(*arguments)

    monkeypatch.setattr(program.store.file, "read", seen)
    with held_writes(program, monkeypatch):
        program.store.leave_ahead(blocks)
        program.store.fetch_ahead(absent)
        assert has_come.wait(HANG)
    program.store.settle()


def test_threads_are_left_alone_where_nothing_is_to_be_moved(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [program.new_block() for _ in range(8)]
    woken: list[None] = []
    monkeypatch.setattr(program.store._work, "notify_all", lambda: woken.append(None))
    for _ in range(20):
        program.run(blocks)
    monkeypatch.undo()
    assert not woken


def test_the_garbage_collector_may_unpin_a_block_at_any_moment(tmp_path: Path) -> None:
    program = Program(tmp_path, 2 * SIZE)
    with contextlib.closing(program.store):
        block = program.new_block()
        program.store.acquire([block], [], 0)
        ended = threading.Event()

        def collect() -> None:
            with program.store._lock:
                program.store.unpin(block)  # as in a thread that was interrupted while it held the lock
            ended.set()

        threading.Thread(target=collect, daemon=True).start()
        assert ended.wait(HANG)
        program.store.acquire([], [], 2 * SIZE)  # now it can leave
        assert block.state is State.ABSENT
