"""Training in less memory than it needs."""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core import escapes, keras_scripts, late_compiler, pages, spill, watch
from carme_runtime.out_of_core.blocks import Block, State, measured_rates
from carme_runtime.out_of_core.called_models import CalledModels
from carme_runtime.out_of_core.during_backward import NOT_REQUESTED, ON_GPU, StepDuringBackward
from carme_runtime.out_of_core.limits import Limit
from carme_runtime.out_of_core.optimizers import parameter_by_parameter
from carme_runtime.out_of_core.plan import Plan, Recomputed
from carme_runtime.out_of_core.recomputing import NOT_REQUESTED as NOTHING_AGAIN
from carme_runtime.out_of_core.recomputing import ON_GPU as NOT_ON_GPU
from carme_runtime.out_of_core.recomputing import Recomputing
from carme_runtime.out_of_core.sizes import parse_size, show_size
from carme_runtime.out_of_core.steps import Steps
from carme_runtime.out_of_core.store import Store
from carme_runtime.out_of_core.trace import DoesNotFit

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
# How many tensors as large as a parameter an optimizer's operation takes at a time.
_OF_SGD, _OF_OTHERS = 2, 3
_FIRST_STEPS = 3  # They use code that later ones do not, such as what loads and what looks at shapes.
_OTHERS_STEPS = 16  # An optimizer that steps so often while the one whose steps count does not takes over.
_OF_COMPILER = 80 << 20  # bytes that PyTorch's compiler takes, about, when a program loads it
_OF_STAGES = (
    "--recompute changes nothing for stages of a pipeline. Its plan says which of them compute their forward "
    "passes again."
)
_active: "Budget | None" = None


