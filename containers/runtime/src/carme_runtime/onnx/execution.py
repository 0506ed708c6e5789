"""Runs a plan as a Petri net: its tasks are transitions, the tensors of a micro-batch are tokens.

Large tensors lie in ranges of shared memory, so the next task maps what the last one wrote. Each micro-batch
has a number, which its tokens carry: tasks with several inputs take those of one number together. Where all
workers are on this node, a micro-batch may use the ranges of an earlier one, see `slots`.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.files import replaced
from carme_runtime.onnx.library import library
from carme_runtime.onnx.plans import Plan
from carme_runtime.onnx.sessions import result_of, session
from carme_runtime.onnx.slots import Bound, Slots, Slotted, names_of, product_of
from carme_runtime.petri import Net
from carme_runtime.petri.frames import bytes_of

#: Smaller tensors are part of their token: a range costs more than their copy.
INLINE_BYTES = 4096
#: A task with more weights uses its matrices as they are in the file: copies would be in each worker.
_MOST_PACKED = 64 << 20
#: Micro-batches that wait for a worker, for each of them.
_WAITING = 2

#: What other nodes read to have the net.
_MODULE = "onnx_pipeline"
_SCRIPT = """from carme_runtime.onnx.execution import Pipeline

pipeline = Pipeline.saved(__file__)
"""

#: The sessions of this process, by the files of their models; workers make theirs when they need them.
_sessions: dict[str, Any] = {}
#: Shapes and types of what a task gives, by its file and the shapes of what it got.
_shapes: dict[tuple[Any, ...], list[tuple[Any, tuple[int, ...]]]] = {}
#: What this worker has of the slots of its run, and tasks that are ready to run in them, by file and slot.
_slots = Slots()
_ready: dict[tuple[str, int], Bound] = {}


class TaskBody:
    """What a transition does: one fused task for one micro-batch.

    Args:
        file: Of the task's model.
        name: Of the task.
        inputs: For each of the transition's input places, the names of the values that its tokens bring.
        outputs: For each output place, the names of values, and whether each of them is its only user's.
        threads: Of one operator.
        gpu: Whether it runs on a GPU.
        slots: How many micro-batches are in the net at most: number n uses the memory of n - slots. 0: each
            tensor has a range of its own.
        packed: Whether each worker has a copy of the matrices, see `session`.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        inputs: Sequence[Sequence[str]],
        outputs: Sequence[Sequence[str]],
        shared: frozenset[str],
        threads: int,
        gpu: bool,
        slots: int = 0,
        packed: bool = True,
    ) -> None:
        self._file, self._name, self._slots = str(file), name, slots
        self._inputs, self._outputs = inputs, outputs
        self._shared, self._threads, self._gpu, self._packed = shared, threads, gpu, packed

    def __call__(self, *tokens: Any, memory: Any) -> Any:
        number, values = tokens[0][0], [value for _, each in tokens for value in each]
        results = self._run_ready(number, values) or self._run_anew(tokens, number, values, memory)
        next_tokens = tuple((number, tuple(results[name] for name in names)) for names in self._outputs)
        return next_tokens[0] if len(next_tokens) == 1 else next_tokens

    def _run_ready(self, number: int, values: list[Any]) -> dict[str, Any] | None:
        """The results, where an earlier micro-batch of this slot has left all that is needed."""
        ready = _ready.get((self._file, number % self._slots)) if self._slots else None
        return ready.results if ready and ready.input_names == names_of(values) and ready.run() else None

    def _run_anew(self, tokens: Any, number: int, values: list[Any], memory: Any) -> dict[str, Any]:
        arrays, ranges = {}, []
        for names, (_, values_of_token) in zip(self._inputs, tokens, strict=True):
            for name, value in zip(names, values_of_token, strict=True):
                is_range = hasattr(value, "lifetime")
                arrays[name] = value.array() if is_range else value
                if isinstance(value, Slotted):
                    arrays[name] = _slots.array(memory, value.name)
                if is_range and name not in self._shared:
                    ranges.append(value)
        results = self._run(arrays, number, names_of(values), memory)
        arrays.clear()
        for each in ranges:
            memory.delete(each)
        return results

    def _run(
        self, arrays: dict[str, Any], number: int, input_names: tuple[str, ...] | None, memory: Any
    ) -> dict[str, Any]:
        """The results by name: ranges or slots, or arrays where they are small."""
        own = _sessions.get(self._file)
        if own is None:
            own = _sessions[self._file] = session(
                self._file, threads=self._threads, name=self._name, gpu=self._gpu, packed=self._packed
            )
        names = [each.name for each in own.get_outputs()]
        key = (self._file, *((name, each.shape) for name, each in arrays.items()))
        if key in _shapes:
            shapes = dict(zip(names, _shapes[key], strict=True))
            bound = self._bound(own, arrays, number, input_names, memory, shapes)
            if bound is not None:
                return bound
        again = key in _shapes
        results = result_of(own, names, arrays, self._name)
        if all(_is_numeric(each) for each in (*results, *arrays.values())) and not self._gpu:
            _shapes[key] = [(each.dtype, each.shape) for each in results]
        return {
            name: stored(memory, self._label(name, number, again), each)
            for name, each in zip(names, results, strict=True)
        }

    def _bound(
        self,
        own: Any,
        arrays: dict[str, Any],
        number: int,
        input_names: tuple[str, ...] | None,
        memory: Any,
        shapes: dict[str, Any],
    ) -> dict[str, Any] | None:
        """Run so that results are written where the next task reads them.

        None where shapes turn out to be others than with the last input of these shapes.
        """
        binding, results, targets, new = own.io_binding(), {}, [], []
        for name, array in arrays.items():
            if input_names:  # it will be read from there again and again
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            else:
                binding.bind_cpu_input(name, array)
        for name, (dtype, shape) in shapes.items():
            results[name], target, is_new = self._target(name, number, shape, dtype, memory)
            new += [target] if is_new else []
            array = target.array() if is_new else target
            targets.append(array)
            binding.bind_output(name, "cpu", 0, array.dtype, shape, array.ctypes.data)
        bound = Bound(own, binding, input_names or (), results, (*arrays.values(), *targets))
        if not bound.run():
            for each in new:
                memory.delete(each)
            return None
        if input_names and not new and self._slots:
            _ready[self._file, number % self._slots] = bound
        return results

    def _target(
        self, name: str, number: int, shape: tuple[int, ...], dtype: Any, memory: Any
    ) -> tuple[Any, Any, bool]:
        """For a result: what its token says, the array or the range to write it to, and if that is new."""
        if dtype.itemsize * product_of(shape) <= INLINE_BYTES:
            array = library("numpy").empty(shape, dtype)
            return array, array, False
        if self._slots:
            slot = slot_of(name, number % self._slots)
            target = _slots.target(memory, slot, shape, dtype)
            if target is not None:
                return Slotted(slot), target, hasattr(target, "lifetime")
        memory_range = memory.allocate(self._label(name, number), shape, dtype)
        return memory_range, memory_range, True

    def _label(self, name: str, number: int, again: bool = False) -> str:
        return label(name, number, again) if name in self._shared else ""


