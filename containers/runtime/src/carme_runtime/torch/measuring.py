"""What the operators of a traced model cost on this rank.

Each is run by itself with the values that the operators before it made, which are given up after their last
use. So a model whose training does not fit into memory can be measured, too. Passes over all operators are
repeated, not single operators: in training, too, their weights have left the processor's caches meanwhile.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import copy
import dataclasses
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph, Timing, Value
from carme_runtime.out_of_core import host_room, seconds_waited
from carme_runtime.out_of_core.watch import Storage
from carme_runtime.torch.traced import Traced, resized, with_values
from carme_runtime.torch.views import views_of

_MOST_REPEATS = 7
_MOST_ACCUMULATED = 64 << 20  # bytes of gradients to which others are added: more than caches hold
_PART_ACCUMULATED = 8  # that part of what a limit of memory leaves for tensors, at most
_ALIGNMENT = 64  # bytes
UNKNOWN = 1 << 62  # bytes that measuring takes, where nothing says it
_MARK, _BACKWARD_MARK = "carme operator ", "carme backward pass of "
_LOG_LEVEL = "KINETO_LOG_LEVEL"


def measured(
    traced: Traced,
    example: tuple[torch.Tensor, ...],
    samples: Sequence[int] = (),
    seconds: float = 10.0,
    before_times: Callable[[int], None] = lambda needed: None,
) -> Graph:
    """The traced graph with values, times and bytes.

    Args:
        traced: The model.
        example: What it is called with.
        samples: Of it, with which to measure; by default a quarter and all.
        seconds: About how long to measure times.
        before_times: Called when all but the times is known, with the bytes that measuring those takes.

    Raises:
        InvalidCall: The model cannot run.
    """
    most = len(example[0])
    sizes = sorted({*samples} or {max(most // 4, 1), most})
    device = example[0].device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        largest = _Measurement(traced, resized(example, sizes[-1]))
        took = largest.measure_sizes()
        smallest = largest.described
        if len(sizes) > 1:
            smallest_run = _Measurement(traced, resized(example, sizes[0]))
            took += smallest_run.measure_sizes()
            smallest = smallest_run.described
        repeats = max(1, min(_MOST_REPEATS, int(seconds / max(took, 1e-6) / 3)))
        before_times(largest.needed)
        timings: dict[str, list[Timing]] = {name: [] for name in largest.held}
        accumulating: dict[str, list[float]] = {name: [] for name in largest.held}
        for size in sizes:
            for name, timing, adding in _Measurement(traced, resized(example, size)).timings(repeats):
                timings[name].append(timing)
                accumulating[name].append(adding)
    values = {
        name: dataclasses.replace(value, per_sample=value.bytes != smallest[name].bytes)
        for name, value in largest.described.items()
    }
    views = views_of(traced, largest.within)
    operators = tuple(
        dataclasses.replace(
            operator,
            timings=tuple(timings[operator.name]),
            accumulating_ms=round(statistics.median(accumulating[operator.name]), 6),
            held_bytes=largest.held[operator.name],
            holds=largest.holds[operator.name],
            within=largest.within.get(operator.name, ""),
            view_of=views.get(operator.name, ""),
            workspace_bytes=largest.workspace.get(operator.name, 0),
            backward_bytes=largest.backward.get(operator.name, 0),
        )
        for operator in traced.graph.operators
    )
    return with_values(traced.graph, values, samples=sizes[-1], operators=operators)


def keep_busy(
    traced: Traced, example: tuple[torch.Tensor, ...], samples: int, is_over: Callable[[], bool]
) -> None:
    """Run the operators as a measurement does until it is over, and measure nothing.

    Another rank measures meanwhile, and so has the part of the machine that it has in training: of its
    memory's rate, caches and clock, and of cores that there are too few of.

    Args:
        traced: The model.
        example: What it is called with.
        samples: Of it, with which to run.
        is_over: Whether to end.
    """
    devices = [example[0].device] if example[0].device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        while not is_over():
            _Measurement(traced, resized(example, samples)).run_until(is_over)


def _kind(node: fx.Node) -> Hashable:
    """The same for operators that do the same with tensors of the same shapes and types."""
    return node.op, str(node.target), _shown(node.args), _shown(tuple(sorted(node.kwargs.items())))


def _shown(argument: Any) -> Hashable:
    if isinstance(argument, fx.Node):
        tensor = argument.meta.get("val")
        known = isinstance(tensor, torch.Tensor)
        return (str(tuple(tensor.shape)), str(tensor.dtype)) if known else argument.name
    if isinstance(argument, list | tuple):
        return tuple(_shown(each) for each in argument)
    return repr(argument)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class _Measurement:
    """Runs the operators with one number of samples."""

    def __init__(self, traced: Traced, example: tuple[torch.Tensor, ...]) -> None:
        self._traced, self._example = traced, example
        self._operators = {operator.name: operator for operator in traced.graph.operators}
        self._gradient = traced.graph.with_gradients
        self.described: dict[str, Value] = {}
        self.held: dict[str, int] = {}
        self.holds: dict[str, tuple[str, ...]] = {}
        self.within: dict[str, str] = {}
        self._watched: _Held | None = None
        self._timed_result: Any = None  # by the run of an operator that was timed
        self.workspace: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self.needed = UNKNOWN  # bytes that running all operators takes

    def measure_sizes(self) -> float:
        """Run all once, see how large everything is; how long that took."""
        began = time.perf_counter()
        with _memory_profile() as profile:
            held = self._watched = _Held(self._traced.named_tensors().values())
            for value, tensor in zip(self._traced.graph.inputs, self._example, strict=True):
                self._describe(value, tensor)
                held.name(value, tensor)
            counted: set[str] = set()
            for node, run, inputs in self._steps():
                with torch.profiler.record_function(_MARK + node.name), held.counting():
                    result = run()
                self._describe(node.name, result)
                unnamed_bytes, values = held.of(node.name, result)
                new = [value for value in values if value not in counted]
                counted.update(new)
                self.holds[node.name] = values
                self.held[node.name] = unnamed_bytes + sum(self.described[value].bytes for value in new)
                with torch.profiler.record_function(_BACKWARD_MARK + node.name):
                    self._backward(result, inputs)
                del result  # or it and what it keeps would be there while the next operator runs
        taken = _taken(profile, _MARK)
        self.workspace = {name: max(most - self.described[name].bytes, 0) for name, most in taken.items()}
        self.backward = _taken(profile, _BACKWARD_MARK)
        self.needed = self._needed(profile)
        self._watched = None
        held.close()
        return time.perf_counter() - began

    def _needed(self, profile: Any) -> int:
        """Bytes that running all operators takes at a time, by the profile of it."""
        most = max(itertools.accumulate(size for _, size in _changes(profile)), default=UNKNOWN)
        trained = [p for p in self._traced.named_tensors().values() if p.requires_grad]
        return max(most, 0) + _bytes_of(self._example) + min(_bytes_of(trained), _most_accumulated())

    def timings(self, repeats: int) -> Iterator[tuple[str, Timing, float]]:
        """Times of all operators: medians of `repeats` passes, over all operators that are alike.

        A busy machine would otherwise have equal layers take different times, and the model cut unevenly.

        Yields:
            The name, the passes, and milliseconds of adding the parameters' gradients to earlier ones.
        """
        samples, idle = len(self._example[0]), _idle_backward_ms(self._example[0].device)
        alike: dict[str, Hashable] = {}
        times: dict[Hashable, list[tuple[float, float, float]]] = defaultdict(list)
        earlier = _Gradients(self._traced.named_tensors().values())
        for _ in range(repeats):
            for node, run, inputs in self._steps():
                kind = alike[node.name] = (_kind(node), tuple(str(tuple(each.shape)) for each in inputs))
                times[kind].append(self._timed(run, inputs, earlier))
        for name, kind in alike.items():
            forward, backward, adding = (statistics.median(each) for each in zip(*times[kind], strict=True))
            yield name, Timing(samples, round(forward, 6), round(max(backward - idle, 0.0), 6)), adding

    def _timed(
        self, run: Callable[[], Any], inputs: list[torch.Tensor], earlier: "_Gradients"
    ) -> tuple[float, float, float]:
        """Milliseconds of an operator's passes, and of adding its parameters' gradients to earlier ones."""
        _synchronize(self._example[0])
        began = _computed_s()
        self._timed_result = run()
        _synchronize(self._example[0])
        forward = (_computed_s() - began) * 1000
        backward, gradients = self._backward(self._timed_result, inputs)
        return forward, backward, sum(map(earlier.adding_ms, gradients))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run all operators once, or as many as there is time for."""
        for _, run, inputs in self._steps():
            if is_over():
                return
            self._timed_result = run()
            self._backward(self._timed_result, inputs)

    def _describe(self, name: str, result: Any) -> None:
        tensors = _tensors_of(result)
        size = sum(t.numel() * t.element_size() for t in tensors) or 8
        first = tensors[0] if tensors else None
        self.described[name] = Value(
            name,
            tuple(first.shape) if first is not None else (),
            str(first.dtype)[6:] if first is not None else "int",
            size,
            False,
            name in self._gradient and first is not None and first.is_floating_point(),
        )

    def _steps(self) -> Iterator[tuple[fx.Node, Callable[[], Any], list[torch.Tensor]]]:
        """Each operator: its node, a call that runs it, and the tensors to which its gradients go."""
        traced = self._traced
        known = traced.named_tensors()
        env: dict[str, Any] = {}
        examples = iter(self._example)
        last = {used: node for node in traced.nodes for used in node.all_input_nodes}
        buffers = {n: t.clone() for n, t in known.items() if not t.requires_grad and t.numel()}
        if self._watched:
            self._watched.own(buffers.values())
        for node in traced.nodes:
            if node.op == "placeholder":
                name = traced.tensors.get(node.name)
                env[node.name] = next(examples) if name is None else buffers.get(name, known[name])
            elif node.op == "get_attr":
                env[node.name] = _attribute_value(traced, node)
            elif node.op != "output":
                run, inputs = self._prepared(node, env)
                yield node, run, inputs
                timed, self._timed_result = self._timed_result, None
                with torch.no_grad():
                    env[node.name] = _detached(_fresh(run) if timed is None else timed)
                del timed  # as above
                if self._watched and (within := self._watched.name(node.name, env[node.name])):
                    self.within[node.name] = within
            for used in node.all_input_nodes:
                if last[used] is node and used.op not in ("placeholder", "get_attr"):
                    env.pop(used.name, None)

    def _prepared(self, node: fx.Node, env: dict[str, Any]) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        inputs: list[torch.Tensor] = []

        def leaf(source: fx.Node) -> Any:
            value = env[source.name]
            if isinstance(value, torch.Tensor) and source.op != "placeholder":
                value = value.detach()
                if source.name in self._gradient and value.is_floating_point():
                    value.requires_grad_()
            if isinstance(value, torch.Tensor) and value.requires_grad:
                inputs.append(value)
            return value

        arguments = fx.map_arg(node.args, leaf)
        options = fx.map_arg(node.kwargs, leaf)
        if node.op == "call_module":
            own = self._traced.root.get_submodule(str(node.target))
            # Its states may change. Weights that are copied would be in the caches, and take memory.
            module = copy.deepcopy(own, {id(p): p for p in own.parameters()})
            inputs += [p for p in module.parameters() if p.requires_grad]
            return lambda: module(*arguments, **options), inputs
        target: Any = node.target
        if node.op == "call_method":
            return lambda: getattr(arguments[0], target)(*arguments[1:], **options), inputs
        schema = getattr(target, "_schema", None)
        if schema is not None and schema.is_mutable:

            def on_copies() -> Any:
                # Neither a leaf nor what others still need may change.
                copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
                return target(*copies, **options)

            return on_copies, inputs
        return lambda: target(*arguments, **options), inputs

    def _backward(self, result: Any, inputs: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
        """Run an operator's backward pass: milliseconds, 0 where it has none, and parameters' gradients."""
        parts = [result] if not isinstance(result, list | tuple) else result
        outputs = [p for p in parts if isinstance(p, torch.Tensor) and p.requires_grad]
        if not outputs or not inputs:
            return 0.0, []
        gradients = [torch.ones_like(output) for output in outputs]
        _synchronize(self._example[0])
        began = _computed_s()
        found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        _synchronize(self._example[0])
        took = (_computed_s() - began) * 1000
        own = zip(found, inputs, strict=True)
        return took, [each for each, to in own if each is not None and isinstance(to, torch.nn.Parameter)]


class _Gradients:
    """Gradients of earlier micro-batches, to which others are added.

    Each addition is to another part of them, as in a pass over a whole model: what a layer had in the
    micro-batch before has left the processor's caches. They are as large as the model's, up to a limit.

    Args:
        parameters: Of the model, and its buffers.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        size = sum(p.numel() * p.element_size() + _ALIGNMENT for p in trained)
        device = trained[0].device if trained else None
        self._memory = torch.zeros(min(size, _most_accumulated()), dtype=torch.uint8, device=device)
        self._at = 0

    def adding_ms(self, gradient: torch.Tensor) -> float:
        """Milliseconds of adding a gradient; of one beyond the limit, as for its part within."""
        if gradient.layout != torch.strided:
            return 0.0
        part = _part(gradient, len(self._memory) // gradient.element_size())
        if not part.numel():
            return 0.0
        size = part.numel() * part.element_size()
        if self._at + size > len(self._memory):
            self._at = 0
        earlier = self._memory[self._at : self._at + size].view(part.dtype)
        # Whatever its strides: a copy would be read from the caches instead, and without gaps.
        earlier = earlier.as_strided(part.shape, torch.empty_like(part, device="meta").stride())
        self._at += -(-size // _ALIGNMENT) * _ALIGNMENT
        _synchronize(part)
        began = _computed_s()
        earlier.add_(part)
        _synchronize(part)
        return (_computed_s() - began) * 1000 * gradient.numel() / part.numel()


def _most_accumulated() -> int:
    """Bytes of gradients to which others are added: a small part of a limit, as they are one block of it."""
    room = host_room()
    return _MOST_ACCUMULATED if room is None else min(_MOST_ACCUMULATED, room.bytes // _PART_ACCUMULATED)


def _part(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """A view of a part of a tensor, with so many elements at most."""
    for dimension in range(tensor.ndim):
        if tensor.numel() <= most:
            break
        each = tensor.numel() // tensor.shape[dimension]
        tensor = tensor.narrow(dimension, 0, max(most // each, 1))
    return tensor if tensor.numel() <= most else tensor.new_empty(0)


def _fresh(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        raise InvalidCall(
            f"The model cannot run with the example ({str(error).splitlines()[0]}).",
            "Give an example that the model takes with any number of samples.",
        ) from None


def _detached(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, list | tuple):
        return type(result)(_detached(part) for part in result)
    return result


def _attribute_value(traced: Traced, node: fx.Node) -> Any:
    found: Any = traced.root
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _computed_s() -> float:
    """Seconds, without those in which a limit of memory let this process wait for the disk.

    A plan adds what its stages move, and a stage moves less than the whole model does here.
    """
    return time.perf_counter() - seconds_waited()


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def _idle_backward_ms(device: torch.device) -> float:
    """What a call of autograd itself takes, which a pass over the whole model pays once."""
    leaf = torch.ones(1, requires_grad=True, device=device)
    ones, times = torch.ones(1, device=device), []
    for _ in range(20):
        result = leaf.view(1)
        _synchronize(leaf)
        began = time.perf_counter()
        torch.autograd.grad([result], [leaf], [ones], allow_unused=True)
        _synchronize(leaf)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


class _Held:
    """What autograd saves of an operator: values by their names, and other memory; not the model's tensors.

    Args:
        own: Those.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own: set[int] = set()
        self._named: dict[int, tuple[str, Storage]] = {}  # by address
        self._values: dict[str, None] = {}
        self._unnamed: dict[int, int] = {}  # bytes by address
        self.own(own)

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are the model's, too."""
        self._own.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def close(self) -> None:
        """Let go of all that was seen."""
        for _, storage in self._named.values():
            storage.forget()
        self._named.clear()

    def counting(self) -> Any:
        """While an operator runs."""
        self._values, self._unnamed = {}, {}
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at and at not in self._own:
            if name := self._name_at(at):
                self._values[name] = None
            else:
                self._unnamed[at] = storage.nbytes()
        return tensor

    def _name_at(self, at: int) -> str:
        name, storage = self._named.get(at, ("", None))
        if storage is not None and storage.expired():
            storage.forget()
            del self._named[at]
            return ""
        return name

    def of(self, name: str, result: Any) -> tuple[int, tuple[str, ...]]:
        """Bytes besides values, and values, that the operator with this name saved, whose result this is."""
        for tensor in _tensors_of(result):
            if self._unnamed.pop(tensor.untyped_storage().data_ptr(), None) is not None:
                self._values[name] = None
        return sum(self._unnamed.values()), tuple(self._values)

    def name(self, name: str, value: Any) -> str:
        """This is the value with this name. Returns the one in whose memory it lies; empty: its own."""
        within = ""
        for tensor in _tensors_of(value):
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if not at or at in self._own:
                continue
            known = self._name_at(at)
            if not known:
                self._named[at] = (name, Storage(storage))
            elif known != name:
                within = known
        return within


def _tensors_of(result: Any) -> list[torch.Tensor]:
    parts = [result] if not isinstance(result, list | tuple) else result
    return [part for part in parts if isinstance(part, torch.Tensor)]


@contextlib.contextmanager
def _memory_profile() -> Iterator[Any]:
    """The profiler, which notes what the host's allocator does. By default it logs its start."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "9")
    try:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
            yield profile
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _events(profile: Any) -> Iterable[Any]:
    """What the profiler noted; nothing where this PyTorch does not show it."""
    results = getattr(getattr(profile, "profiler", None), "kineto_results", None)
    return () if results is None else results.events()


def _changes(profile: Any) -> list[tuple[int, int]]:
    """When the allocator gave or got bytes, in nanoseconds, and how many."""
    return sorted((e.start_ns(), e.nbytes()) for e in _events(profile) if e.name() == "[memory]")


def _taken(profile: Any, mark: str) -> dict[str, int]:
    """The most bytes that each operator took at a time under its mark, by the profiler's events."""
    marks = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in _events(profile)
        if event.name().startswith(mark)
    ]
    changes = _changes(profile)
    found, at = {}, 0
    for begin, end, name in sorted(marks):
        while at < len(changes) and changes[at][0] < begin:
            at += 1
        level = most = 0
        while at < len(changes) and changes[at][0] <= end:
            level += changes[at][1]
            most = max(most, level)
            at += 1
        found[name.removeprefix(mark)] = most
    return found