class Budget:
    """What a process may take of memory, and where the rest goes; see `carme_runtime.memory`."""

    place, overhead = "the disk", "Python, libraries and your data"  # what plans say
    both_ways = False  # reading takes the disk from writing

    def __init__(self, limit: int | str, folder: str | os.PathLike[str]) -> None:
        self._size = parse_size(limit)
        self._folder = folder
        self._optimizer: Callable[[], Any] = lambda: None  # whose steps end the program's; None: gone
        self._other_steps: Counter[int] = Counter()  # of other optimizers since then, by their ids
        self._model: torch.nn.Module | None = None
        self._stack = contextlib.ExitStack()
        self._operations: watch.Operations | None = None
        self._steps = Steps()
        self._early: StepDuringBackward | None = None
        self._recomputing: Recomputing | None = None
        self._called: CalledModels | None = None
        self._report: Callable[[Recomputed | str], None] = lambda _: None

    def __enter__(self) -> "Budget":
        """Begin; what this thread makes from now on can leave memory.

        Raises:
            CarmeRuntimeError: The limit is too small, the folder cannot be used, or a budget holds already.
        """
        global _active
        if _active is not None:
            raise CarmeRuntimeError(
                "A memory limit is in force already.", "Use one `with carme_runtime.memory(...)` at a time."
            )
        with contextlib.ExitStack() as stack:
            self._begin(stack)
            self._stack = stack.pop_all()
        _active = self
        keras_scripts.follow(self)
        return self

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Set up what sees the operations; `stack` takes it away again."""
        late_compiler.load_late(_make_room_for_compiler)
        if pages.avoid_huge_pages():
            stack.callback(pages.allow_huge_pages)
        stack.callback(pages.free, taken := _take_blocks_from_malloc())
        limit = Limit(self._size)
        file = spill.SpillFile(self._folder)
        store = Store(file, self._steps.distance)
        stack.callback(store.close)
        file.measure()
        limit.check(store, anew=True)
        self._operations = operations = watch.Operations(store, self._steps, limit)
        operations.taken = taken
        stack.callback(self._restore)
        stack.enter_context(_storages_written_by(operations))
        stack.callback(register_optimizer_step_pre_hook(parameter_by_parameter).remove)
        stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
        stack.enter_context(escapes.accesses_have_memory(operations))
        stack.enter_context(operations)

    def __exit__(self, *error: object) -> None:
        """Bring back what fits; what does not is gone, and a warning says so."""
        global _active
        _active = None
        keras_scripts.follow(None)
        self._as_ever()
        self._stack.close()

    def adopt(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        step_during_backward: bool = False,
        recompute: bool = False,
    ) -> tuple[Model, Optimizer]:
        """Take on a model and its optimizer, wherever they were made.

        What was made before the limit began moves to memory that can leave. The optimizer's step then works
        on one parameter at a time, and its end is the end of a step.

        Args:
            model: Any module.
            optimizer: Any optimizer of the model's parameters.
            step_during_backward: Whether each parameter may be stepped as soon as its gradient is made, which
                is gone then. The results are the same, and less is moved. For scripts that use gradients for
                nothing else: where the first step shows another use, such as clipping, steps are as ever, and
                `plan()` says why. A later use is refused with a sentence.
            recompute: Whether layers in a row (`Sequential`, `ModuleList`) may compute their forward passes
                again in the backward pass, where the disk would take longer for what they leave. The results
                are the same. For layers whose forward passes do nothing else, such as counting their calls.

        Returns:
            Both, the same objects.

        Raises:
            CarmeRuntimeError: The limit is too small for the largest parameter, or the disk is full.
        """
        operations = self._working()
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        tensors += [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        self._move(operations, tensors)
        self._model, self._optimizer = model, weakref.ref(optimizer)
        operations.limit.check(operations.store, anew=True)
        largest = max((each.untyped_storage().nbytes() for each in model.parameters()), default=0)
        needed = largest * (_OF_SGD if type(optimizer) is torch.optim.SGD else _OF_OTHERS)
        if needed > operations.store.capacity:
            raise operations.limit.too_small(needed, "the optimizer's step for the largest parameter")
        self._as_ever()
        if step_during_backward and operations.device_type == "cpu":
            self._early = StepDuringBackward(optimizer, operations)
        if recompute and operations.device_type == "cpu":
            self._recomputing = Recomputing(operations)
            self._recomputing.add(model)
        return model, optimizer

    def recompute_called(self, report: Callable[[Recomputed | str], None]) -> None:
        """`adopt(..., recompute=True)` for scripts that know nothing of it.

        It is for the models that are trained in the first step.

        Args:
            report: Called with what was chosen, or with a sentence that says why nothing is.
        """
        self._report = report
        self._recomputing = Recomputing(self._working(), report)
        self._called = CalledModels(self._recomputing.add)

    def leave_recomputation(self) -> None:
        """Somebody else chooses what is computed again; nothing where `recompute_called` was not called."""
        if self._called is not None:
            self._as_ever()
            self._report(_OF_STAGES)

    def _as_ever(self) -> None:
        """Let backward and forward passes be those of the script."""
        if self._early is not None:
            self._early.close()
            self._early = None
        if self._called is not None:
            self._called.close()
            self._called = None
        if self._recomputing is not None:
            self._recomputing.close()
            self._recomputing = None

    def _late_step(self) -> str:
        """Why the optimizer's step does not run during the backward pass; empty: it does."""
        if self._working().device_type != "cpu":
            return ON_GPU
        return self._early.reason if self._early else NOT_REQUESTED

    def _recomputed(self) -> Recomputed:
        if self._recomputing is not None:
            return self._recomputing.found
        on_host = self._working().device_type == "cpu"
        return Recomputed(reason=NOTHING_AGAIN if on_host else NOT_ON_GPU)

    def _move(self, operations: watch.Operations, tensors: list[torch.Tensor]) -> None:
        """Let the tensors of a model and its optimizer lie in memory that can leave."""
        if any(tensor.is_cuda for tensor in tensors):
            raise CarmeRuntimeError(
                "The model is on a GPU, and the limit is one of the host's memory.",
                "Use carme_runtime.memory(limit, device='cuda') to limit the GPU's.",
            )
        _move(operations, tensors)

    def plan(self) -> Plan:
        """What a step costs, by the last step that was recorded.

        Raises:
            CarmeRuntimeError: No step has ended yet, or it could not be planned.
        """
        operations = self._working()
        trace, store, limit = self._steps.trace, operations.store, operations.limit
        if trace is None:
            raise CarmeRuntimeError(
                "No step has been recorded yet, so its cost is not known.",
                "Call plan() after the first optimizer.step().",
            )
        read_rate, write_rate = measured_rates(store)
        try:
            traffic = trace.traffic(store.capacity, write_rate, read_rate)
            order = self._steps.order_of(trace)
            room = min(order.room, store.capacity) if order else store.capacity
            predicted = trace.traffic(room, write_rate, read_rate, max(store.capacity - room, 0))
        except DoesNotFit:
            raise limit.too_small(trace.least, "an operation") from None
        except Exception as error:
            raise CarmeRuntimeError(
                f"What a step moves could not be planned: {type(error).__name__}: {error}.",
                "Train without plan(): it is a prediction, on which no step depends.",
            ) from error
        return Plan(
            limit=limit.size,
            least=limit.least(trace.least),
            outside=limit.size - store.capacity,
            room=store.capacity,
            whole=trace.whole,
            blocks=self._blocks_by_kind(trace),
            read=traffic.read,
            written=traffic.written,
            read_rate=read_rate,
            write_rate=write_rate,
            compute_seconds=trace.seconds,
            seconds=predicted.seconds,
            measured_seconds=self._steps.seconds,
            measured_read=self._steps.moved[0],
            measured_written=self._steps.moved[1],
            place=self.place,
            overhead=self.overhead,
            both_ways=self.both_ways,
            late_step=self._late_step(),
            recomputed=self._recomputed(),
        )

    def _blocks_by_kind(self, trace: Any) -> dict[str, int]:
        kinds: dict[str, int] = {"weights": 0, "gradients": 0, "optimizer": 0, "activations": 0}
        seen: set[tuple[str, int]] = set()
        parameters = list(self._model.parameters()) if self._model else []
        states = getattr(self._optimizer(), "state", {})  # Keras' optimizers have none
        for kind, tensors in (
            ("weights", [*parameters, *(self._model.buffers() if self._model else ())]),
            ("gradients", parameters),
            ("optimizer", [v for s in states.values() for v in s.values() if isinstance(v, torch.Tensor)]),
        ):
            for tensor in tensors:
                size, key = tensor.untyped_storage().nbytes(), (kind, tensor.untyped_storage()._cdata)
                needs = kind != "gradients" or tensor.requires_grad
                if key not in seen and needs and size >= watch.SMALLEST_BLOCK:
                    seen.add(key)
                    kinds[kind] += size
        kinds["activations"] = max(trace.whole - sum(kinds.values()), 0)
        return kinds

    def _working(self) -> watch.Operations:
        if _active is not self or self._operations is None:
            raise CarmeRuntimeError(
                "The memory limit is not in force.", "Use it in `with carme_runtime.memory(...) as budget:`."
            )
        return self._operations

    def end_step(self, optimizer: Any) -> None:
        """An optimizer that is none of PyTorch's has ended its step."""
        self._end_step(optimizer, (), {})

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._operations is None or not self._ends_steps(optimizer):
            return
        self._other_steps.clear()
        self._operations.end_step()
        store = self._operations.store
        self._steps.end_step(store.read, store.written)
        store.end_step()
        if not self._steps.followed and self._steps.count <= _FIRST_STEPS:
            self._operations.end_first_step()
        if self._called is not None:
            self._called.close()
        if self._recomputing is not None:
            read_rate, write_rate = measured_rates(store)
            self._recomputing.end_step(self._steps.trace, store.capacity, write_rate, read_rate)

    def _ends_steps(self, optimizer: Any) -> bool:
        """Whether an optimizer's step is the end of one of the program's.

        With several optimizers, such as those of a GAN, it is the first one's or the adopted one's. Another
        takes over when that one is gone, as after `compile()`, or seems to be used no longer: the other has
        stepped often, and more has run than in the whole step that was recorded last.
        """
        leader = self._optimizer()
        if leader is not None and leader is not optimizer:
            self._other_steps[id(optimizer)] += 1
            length = len(self._steps.trace) if self._steps.trace is not None else 0
            if self._other_steps[id(optimizer)] < _OTHERS_STEPS or self._steps.position < length:
                return False
        self._optimizer = weakref.ref(optimizer)
        return True

    def _restore(self) -> None:
        """What fits comes back; the rest has no memory any more, so that its use is an error."""
        assert self._operations is not None
        store, lost = self._operations.store, 0
        store.settle()
        store.collect()
        held: list[tuple[Any, Block]] = [(block.owner.hold(), block) for block in store.blocks.values()]
        absent = [each for each in held if each[0] is not None and each[1].state is not State.PRESENT]
        # A storage that an array was made of keeps its size, so it comes first. Where it does not fit it
        # stays closed: an access to it ends the process. Zeros in it would be worse.
        for storage, block in sorted(absent, key=lambda each: (each[0].resizable(), each[1].size)):
            if store.used + block.size <= store.capacity:
                store.acquire([block], [], 0)
                continue
            lost += block.size
            if storage.resizable():
                pages.open_again(block.address, block.size)
                storage.resize_(0)
        if lost:
            warnings.warn(
                f"{show_size(lost)} of tensors do not fit into the memory limit and are gone now that it "
                "ends. Save what you need inside of `with carme_runtime.memory(...)`.",
                stacklevel=4,
            )