def _is_numeric(value: Any) -> bool:
    return hasattr(value, "dtype") and not value.dtype.hasobject


def label(name: str, number: int, again: bool = False) -> str:
    """The range of a value that several tasks use.

    Args:
        name: Of the value.
        number: Of the micro-batch.
        again: Whether its task has made a range of another shape for it, whose name is taken until the task
            has ended.
    """
    return f"n{number}-{hash_of(name)}-{_plain(name)}{'-again' if again else ''}"


def slot_of(name: str, slot: int) -> str:
    """The range of a value in a slot."""
    return f"slot{slot}-{hash_of(name)}-{_plain(name)}"


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() and each.isascii() else "_" for each in name)[:80]


def hash_of(name: str) -> str:
    """Distinguishes names that look alike without their signs."""
    from zlib import crc32

    return f"{crc32(name.encode()):08x}"


def stored(memory: Any, name: str, array: Any) -> Any:
    """The array as a token has it: in a range, or as it is where it is small or no array of numbers."""
    numpy = library("numpy")
    if not isinstance(array, numpy.ndarray) or array.nbytes <= INLINE_BYTES or array.dtype.hasobject:
        return array
    return memory.allocate(name, array.shape, array.dtype, content=numpy.ascontiguousarray(array))


class Collect:
    """The last transition: joins the results of one micro-batch, and frees what several tasks used."""

    def __init__(self, shared: Sequence[str]) -> None:
        self._shared = tuple(shared)

    def __call__(self, *tokens: Any, memory: Any) -> Any:
        number = tokens[0][0]
        for name in self._shared:
            for again in (False, True):
                if label(name, number, again) in memory:
                    memory.delete(label(name, number, again))
        return number, tuple(value for _, values in tokens for value in values)


def number_of(token: Any) -> int:
    """The micro-batch of a token."""
    return token[0]


