"""Sees every operation of PyTorch in a thread, and has its tensors in memory while it runs.

Nothing of the model, the optimizer or the loop has to be known for this: forward, backward, the optimizer's
step and what a program computes besides are all operations, and what autograd saves are their results.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core import pages
from carme_runtime.out_of_core.blocks import Block
from carme_runtime.out_of_core.limits import Limit
from carme_runtime.out_of_core.steps import Steps
from carme_runtime.out_of_core.store import Store
from carme_runtime.out_of_core.trace import DoesNotFit, Operation

SMALLEST_BLOCK = 128 << 10  # bytes; smaller tensors stay where they are
_LARGE = 4 << 20  # bytes that an operation touches from which on its workspace is measured
_FILLS = 8  # times that the heap's free parts are taken, at most
_HEAVY = ("convolution", "mm", "linear", "lstm", "gru", "rnn", "attention")
# They change what their schema calls an input.
_CHANGED_IN_SECRET = {"running_mean", "running_var"}


class Storage:
    """The owner of a block."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak: Any = storage._weak_ref()

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._weak))

    def hold(self) -> object | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._weak)

    def forget(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


class Operations(TorchDispatchMode):
    """What runs under it finds its tensors in memory; what it makes can leave memory.

    Args:
        store: Of the blocks.
        steps: Of the program.
        limit: What the process may take.
    """

    device_type = "cpu"  # of the tensors that can leave

    def __init__(self, store: Store, steps: Steps, limit: Limit) -> None:
        super().__init__()
        self.store, self.steps, self.limit = store, steps, limit
        self._shapes: dict[Any, int] = {}
        self._workspaces: dict[Any, int] = {}
        self._process = os.getpid()
        self._threads = {threading.get_ident()}  # that run operations
        # What is called when an operation takes a tensor in a storage, by the storage's address.
        self.watched: dict[int, Callable[[], None]] = {}
        self.taken: list[int] = []  # by `pages.fill_heap`, so that tensors are mappings of their own
        self._has_holes = False  # of the heap, in which tensors lie
        self._fills = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._process:  # a child's blocks are not this one's
            return func(*args, **kwargs)
        self._threads.add(threading.get_ident())
        if any(issubclass(kind, FakeTensor) for kind in types):  # a model is traced: nothing is computed
            return func(*args, **kwargs)
        facts = _facts(func)
        if facts.is_list:
            return _one_by_one(self._run, func, args, kwargs)
        return self._run(func, args, kwargs)

    def sees_this_thread(self) -> bool:
        """Whether this is a thread of the process whose operations are seen; no other may move blocks."""
        return threading.get_ident() in self._threads and os.getpid() == self._process

    def end_step(self) -> None:
        """A step ends now. Take what the heap has free, if tensors lay in it: these could not leave."""
        if self._has_holes and self._fills < _FILLS:
            self._has_holes = False
            self._fills += 1
            pages.free(self.taken)
            self.taken[:] = pages.fill_heap(SMALLEST_BLOCK)

    def end_first_step(self) -> None:
        """One of the first steps has ended, and used code that later ones do not."""
        self.limit.drop_library_pages()

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lies in; None for what never leaves memory."""
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return None
        return self.store.blocks.get(tensor.untyped_storage()._cdata)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether it is large enough for a block, wherever it lies now."""
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().nbytes() >= SMALLEST_BLOCK

    def adopt(self, storage: torch.UntypedStorage) -> Block | None:
        """Make a block of a storage, if it can be one."""
        size = storage.nbytes()
        address = storage.data_ptr() if size >= SMALLEST_BLOCK else 0
        if not address or storage.device.type != "cpu":
            return None
        if not pages.is_mapping(address, size):
            self._has_holes = True
            return None
        block = Block(Storage(storage), *pages.inner_pages(address, size), self.steps.new_label())
        self.store.add(storage._cdata, block)
        return block

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = _facts(func)
        if facts.is_view:
            return self.view(func, args, kwargs)
        tensors = tensors_of(args, kwargs)
        if self.watched:
            self._note_use(tensors)
        blocks = {id(each): block for each in tensors if (block := self.block_of(each)) is not None}
        uses = list(dict.fromkeys(blocks.values()))
        # What cannot leave memory in this step may in another: steps have the same operations all the same.
        if not uses and facts.makes_nothing and not any(map(self._may_leave, tensors)):
            return func(*args, **kwargs)
        changed = facts.changed(args, kwargs)
        written = [blocks[id(each)] for each in changed if id(each) in blocks]
        self.steps.look_for_gone(self.store)
        planned = self.steps.begin(facts.name, uses)
        self.limit.check(self.store, often=planned is None)
        operation = Operation(
            facts.name, tuple(block.label for block in uses), tuple({block.label for block in written})
        )
        if planned is None:
            key = _key(facts.name, args, kwargs)
            call = functools.partial(self._measured, func, args, kwargs, key, operation)
            expected = self._expected(key, func, args, kwargs, tensors)
            room = expected + self._workspaces.get(key, 0)
            # What it takes while it runs shows afterwards; the kernel does not wait for that.
            guess = expected + sum(map(_bytes, tensors)) if facts.is_heavy else 0
            wished = room if key in self._workspaces else room + guess
        else:
            call = functools.partial(func, *args, **kwargs)
            room = wished = planned.made_bytes + planned.workspace
        needs_something = bool(uses or wished)
        if needs_something:
            try:
                self._acquire(uses, written, room, wished)
            except DoesNotFit:
                raise self._too_small(facts.name, uses, room) from None
        try:
            result = self.run_timed(call, operation, planned)
        finally:
            if needs_something:
                self.store.release(uses)
        new_blocks = [] if facts.makes_nothing else self._new_blocks(result, tensors)
        self.steps.end(operation, planned, new_blocks)
        for each in changed:
            self._see_change(each)
        if facts.stays:
            for block in uses:
                self.store.pin_for_step(block)
        self.look_ahead()
        return result

    def _note_use(self, tensors: Iterable[torch.Tensor]) -> None:
        for each in tensors:
            if each.layout is torch.strided and (note := self.watched.get(each.untyped_storage()._cdata)):
                note()

    def look_ahead(self) -> None:
        """Let blocks come and leave before that is needed."""
        self.steps.look_ahead(self.store)

    def view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run what makes a view."""
        return func(*args, **kwargs)

    def run_timed(self, call: Callable[[], Any], operation: Operation, planned: Operation | None) -> Any:
        """Run an operation, and note how long it takes."""
        begin = time.perf_counter()
        result = call()
        operation.seconds = time.perf_counter() - begin
        return result

    def workspace_of(self, func: Any, args: Any, kwargs: Any, result_bytes: int) -> tuple[Any, int]:
        """The result of an operation, and the bytes that it took besides."""
        self.store.settle()
        before = pages.resident()
        pages.forget_peak()
        result = func(*args, **kwargs)
        return result, max(pages.peak() - before - result_bytes, 0)

    def _acquire(self, uses: Sequence[Block], written: Sequence[Block], room: int, wished: int) -> None:
        try:
            self.store.acquire(uses, written, room, wished)
        except DoesNotFit:
            # What the program took besides at its peak, such as for a file that it wrote, may be free again.
            self.limit.check(self.store, anew=True)
            self.store.acquire(uses, written, room, wished)

    def _too_small(self, name: str, uses: Sequence[Block], room: int) -> CarmeRuntimeError:
        needed = room + sum(block.size for block in uses)
        return self.limit.too_small(needed, f"the operation {name}")

    def _measured(self, func: Any, args: Any, kwargs: Any, key: Any, operation: Operation) -> Any:
        """Run it, and see what it takes besides its tensors."""
        if key not in self._workspaces:
            if sum(map(_bytes, tensors_of(args, kwargs))) + self._shapes.get(key, 0) < _LARGE:
                self._workspaces[key] = 0
            else:
                result_bytes = self._shapes.get(key, 0)
                result, self._workspaces[key] = self.workspace_of(func, args, kwargs, result_bytes)
                operation.workspace = self._workspaces[key]
                return result
        operation.workspace = self._workspaces[key]
        return func(*args, **kwargs)

    def _new_blocks(self, result: Any, tensors: Sequence[torch.Tensor]) -> list[Block]:
        """Blocks of what an operation gave that are not of its arguments."""
        new_blocks: list[Block] = []
        argument_storages: set[int] | None = None
        for place, each in enumerate(tensors_of((result,), {})):
            if each.device.type != self.device_type or each.layout is not torch.strided:
                continue
            storage = each.untyped_storage()
            if storage.nbytes() < SMALLEST_BLOCK or storage._cdata in self.store.blocks:
                continue
            if argument_storages is None:
                argument_storages = {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
            if storage._cdata not in argument_storages and (block := self.adopt(storage)) is not None:
                block.place = place
                new_blocks.append(block)
        return new_blocks

    def _see_change(self, tensor: torch.Tensor) -> None:
        """A storage that was resized has other memory."""
        block = self.block_of(tensor)
        storage = tensor.untyped_storage()
        if block is None or pages.inner_pages(storage.data_ptr(), storage.nbytes()) == (
            block.address,
            block.size,
        ):
            return
        self.store.remove(storage._cdata)
        self.adopt(storage)

    def _expected(self, key: Any, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that an operation will make, as far as its arguments' shapes say it."""
        if _facts(func).makes_nothing:
            return 0
        if key not in self._shapes:
            try:
                shapes = func(*_without_content(args), **_without_content(kwargs | _on_meta(func, kwargs)))
                self._shapes[key] = sum(
                    size for t in tensors_of((shapes,), {}) if (size := _bytes(t)) >= SMALLEST_BLOCK
                )
            except Exception:  # it needs the content: as large as all that it gets
                return sum(_bytes(each) for each in tensors)
        return self._shapes[key]


# By the operation's address: an operation's own hash takes ten times as long.
_known: dict[int, "_Facts"] = {}


class _Facts:
    """What the schema of an operation says."""

    def __init__(self, func: Any) -> None:
        self._func = func  # its address is that of no other then
        schema = func._schema
        self.name = f"{func.namespace}.{func.__name__}" if hasattr(func, "namespace") else str(func)
        base = schema.name.partition("::")[2]
        self.is_list = base.startswith(("_foreach_", "_fused_"))
        self.is_heavy = any(part in base for part in _HEAVY)
        # What other threads go on with when the operation has returned.
        self.stays = schema.name.startswith(("c10d", "_c10d"))
        returned = [each for each in schema.returns if "Tensor" in str(each.type)]
        self.makes_nothing = all(each.alias_info is not None for each in returned)
        aliases = [each.alias_info for each in (*schema.arguments, *schema.returns) if each.alias_info]
        self.is_view = bool(returned) and self.makes_nothing and not any(each.is_write for each in aliases)
        self._changed = [
            (index, each.name)
            for index, each in enumerate(schema.arguments)
            if (each.alias_info is not None and each.alias_info.is_write) or each.name in _CHANGED_IN_SECRET
        ]

    def changed(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The arguments that the operation changes."""
        if not self._changed:
            return []
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in self._changed]
        return tensors_of(found, {})


def _facts(func: Any) -> _Facts:
    facts = _known.get(id(func))
    if facts is None:
        facts = _known[id(func)] = _Facts(func)
    return facts


def tensors_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a call, also those in lists."""
    found: list[torch.Tensor] = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += tensors_of(each, {})
    return found


def _one_by_one(run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on lists of tensors, for one of each list at a time: together they may be everything."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple)) and each]
    count = max((len(each) for each in lists), default=0)

    def share(each: Any, index: int) -> Any:
        return each[index : index + 1] if isinstance(each, (list, tuple)) and len(each) == count else each

    results = [
        run(func, tuple(share(a, i) for a in args), {key: share(a, i) for key, a in kwargs.items()})
        for i in range(count)
    ]
    if not results:
        return func(*args, **kwargs)
    if isinstance(results[0], (list, tuple)):
        if results[0] and isinstance(results[0][0], (list, tuple)):
            return tuple([each for part in parts for each in part] for parts in zip(*results, strict=True))
        return [each for result in results for each in result]
    return results[0]


def _without_content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_without_content(each) for each in value)
    if isinstance(value, dict):
        return {key: _without_content(each) for key, each in value.items()}
    return value


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    takes_device = any(each.name == "device" for each in func._schema.arguments)
    return {key: None for key in ("generator",) if key in kwargs} | (
        {"device": "meta"} if takes_device else {}
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _key(name: str, args: Any, kwargs: Any) -> Any:
    """What an operation's results and workspace depend on."""
    return name, _outlines(args), _outlines(kwargs.values())


def _outlines(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(
        (each.shape, each.dtype) if isinstance(each, torch.Tensor)
        else _outlines(each) if isinstance(each, (list, tuple))
        else each if isinstance(each, (int, bool, torch.dtype))
        else None
        for each in values
    )  # fmt: skip