def limits_host() -> bool:
    """See `carme_runtime.out_of_core`."""
    operations = _active and _active._operations
    return operations is not None and operations.device_type == "cpu"


def leave_recomputation() -> None:
    """See `carme_runtime.out_of_core`."""
    if _active is not None:
        _active.leave_recomputation()


def room_of_host() -> tuple[int, float, float]:
    """The fields of `carme_runtime.out_of_core.HostRoom`, for the limit that is in force."""
    assert _active is not None and _active._operations is not None
    store = _active._operations.store
    return store.capacity, store.file.read_rate, store.file.write_rate


def seconds_waited() -> float:
    """See `carme_runtime.out_of_core`, for the limit that is in force."""
    assert _active is not None and _active._operations is not None
    return _active._operations.store.waited


def _make_room_for_compiler() -> None:
    """It loads now. Only a thread whose operations are seen may move blocks for it."""
    operations = _active and _active._operations
    if operations and operations.device_type == "cpu" and operations.sees_this_thread():
        operations.store.make_room(_OF_COMPILER)


def _before_fork() -> None:
    """A child gets no copies of the blocks: they would stay in memory for it when they leave."""
    if _active is not None and _active._operations is not None:
        _active._operations.store.before_fork()


def _after_fork() -> None:
    if _active is not None and _active._operations is not None:
        _active._operations.store.after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


