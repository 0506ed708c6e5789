"""The blocks of a GPU: which are in its memory, and which wait in pinned memory of the host.

Nobody waits here but the GPU itself: copies run on streams of their own, beside the kernels, and the stream
of the program waits for a copy where it needs what that brings, or the memory that it sets free.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportPrivateUsage=false

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from carme_runtime.out_of_core.blocks import Block, State, leaves_first
from carme_runtime.out_of_core.gpu_spares import Spares
from carme_runtime.out_of_core.trace import DoesNotFit

_next_use = attrgetter("next_use")
_PROBE, _PROBES = 64 << 20, 4  # bytes that are copied to see how fast the link is, and how often


@dataclass
class Link:
    """How fast the GPU and the host exchange pinned memory, in bytes in a second."""

    read_rate: float
    write_rate: float


@dataclass
class _Copy:
    """A copy that has been queued on a stream."""

    over: "torch.cuda.Event"
    hold: object | None  # keeps the memory from others until the copy is over


class GpuStore:
    """Keeps the blocks in the GPU's memory below `capacity` bytes; called as `Store` is.

    Args:
        device: The GPU.
        distance: How far a block's next use is; the farthest leaves first.
    """

    def __init__(self, device: torch.device, distance: Callable[[Block], float]) -> None:
        self.device = device
        self.capacity = self.used = 0
        self.blocks: dict[int, Block] = {}  # by what identifies their owners
        self.read = self.written = 0  # bytes, ever
        self.busy_seconds = 0.0  # not measured: the plan then takes the link's own speed
        self.absent: dict[Block, None] = {}  # those whose content the host alone has
        self._distance = distance
        self._twins: dict[Block, torch.Tensor] = {}  # what the host has
        self._spares: Spares[torch.Tensor, torch.cuda.Event] = Spares()  # of blocks that are gone
        self._unused: dict[Block, None] = {}  # what has been fetched ahead, and not been used yet
        self._leaving: dict[Block, _Copy] = {}  # in their order, as are
        self._arriving: dict[Block, _Copy] = {}
        self._copied: dict[Block, torch.cuda.Event] = {}  # the last copy to the host of each
        self._read: dict[Block, torch.cuda.Event] = {}  # and the last one from it
        self._forgotten: list[Block] = []
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.file = self._measured()

    def _measured(self) -> Link:
        on_device = torch.empty(_PROBE, dtype=torch.uint8, device=self.device)
        in_host = torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True)
        rates = []
        for source, target in ((in_host, on_device), (on_device, in_host)):
            seconds = []
            for _ in range(_PROBES):
                torch.cuda.synchronize(self.device)
                began = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - began)
            rates.append(_PROBE / min(seconds))
        return Link(*rates)

    # What an operation asks for

    def acquire(
        self, blocks: Sequence[Block], writes: Iterable[Block], room: int, wished_room: int = 0
    ) -> None:
        """Have blocks in memory for what is launched next, until `release`; see `Store.acquire`.

        Raises:
            DoesNotFit: It is more than the capacity.
        """
        changed = set(writes)
        for block in blocks:
            block.pins += 1
        is_present = all(block.state is State.PRESENT for block in blocks)
        if is_present and self.used + max(room, wished_room) <= self.capacity:
            for block in blocks:
                self._unused.pop(block, None)
        else:
            try:
                with _disable_current_modes():
                    self._bring(blocks, room, wished_room)
            except BaseException:
                self.release(blocks)
                raise
        for block in changed:
            block.version += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """The operation has been launched."""
        for block in blocks:
            block.pins -= 1

    def show(self, block: Block) -> None:
        """Let a block have memory, so that views can be made of it; what is in it may still be under way."""
        if block.state is State.ABSENT:
            block.pins += 1
            try:
                with _disable_current_modes():
                    self._make_room(block.size)
                    self._fetch(block)
            finally:
                block.pins -= 1

    def add(self, key: int, block: Block) -> None:
        """A new block, in memory."""
        self.blocks[key] = block
        self.used += block.size

    def collect(self) -> list[Block]:
        """Forget blocks whose owners are gone. Returns all that were forgotten since the last call."""
        self._collect()
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def collect_of(self, blocks: Iterable[Block]) -> list[Block]:
        """The same, but look at these alone: it takes its time to look at all."""
        dead = {block for block in blocks if not block.is_forgotten and block.owner.expired()}
        if dead:
            for key in [key for key, block in self.blocks.items() if block in dead]:
                self._remove(key, self.blocks[key])
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def remove(self, key: int) -> None:
        """A block that is not to be moved any more, although its owner is there."""
        self._remove(key, self.blocks[key])

    def pin_for_step(self, block: Block) -> None:
        """Keep a block in memory until `end_step`."""
        block.pins += 1
        block.step_pins += 1

    def end_step(self) -> None:
        """Let go what was kept until the step's end, and memory of the host that no block needed in it."""
        self._collect()
        self._spares.end_step()
        for block in self.blocks.values():
            block.pins -= block.step_pins
            block.step_pins = 0

    def unpin(self, block: Block) -> None:
        """Take a pin away, of whatever origin."""
        block.pins -= 1

    def content(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """What the host has of a block that is absent, or arrives; None for any other storage."""
        block = self.blocks.get(storage._cdata)
        if block is None or block.state not in (State.ABSENT, State.ARRIVING):
            return None
        self._out.synchronize()  # it may have left a moment ago
        return self._twins[block]

    def before_fork(self) -> None:
        """A child has none of the GPU's memory anyhow."""

    def after_fork(self) -> None:
        """Nothing to do, either."""

    # What is done ahead of need

    def unused_bytes(self) -> int:
        """Bytes that have been fetched ahead and are waiting to be used."""
        return sum(block.size for block in self._unused)

    def expected_free(self) -> int:
        """Bytes that are free when all that leaves has left."""
        return self.capacity - self.used + sum(block.size for block in self._leaving if not block.pins)

    def fetch_ahead(self, block: Block) -> bool:
        """Bring a block before it is used, if what leaves makes room for it. Whether it comes."""
        if block.state is not State.ABSENT or block.is_forgotten:
            return False
        with _disable_current_modes():
            for leaving in list(self._leaving):
                if self.used + block.size <= self.capacity:
                    break
                if not leaving.pins:
                    self._leave(leaving)
            if self.used + block.size > self.capacity:
                return False
            self._fetch(block)
            self._unused[block] = None
        return True

    def stay(self, block: Block) -> bool:
        """Let a block stay whose memory has not been given away yet; whether it does."""
        if block.state is State.LEAVING:
            # What changes it while it is copied makes a new version, so that the host's is copied again.
            del self._leaving[block]
            block.state = State.PRESENT
        return block.state is State.PRESENT

    def leave_ahead(self, size: int, now: float, beyond: float) -> int:
        """Let blocks leave that are neither used nor gone by then, `size` bytes or more.

        Args:
            size: Bytes.
            now: The number of the operation that has been launched.
            beyond: As many operations later.

        Returns:
            How many bytes leave.
        """
        gained, until = 0, now + beyond
        with _disable_current_modes():
            while gained < size:
                # What dies soon leaves by itself, and needs no copy.
                victim = max(
                    (
                        block
                        for block in self.blocks.values()
                        if block.state is State.PRESENT and not block.pins and block.next_use > until
                        and block.gone > until
                    ),
                    key=_next_use,
                    default=None,
                )  # fmt: skip
                if victim is None:
                    break
                self._let_leave(victim)
                gained += victim.size
        return gained

    def settle(self) -> None:
        """Wait until nothing is copied any more."""
        torch.cuda.synchronize(self.device)
        for block in list(self._leaving):
            self.stay(block)
        for block in list(self._arriving):
            self._arrive(block)

    def close(self) -> None:
        """Give the host its memory back."""
        torch.cuda.synchronize(self.device)
        self._twins.clear()
        self._spares.clear()

    # Steps

    def _see_what_is_over(self) -> None:
        """What has arrived is present, as anything else; of what has been copied the memory may go."""
        for block, copy in list(self._arriving.items()):
            if copy.over.query():
                del self._arriving[block]
                block.state = State.PRESENT
        for copy in self._leaving.values():
            if copy.hold is not None and copy.over.query():
                copy.hold = None

    def _bring(self, blocks: Sequence[Block], room: int, wished_room: int) -> None:
        for block in blocks:
            self._unused.pop(block, None)
            self.stay(block)
        missing = [block for block in blocks if block.state is State.ABSENT]
        size = sum(block.size for block in missing)
        try:
            self._make_room(size + max(room, wished_room))
        except DoesNotFit:
            self._make_room(size + room)
        for block in missing:
            self._fetch(block)
        for block in blocks:
            if block.state is State.ARRIVING:
                self._arrive(block)

    def _make_room(self, size: int) -> None:
        while self.used + size > self.capacity:
            if self._collect():
                continue
            leaving = next((block for block in self._leaving if not block.pins), None)
            if leaving is not None:
                self._leave(leaving)
                continue
            victim = self._victim(self.used + size - self.capacity)
            if victim is not None:
                self._let_leave(victim)
                continue
            arriving = next((block for block in self._arriving if not block.pins), None)
            if arriving is None:
                raise DoesNotFit
            self._arrive(arriving)

    def _victim(self, needed: int) -> Block | None:
        """What leaves next, where so many bytes have to become free."""
        candidates = [b for b in self.blocks.values() if b.state is State.PRESENT and not b.pins]
        return leaves_first(candidates, self._distance, needed, self.file)

    def _let_leave(self, block: Block) -> None:
        """Begin to copy a block to the host, or give its memory away at once where the host has it."""
        storage: Any = block.owner.hold()
        if storage is None:
            self._collect()
            return
        if not block.dirty:
            self._drop(block, storage)
            return
        self._give_twin(block)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            self._twins[block].copy_(_bytes(storage, self.device), non_blocking=True)
            over = torch.cuda.Event()
            over.record(self._out)
        self._copied[block] = over
        self.written += block.size
        block.saved, block.state = block.version, State.LEAVING
        self._leaving[block] = _Copy(over, storage)

    def _give_twin(self, block: Block) -> None:
        """Memory of the host for a block, if it has none yet."""
        if block in self._twins:
            return
        if spare := self._spares.take(block.size):
            twin, over = spare
            if over is not None:
                self._out.wait_event(over)
        else:
            twin = torch.empty(block.size, dtype=torch.uint8, pin_memory=True)
        self._twins[block] = twin

    def _leave(self, block: Block) -> None:
        """Give the memory of a block away that is copied to the host: what is launched from now on waits."""
        copy = self._leaving.pop(block)
        block.state = State.PRESENT
        storage: Any = copy.hold if copy.hold is not None else block.owner.hold()
        copy.hold = None
        if storage is not None:
            self._drop(block, storage)

    def _drop(self, block: Block, storage: Any) -> None:
        # Whatever has happened to the block since, as a block that stays may still be copied.
        if over := self._copied.get(block):
            torch.cuda.current_stream(self.device).wait_event(over)
        storage.resize_(0)
        block.state = State.ABSENT
        self.absent[block] = None
        self._unused.pop(block, None)
        self.used -= block.size

    def _fetch(self, block: Block) -> None:
        """Begin to copy a block from the host. There is room for it."""
        storage: Any = block.owner.hold()
        if storage is None:
            return
        storage.resize_(block.size)
        self.used += block.size
        # Kernels that were launched before may still use the memory for something else.
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        # The stream that is current now need not be the one that waited when the memory was given away.
        if left := self._copied.get(block):
            self._in.wait_event(left)
        with torch.cuda.stream(self._in):
            _bytes(storage, self.device).copy_(self._twins[block], non_blocking=True)
            over = torch.cuda.Event()
            over.record(self._in)
        self.read += block.size
        del self.absent[block]
        self._read[block] = over
        block.saved, block.state = block.version, State.ARRIVING
        self._arriving[block] = _Copy(over, storage)

    def _arrive(self, block: Block) -> None:
        """What is launched from now on finds the block."""
        torch.cuda.current_stream(self.device).wait_event(self._arriving.pop(block).over)
        block.state = State.PRESENT

    def _collect(self) -> list[Block]:
        self._see_what_is_over()
        dead = [(key, block) for key, block in self.blocks.items() if block.owner.expired()]
        for key, block in dead:
            self._remove(key, block)
        return [block for _, block in dead]

    def _remove(self, key: int, block: Block) -> None:
        del self.blocks[key]
        if block.state is not State.ABSENT:
            self.used -= block.size
        self._leaving.pop(block, None)
        self._arriving.pop(block, None)
        self.absent.pop(block, None)
        self._unused.pop(block, None)
        self._copied.pop(block, None)  # the next copy to the same memory is one of the same stream
        read = self._read.pop(block, None)
        if (twin := self._twins.pop(block, None)) is not None:
            self._spares.add(block.size, twin, read)
        block.is_forgotten = True
        self._forgotten.append(block)
        block.owner.forget()


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore
