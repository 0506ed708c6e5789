"""The blocks of a process: which are in memory, and the threads that move them."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from carme_runtime.out_of_core import pages
from carme_runtime.out_of_core.blocks import Block, State, Transfer, leaves_first
from carme_runtime.out_of_core.spill import PIECE, SpillFile
from carme_runtime.out_of_core.trace import DoesNotFit

_THREADS = 4
_WRITING = 3  # of them that write ahead of need, at most: what is to be read then finds one


class Store:
    """Keeps the blocks in memory below `capacity` bytes.

    One thread, the trainer's, calls it; its own threads move blocks. Everything that several threads see is
    guarded by one lock.

    Args:
        file: Where blocks go.
        distance: How far a block's next use is; the farthest leaves first.
    """

    def __init__(self, file: SpillFile, distance: Callable[[Block], float]) -> None:
        self.file = file
        self.capacity = 0
        self.used = 0  # bytes that blocks take in memory, or will when they have arrived
        self.blocks: dict[int, Block] = {}  # by what identifies their owners
        self.read = self.written = 0  # bytes, ever
        self.waited = 0.0  # seconds that the trainer has waited for blocks
        self.busy_seconds = 0.0  # in which the disk had something to do
        self.surprises = 0  # blocks that were not there, had to leave, or are not to come any more
        self._distance = distance
        self._reserved = 0  # bytes for what the operation that runs makes, and for its workspace
        self._lock = threading.Lock()
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._urgent: deque[Transfer] = deque()
        self._ahead: deque[Transfer] = deque()
        self._transfers: dict[Block, Transfer] = {}  # queued or under way
        self._moving = 0  # transfers under way
        self._writing = 0  # threads that write
        # Owners whose transfers have ended. PyTorch frees storages without Python's lock, which must not meet
        # another thread that takes or lets go the same one: the trainer's thread does both.
        self._holds: list[object] = []
        self._unpinned: deque[Block] = deque()  # by `unpin`
        self._forgotten: list[Block] = []
        self._busy_since = 0.0
        self._error: OSError | None = None
        self._closing = False
        self._threads = [threading.Thread(target=self._move, daemon=True) for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    # What an operation asks for

    def acquire(
        self, blocks: Sequence[Block], writes: Iterable[Block], room: int, wished_room: int = 0
    ) -> None:
        """Bring blocks into memory and keep them there until `release`.

        Args:
            blocks: What is used.
            writes: Those of them that are changed.
            room: Bytes that must be free for what is made meanwhile.
            wished_room: Bytes that should be free, if it can be had.

        Raises:
            DoesNotFit: It is more than the capacity.
            CarmeRuntimeError: The disk is full or failed.
        """
        begin = time.perf_counter()
        try:
            self._acquire(blocks, set(writes), room, wished_room)
        finally:  # what does not fit or fails has been waited for, too
            self.waited += time.perf_counter() - begin

    def _acquire(self, blocks: Sequence[Block], changed: set[Block], room: int, wished_room: int) -> None:
        with self._lock:
            self._raise_failure()
            while self._unpinned:
                self._unpinned.popleft().pins -= 1
            for block in blocks:
                block.pins += 1
            try:
                if not self._is_ready(blocks, max(room, wished_room)):
                    self._bring(blocks, changed, room, wished_room)
            except BaseException:
                for block in blocks:
                    block.pins -= 1
                raise
            for block in changed:
                block.version += 1
            self._reserved = max(room, min(wished_room, self.capacity - self.used))

    def release(self, blocks: Sequence[Block]) -> None:
        """The operation has ended."""
        with self._lock:
            for block in blocks:
                block.pins -= 1
            reserved, self._reserved = self._reserved, 0
            if reserved and self._ahead:
                self._work.notify_all()

    def make_room(self, size: int) -> None:
        """Let blocks leave, as far as they can, for what will take so many bytes besides them.

        The next check of the limit corrects the capacity.

        Raises:
            CarmeRuntimeError: The disk is full or failed.
        """
        with self._lock:
            self.capacity = max(self.capacity - size, 0)
            with contextlib.suppress(DoesNotFit):
                self._bring((), set(), self._reserved, 0)

    def add(self, key: int, block: Block) -> None:
        """A new block, in memory."""
        with self._lock:
            self.blocks[key] = block
            block.key = key
            self.used += block.size

    def collect(self) -> list[Block]:
        """Forget blocks whose owners are gone. Returns all that were forgotten since the last call."""
        with self._lock:
            self._collect()
            forgotten, self._forgotten = self._forgotten, []
            return forgotten

    def collect_of(self, blocks: Iterable[Block]) -> list[Block]:
        """The same, but look at these alone: it takes its time to look at all."""
        with self._lock:
            self._collect(block for block in blocks if not block.is_forgotten)
            forgotten, self._forgotten = self._forgotten, []
            return forgotten

    def remove(self, key: int) -> None:
        """A block that is not to be moved any more, although its owner is there."""
        with self._lock:
            self._remove(key, self.blocks[key])

    def pin_for_step(self, block: Block) -> None:
        """Keep a block in memory until `end_step`."""
        with self._lock:
            block.pins += 1
            block.step_pins += 1

    def end_step(self) -> None:
        """Let go what was kept until the step's end."""
        with self._lock:
            for block in self.blocks.values():
                block.pins -= block.step_pins
                block.step_pins = 0

    def unpin(self, block: Block) -> None:
        """Take a pin away, of whatever origin, before the next operation.

        Without the lock: the garbage collector may call this at any moment, also in a thread that holds it.
        """
        self._unpinned.append(block)

    # What is done ahead of need

    def queued_bytes(self) -> int:
        """Bytes that the disk still has to move."""
        if not self._urgent and not self._ahead:
            return 0
        with self._lock:
            return sum(each.block.size - each.handed_out for each in (*self._urgent, *self._ahead))

    def expected_free(self) -> int:
        """Bytes that are free when all that is queued has been moved."""
        with self._lock:
            leaving = sum(t.block.size for t in self._transfers.values() if t.is_write and not t.block.pins)
            coming = sum(t.block.size for t in self._transfers.values() if not t.is_write and not t.started)
            return self.capacity - self.used + leaving - coming

    def fetch_ahead(self, block: Block) -> None:
        """Read an absent block when there is room."""
        with self._lock:
            if block.state is State.ABSENT and not block.is_forgotten:
                self._queue(block, is_write=False, queue=self._ahead)

    def stay(self, block: Block) -> bool:
        """Let a block stay that waits for being written. False when it leaves already."""
        with self._lock:
            if (
                block.state is State.LEAVING
                and block in self._transfers
                and not self._transfers[block].started
            ):
                self._cancel(self._transfers[block])
        return block.state is State.PRESENT

    def leave_ahead(self, blocks: Iterable[Block]) -> None:
        """Let blocks leave that are in memory and not used now."""
        with self._lock:
            for block in blocks:
                if block.state is State.PRESENT and not block.pins and not block.is_forgotten:
                    self._let_leave(block, self._ahead)

    # The process as a whole

    def before_fork(self) -> None:
        """Keep the blocks from the child; nothing else happens until `after_fork`."""
        self._lock.acquire()
        self._collect()
        for block in self.blocks.values():
            pages.keep_from_children(block.address, block.size, True)

    def after_fork(self) -> None:
        """Go on, in the parent."""
        for block in self.blocks.values():
            pages.keep_from_children(block.address, block.size, False)
        self._lock.release()

    def outside(self, *, collects: bool = True) -> int | None:
        """Bytes that this process takes besides its blocks; None while that is not known.

        Args:
            collects: Whether blocks may be gone that still count. Looking at all takes its time.
        """
        with self._lock:
            if any(not transfer.is_write for transfer in self._transfers.values() if transfer.started):
                return None
            if collects:
                self._collect()
            return pages.resident() - self.used

    def settle(self) -> None:
        """Wait until nothing is moved any more.

        Raises:
            CarmeRuntimeError: The disk failed.
        """
        with self._lock:
            for transfer in [*self._urgent, *self._ahead]:
                if not transfer.started:
                    self._cancel(transfer)
            begin = time.perf_counter()
            while self._transfers:
                self._done.wait()
            self.waited += time.perf_counter() - begin
            self._raise_failure()

    def close(self) -> None:
        """End the threads, and give the disk its room back."""
        with self._lock:
            for transfer in [*self._urgent, *self._ahead]:
                if not transfer.started:
                    self._cancel(transfer)
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self.file.close()

    # With the lock

    def _is_ready(self, blocks: Iterable[Block], room: int) -> bool:
        """Whether blocks are in memory and there is as much room."""
        return self.used + room <= self.capacity and all(block.state is State.PRESENT for block in blocks)

    def _bring(self, blocks: Sequence[Block], changed: set[Block], room: int, wished_room: int) -> None:
        self._reserved = room  # nothing that is fetched ahead may take it
        for block in blocks:
            transfer = self._transfers.get(block)
            if block.state is State.LEAVING and transfer and not transfer.started:
                self._cancel(transfer)
            elif block.state is State.ARRIVING and transfer in self._ahead:
                self._ahead.remove(transfer)
                self._urgent.appendleft(transfer)
            elif block.state is State.ABSENT:
                self.surprises += 1
                self._queue(block, is_write=False, queue=self._urgent)
        if self._urgent:
            self._work.notify_all()
        for wanted, must in ((wished_room, False), (room, True)):
            while self._short_of(blocks, wanted):
                if not self._gain(blocks, wanted):
                    if must:
                        raise DoesNotFit
                    break
                self._raise_failure()
        # What is being written can be read meanwhile, but not changed.
        while any(
            block.state is not State.PRESENT and (block.state is not State.LEAVING or block in changed)
            for block in blocks
        ):
            self._done.wait()
            self._raise_failure()

    def _short_of(self, blocks: Iterable[Block], room: int) -> int:
        """Bytes that are missing for these blocks and as much room."""
        coming = sum(
            block.size
            for block in blocks
            if block.state is State.ARRIVING and not self._transfers[block].started
        )
        return max(self.used + coming + room - self.capacity, 0)

    def _gain(self, blocks: Sequence[Block], room: int) -> bool:
        """Take a step towards more room. False when there is none that could be gained."""
        short = self._short_of(blocks, room)
        leaving = sum(t.block.size for t in self._transfers.values() if t.is_write and not t.block.pins)
        if leaving < short:
            if self._collect():
                return True
            victim = self._victim(short - leaving)
            if victim is not None:
                self.surprises += 1
                self._let_leave(victim, self._urgent)
                return True
            arriving = [t for t in self._transfers.values() if not t.is_write and not t.block.pins]
            for transfer in arriving:
                if not transfer.started:
                    self._cancel(transfer)
                    self.surprises += 1  # the plan is to be examined again
            if not leaving and not any(transfer.started for transfer in arriving):
                return False
        # What leaves ahead of need is needed now.
        for transfer in [each for each in self._ahead if each.is_write]:
            self._ahead.remove(transfer)
            self._urgent.append(transfer)
        self._work.notify_all()
        self._done.wait()
        return True

    def _victim(self, needed: int) -> Block | None:
        """What leaves next, where so many bytes have to become free."""
        candidates = [
            block for block in self.blocks.values() if block.state is State.PRESENT and not block.pins
        ]
        return leaves_first(candidates, self._distance, needed, self.file)

    def _let_leave(self, block: Block, queue: deque[Transfer]) -> None:
        if block.dirty:
            if block.offset is None:
                block.offset = self.file.take(block.size)
            self._queue(block, is_write=True, queue=queue)
        elif (hold := block.owner.hold()) is not None:
            self._drop(block)
            del hold

    def _drop(self, block: Block) -> None:
        pages.drop(block.address, block.size)
        block.state = State.ABSENT
        self.used -= block.size
        self._see_room()

    def _see_room(self) -> None:
        """There is more of it, which what waits to be read may take."""
        if self._urgent or self._ahead:
            self._work.notify_all()

    def _queue(self, block: Block, *, is_write: bool, queue: deque[Transfer]) -> None:
        hold = block.owner.hold()
        if hold is None:
            return  # it is gone, and collected at the next occasion
        block.state = State.LEAVING if is_write else State.ARRIVING
        transfer = Transfer(block, is_write, block.version, hold=hold)
        self._transfers[block] = transfer
        if queue is self._urgent and not is_write:
            queue.appendleft(transfer)  # the trainer waits for it; a write only makes room
        else:
            queue.append(transfer)
        self._work.notify_all()

    def _cancel(self, transfer: Transfer) -> None:
        """Take back what no thread has begun."""
        for queue in (self._urgent, self._ahead):
            if transfer in queue:
                queue.remove(transfer)
        del self._transfers[transfer.block]
        transfer.block.state = State.PRESENT if transfer.is_write else State.ABSENT

    def _collect(self, blocks: Iterable[Block] | None = None) -> list[Block]:
        """Forget those of these blocks, or of all, whose owners are gone.

        Also those that only a queued transfer held: nothing may move memory that is free.
        """
        self._holds.clear()
        for transfer in self._transfers.values():
            if not transfer.started:
                transfer.hold = None
                transfer.hold = transfer.block.owner.hold()
        if blocks is None:
            looked_at = self.blocks.values()
        else:
            unheld = (each.block for each in self._transfers.values() if each.hold is None)
            looked_at = dict.fromkeys((*blocks, *unheld))
        dead = [block for block in looked_at if block.owner.expired()]
        gone = []
        for block in dead:
            transfer = self._transfers.get(block)
            if transfer is not None:
                if transfer.started:
                    continue  # the thread that moves it lets it go first
                self._cancel(transfer)
            self._remove(block.key, block)
            gone.append(block)
        return gone

    def _remove(self, key: int, block: Block) -> None:
        del self.blocks[key]
        if block.state is State.PRESENT:
            self.used -= block.size
            self._see_room()
        if block.offset is not None:
            self.file.give(block.offset, block.size)
        block.is_forgotten = True
        self._forgotten.append(block)
        block.owner.forget()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self.file.broken(self._error)

    # In the threads

    def _move(self) -> None:
        while True:
            with self._lock:
                while (piece := self._next_piece()) is None:
                    if self._closing:
                        return
                    self._work.wait()
            transfer, start, length = piece
            block = transfer.block
            assert block.offset is not None
            try:
                move = self.file.write if transfer.is_write else self.file.read
                move(block.address + start, length, block.offset + start)
            except OSError as error:
                transfer.error = error
            with self._lock:
                transfer.moving -= 1
                self._writing -= transfer.is_write
                if not transfer.moving and (transfer.error or transfer.handed_out == block.size):
                    self._complete(transfer)
                    self._done.notify_all()
                    self._see_room()

    def _next_piece(self) -> tuple[Transfer, int, int] | None:
        for queue in (self._urgent, self._ahead):
            for transfer in list(queue):
                if transfer.is_write and queue is self._ahead and self._writing >= _WRITING:
                    continue
                if not transfer.started and not self._start(transfer, queue is self._urgent):
                    continue
                start = transfer.handed_out
                length = min(PIECE, transfer.block.size - start)
                transfer.handed_out += length
                transfer.moving += 1
                self._writing += transfer.is_write
                if transfer.handed_out == transfer.block.size:
                    queue.remove(transfer)
                return transfer, start, length
        return None

    def _start(self, transfer: Transfer, urgent: bool) -> bool:
        size = transfer.block.size
        if not transfer.is_write and self.used + size + (0 if urgent else self._reserved) > self.capacity:
            return False
        transfer.started = True
        transfer.version = transfer.block.version
        if not transfer.is_write:
            pages.open_again(transfer.block.address, size)
            self.used += size
        if not self._moving:
            self._busy_since = time.perf_counter()
        self._moving += 1
        return True

    def _complete(self, transfer: Transfer) -> None:
        block = transfer.block
        self._moving -= 1
        if not self._moving:
            self.busy_seconds += time.perf_counter() - self._busy_since
        for queue in (self._urgent, self._ahead):
            if transfer in queue:  # it failed before all of it was handed out
                queue.remove(transfer)
        del self._transfers[block]
        if transfer.error is not None:
            self._error = self._error or transfer.error
            block.state = State.PRESENT
            if not transfer.is_write:
                self._drop(block)
        elif transfer.is_write:
            self.written += block.size
            block.saved = transfer.version
            block.state = State.PRESENT
            if not block.pins and not block.dirty:
                self._drop(block)
        else:
            self.read += block.size
            block.saved = block.version
            block.state = State.PRESENT
        self._holds.append(transfer.hold)
