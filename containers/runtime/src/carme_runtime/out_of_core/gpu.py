"""Training in less GPU memory than it needs: what does not fit waits in the memory of the host."""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportPrivateUsage=false
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core import escapes, watch
from carme_runtime.out_of_core.blocks import Block, State
from carme_runtime.out_of_core.budget import Budget
from carme_runtime.out_of_core.gpu_ahead import Ahead
from carme_runtime.out_of_core.gpu_store import GpuStore
from carme_runtime.out_of_core.optimizers import parameter_by_parameter
from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.out_of_core.trace import Operation

_MARGIN = 1 / 32  # of the limit, for what an operation takes beyond what is known of it
_LEAST_MARGIN = 16 << 20
_EVERY = 32  # operations between two looks, when a step goes as the last one went
_ROUND = 1 << 20
_GROWTH = 1.06
_OTHER_DEVICE = (
    "Use memory(..., device='cuda') for tensors on a GPU, or leave device out for those on the host."
)


class GpuLimit:
    """The limit of a GPU's memory that PyTorch's tensors take.

    Args:
        size: Bytes that they may take in all.
        device: The GPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.outside = size, 0
        self._device, self._checks = device, 0
        self._margin = max(int(size * _MARGIN), _LEAST_MARGIN)
        self.peak = 0  # bytes, which the allocator's counter leaves out
        total = torch.cuda.get_device_properties(device).total_memory
        if size > total:
            raise CarmeRuntimeError(
                f"The limit of {show_size(size)} is more than the {show_size(total)} that the GPU has.",
                "Use a smaller limit, or none.",
            )

    def allocated(self) -> int:
        """Bytes of PyTorch's tensors."""
        return torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"]

    def forget_peak(self) -> None:
        """Let the allocator count its peak anew."""
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def check(self, store: GpuStore, *, often: bool = True, anew: bool = False) -> None:
        """Give the store what others leave of the limit; see `Limit.check`."""
        self._checks += 1
        if not often and self._checks % _EVERY:
            return
        store._collect()
        outside = self.allocated() - store.used
        self.outside = outside if anew else max(self.outside, outside)
        store.capacity = max(self.size - self.outside - self._margin, 0)

    def least(self, blocks: int) -> int:
        """The limit that is needed for as many bytes of blocks at a time."""
        return -(-int((blocks + self.outside) / (1 - _MARGIN)) // _ROUND) * _ROUND + _LEAST_MARGIN

    def too_small(self, blocks: int, name: str) -> CarmeRuntimeError:
        """What to say when an operation needs as many bytes of blocks."""
        return CarmeRuntimeError(
            f"The limit of {show_size(self.size)} is too small: {name} needs {show_size(blocks)} of the GPU "
            f"at a time, and {show_size(self.outside)} are taken besides.",
            f"Use {show_size(_GROWTH * self.least(blocks))} or more. Until a step has "
            "ended, a later operation may need more than this one.",
        )


class GpuOperations(watch.Operations):
    """What runs under it finds its GPU tensors in memory; see `Operations`."""

    device_type = "cuda"
    store: GpuStore
    limit: GpuLimit

    def __init__(self, store: GpuStore, steps: Any, limit: GpuLimit) -> None:
        super().__init__(store, steps, limit)  # pyright: ignore[reportArgumentType]
        self._ahead = Ahead(steps, store)
        self._timed_ones: list[tuple[Operation, Any, Any]] = []

    def adopt(self, storage: torch.UntypedStorage) -> Block | None:
        """Make a block of a storage, if it can be one."""
        size = storage.nbytes()
        if size < watch.SMALLEST_BLOCK or storage.device != self.store.device or not storage.resizable():
            return None
        block = Block(watch.Storage(storage), storage.data_ptr(), size, self.steps.new_label())
        self.store.add(storage._cdata, block)
        return block

    def view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A view needs its tensor's memory to be there, whatever is in it."""
        for each in watch.tensors_of(args, kwargs):
            block = self.block_of(each)
            if block is not None:
                self.store.show(block)
        return func(*args, **kwargs)

    def look_ahead(self) -> None:
        """Let blocks leave and come before that is needed."""
        self._ahead.plan_moves()

    def run_timed(self, call: Callable[[], Any], operation: Operation, planned: Operation | None) -> Any:
        """Kernels take their time later: events of the first steps say how long."""
        if planned is not None:
            operation.seconds = planned.seconds
            return call()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        result = call()
        last.record()
        self._timed_ones.append((operation, first, last))
        return result

    def end_step(self) -> None:
        """Look at the times of this step's operations."""
        if self._timed_ones:
            torch.cuda.synchronize(self.store.device)
            for operation, first, last in self._timed_ones:
                operation.seconds = first.elapsed_time(last) / 1000
            self._timed_ones.clear()

    def end_first_step(self) -> None:
        """Libraries take nothing of the GPU's memory that they would not need."""

    def workspace_of(self, func: Any, args: Any, kwargs: Any, result_bytes: int) -> tuple[Any, int]:
        """The result of an operation, and the bytes that it took besides."""
        before = self.limit.allocated()
        self.limit.forget_peak()
        result = func(*args, **kwargs)
        return result, max(torch.cuda.max_memory_allocated(self.store.device) - before - result_bytes, 0)

    def _see_change(self, tensor: torch.Tensor) -> None:
        """A storage that was resized has another size."""
        block, storage = self.block_of(tensor), tensor.untyped_storage()
        if block is not None and storage.nbytes() not in (block.size, 0):
            self.store.remove(storage._cdata)
            self.adopt(storage)


class GpuBudget(Budget):
    """What a process may take of a GPU's memory; see `carme_runtime.memory`."""

    place, overhead = "the link to the host", "small tensors and libraries"
    both_ways = True

    def __init__(self, limit: int | str, device: str | torch.device) -> None:
        super().__init__(limit, ".")
        chosen = torch.device(device)
        if chosen.type != "cuda" or not torch.cuda.is_available():
            raise CarmeRuntimeError(
                f"There is no NVIDIA GPU '{device}' whose memory could be limited.",
                "Leave device out to limit the memory of the host.",
            )
        number = torch.cuda.current_device() if chosen.index is None else chosen.index
        self._device = torch.device("cuda", number)

    @property
    def peak(self) -> int:
        """The most bytes that PyTorch's tensors have taken of the GPU."""
        limit: Any = self._working().limit
        return max(limit.peak, torch.cuda.max_memory_allocated(self._device))

    def _begin(self, stack: contextlib.ExitStack) -> None:
        limit = GpuLimit(self._size, self._device)
        store = GpuStore(self._device, self._steps.distance)
        stack.callback(store.close)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        limit.check(store, anew=True)
        if not store.capacity:
            raise CarmeRuntimeError(
                f"The limit of {show_size(self._size)} is too small: tensors that are there already take "
                f"{show_size(limit.outside)} of the GPU.",
                "Begin the limit before you make the model, or give a larger one.",
            )
        self._operations = operations = GpuOperations(store, self._steps, limit)
        stack.callback(self._restore)
        stack.enter_context(_storages_have_their_sizes(store))
        stack.callback(register_optimizer_step_pre_hook(parameter_by_parameter).remove)
        stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
        stack.enter_context(escapes.accesses_have_memory(operations))
        stack.enter_context(operations)

    def _move(self, operations: Any, tensors: list[torch.Tensor]) -> None:
        """Let the model's tensors, wherever they were made, be blocks; those on the host stay there."""
        if not any(tensor.is_cuda for tensor in tensors):
            raise CarmeRuntimeError("The model is not on the GPU whose memory is limited.", _OTHER_DEVICE)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.is_cuda and storage._cdata not in operations.store.blocks:
                operations.adopt(storage)
        tensors.clear()

    def _restore(self) -> None:
        """All that fits into the GPU comes back; the rest has no memory any more."""
        assert self._operations is not None
        store: Any = self._operations.store
        store.settle()
        store.collect()
        store.capacity, lost = 1 << 62, 0
        for block in sorted(store.blocks.values(), key=lambda block: block.size):
            if block.state is not State.ABSENT:
                continue
            try:
                store.acquire([block], [], 0)
                store.release([block])
            except torch.OutOfMemoryError:
                lost += block.size
        if lost:
            warnings.warn(
                f"{show_size(lost)} of tensors do not fit into the GPU and are gone now that the limit "
                "ends. Save what you need inside of `with carme_runtime.memory(...)`.",
                stacklevel=4,
            )


@contextlib.contextmanager
def _storages_have_their_sizes(store: GpuStore) -> Iterator[None]:
    """A storage without memory has its size, and its bytes, for those who save it."""
    kind: Any = torch.UntypedStorage
    known = {name: getattr(kind, name) for name in ("nbytes", "size", "__len__", "cpu")}

    def sized(name: str) -> Callable[[Any], int]:
        def size(self: Any) -> int:
            content = store.content(self) if self.device.type == "cuda" else None
            return known[name](self) if content is None else content.numel()

        return size

    def cpu(self: Any) -> Any:
        content = store.content(self) if self.device.type == "cuda" else None
        return known["cpu"](self) if content is None else content.clone().untyped_storage()

    own = {name: name in vars(kind) for name in known}
    for name in ("nbytes", "size", "__len__"):
        setattr(kind, name, sized(name))
    kind.cpu = cpu
    try:
        yield
    finally:
        for name, function in known.items():
            if own[name]:
                setattr(kind, name, function)
            else:
                delattr(kind, name)