def _move(operations: watch.Operations, tensors: list[torch.Tensor]) -> None:
    """Let the tensors lie in memory that can leave; those that share memory still do afterwards."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    tensors.clear()
    while sharing:
        key, group = sharing.popitem()
        storage = group[0].untyped_storage()
        if key in operations.store.blocks or storage.nbytes() < watch.SMALLEST_BLOCK:
            continue
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]
        moved = whole.clone().untyped_storage()
        with torch.no_grad():
            for tensor in group:
                offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(moved, offset, shape, stride)  # pyright: ignore
        del whole, storage, moved, group


@contextlib.contextmanager
def _storages_written_by(operations: watch.Operations) -> Iterator[None]:
    writer = torch._C.PyTorchFileWriter
    kind: Any = type("PyTorchFileWriter", (escapes.FileWriter,), {"operations": operations})
    torch._C.PyTorchFileWriter = kind
    try:
        yield
    finally:
        torch._C.PyTorchFileWriter = writer


def _take_blocks_from_malloc() -> list[int]:
    """Let new blocks be mappings of their own. Returns what `pages.free` has to free afterwards."""
    if pages.map_large_blocks(watch.SMALLEST_BLOCK):
        taken = pages.fill_heap(watch.SMALLEST_BLOCK)
        probe = torch.empty(1 << 20, dtype=torch.uint8).untyped_storage()
        if pages.is_mapping(probe.data_ptr(), probe.nbytes()):
            return taken
        pages.free(taken)
    raise CarmeRuntimeError(
        "Tensors of this process cannot leave memory, because its allocator is not glibc's.",
        "Unset LD_PRELOAD, or use a PyTorch that was built for glibc.",
    )