def same_number(*tokens: Any) -> bool:
    """The guard of tasks with several inputs: all are of one micro-batch."""
    return all(token[0] == tokens[0][0] for token in tokens)


def _shared(plan: Plan, outputs: Sequence[str]) -> frozenset[str]:
    """Names of the values that more than one reader needs: tasks, and the results."""
    counts = Counter(name for names in plan.edges.values() for name in names)
    counts.update(outputs)
    return frozenset(name for name, count in counts.items() if count > 1)


class Pipeline:
    """The net of a plan.

    Args:
        plan: Of a model.
        results: Names of the values that the model returns.
        folder: With the tasks' models.
        threads: Of one operator.
        slots: As for `TaskBody`; the program takes results and puts inputs so that this holds. 0: inputs wait
            for room.

    Attributes:
        net: Put what `entries` names, and `done` has the results.
        entries: Places for inputs, with the names of the values that a token brings.
        results: Names of the values of a token in `done`.
    """

    def __init__(
        self, plan: Plan, results: Sequence[str], folder: Path, threads: int = 1, slots: int = 0
    ) -> None:
        self.net = Net("onnx")
        self.net.number_of = number_of
        self.slots = slots
        self._saved, self._script = (plan, tuple(results), folder, threads, slots), folder / f"{_MODULE}.py"
        self.net.origin = (_MODULE, str(self._script))
        outputs = [name for name in dict.fromkeys(results) if name in plan.maker]
        self._shared = _shared(plan, outputs)
        waiting = _WAITING * sum(plan.workers.values())
        places = {
            (maker, task): self.net.place(
                f"to_{task}_from_{maker}" if maker >= 0 else f"input_{task}",
                tuple,
                capacity=waiting if maker < 0 and not slots else None,
            )
            for maker, task in plan.edges
        }
        self.entries = {places[edge].name: names for edge, names in plan.edges.items() if edge[0] < 0}
        self.results: list[str] = []
        self.done = self.net.place("done", tuple)
        freed = sorted(self._shared - set(outputs))
        is_alone = len({plan.maker[name] for name in outputs}) == 1 and not freed
        ends: list[Any] = []
        for number in range(len(plan.tasks)):
            into = [(places[edge], names) for edge, names in plan.edges.items() if edge[1] == number]
            out = [(places[edge], names) for edge, names in plan.edges.items() if edge[0] == number]
            own = [name for name in outputs if plan.maker[name] == number]
            if own:
                ends.append(self.done if is_alone else self.net.place(f"results_{number}", tuple))
                self.results += own
                out.append((ends[-1], tuple(own)))
            self._add(plan, number, into, out)
        if is_alone:  # what the one task gives is all that there is to collect
            return
        self.net.add(
            "collect",
            _sum(ends) >> self.done,
            Collect(freed),
            guard=same_number if len(ends) > 1 else None,
            priority=len(plan.tasks),
        )

    def _add(self, plan: Plan, number: int, into: Sequence[Any], out: Sequence[Any]) -> None:
        """Add the transition of a task, with its places and what their tokens bring."""
        task, (_, _, folder, threads, slots) = plan.tasks[number], self._saved
        if not into:
            raise OnnxError(
                f"Task {task.name} needs no input at all.", "Load the model with constant folding."
            )
        body = TaskBody(
            folder / f"{task.name}.onnx",
            task.name,
            [names for _, names in into],
            [names for _, names in out],
            self._shared,
            threads,
            task.kind == "gpu",
            slots,
            task.parameter_bytes <= _MOST_PACKED,
        )
        self.net.add(
            task.name,
            _sum(place for place, _ in into) >> _sum(place for place, _ in out),
            body,
            guard=same_number if len(into) > 1 else None,
            priority=number,
            needs="gpu:1" if task.kind == "gpu" else "",
        )

    def save(self) -> None:
        """Write into the folder what workers of other nodes make the same net of."""
        for path, content in (
            (self._script.with_suffix(".pickle"), pickle.dumps(self._saved)),
            (self._script, _SCRIPT.encode()),
        ):
            with replaced(path) as file:
                file.write(content)

    @classmethod
    def saved(cls, script: str) -> "Pipeline":
        """The pipeline of a folder, by the script in it that `save` has written.

        Raises:
            PetriError: It cannot be read, or is another user's.
        """
        return cls(*pickle.loads(bytes_of(Path(script).with_suffix(".pickle"), "pipeline")))


def _sum(places: Any) -> Any:
    first, *rest = places
    for each in rest:
        first = first + each
    return first
