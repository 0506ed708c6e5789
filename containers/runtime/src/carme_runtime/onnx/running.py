"""Runs a model on several processes: splits what it is given into micro-batches, and joins the results."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.examples import check_inputs
from carme_runtime.onnx.execution import INLINE_BYTES, Pipeline, label, slot_of, stored
from carme_runtime.onnx.files import temporary, unwritable
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Model, load
from carme_runtime.onnx.parts import split_model, write_parts
from carme_runtime.onnx.plans import Plan, parse_workers, plan
from carme_runtime.onnx.sessions import CUDA, result_of, session
from carme_runtime.onnx.slots import Slots, Slotted, slots_for
from carme_runtime.onnx.tracing import as_source, trace
from carme_runtime.petri import PetriError, store
from carme_runtime.petri.ranges import lasting
from carme_runtime.petri.starting import is_job

Inputs = Mapping[str, Any]
#: With so many micro-batches it is worth while to measure the operators before.
_MEASURED = 16
#: Micro-batches that a batch becomes, for each worker.
_EACH = 2
_TOLERANCE = 1e-4
_SHARED_FOLDER = "Start it in a folder of yours that all nodes see, or give such a one as folder=."
_OTHER_FOLDER = "Give a folder of yours with room in it as folder=."


@overload
def run(
    model: Any, inputs: Inputs, workers: str | int | Mapping[str, int] = 2, **options: Any
) -> dict[str, Any]: ...
@overload
def run(
    model: Any, inputs: Sequence[Inputs], workers: str | int | Mapping[str, int] = 2, **options: Any
) -> list[dict[str, Any]]: ...


def run(model: Any, inputs: Any, workers: Any = 2, **options: Any) -> Any:
    """Run a model.

    Args:
        model: What `load` takes or gives.
        inputs: An array for each input; its first dimension may be a multiple of the model's, and is split
            into micro-batches where that gives the same results. Or several such mappings, each one a
            micro-batch.
        workers: Processes of this node, kinds of them ("cpu:2,gpu:1"), or "job" for a process on each
            processor of all nodes of the job that this program runs in, or "job:4" for so many on each.
        options: Of `Runner`.

    Returns:
        An array for each output, or a list of such dictionaries for several inputs.

    Raises:
        OnnxError: The model, the inputs or the workers make no sense, or ONNX Runtime fails.
        PetriError: The net cannot go on, for example as memory or disk are full.
    """
    has_batches = not isinstance(inputs, Mapping)
    loaded = model if isinstance(model, Model) else load(model)
    if has_batches:
        batches = [check_inputs(loaded, each) for each in inputs]
    else:
        batches = micro_batches(loaded, check_inputs(loaded, inputs, batch=True), workers)
    if not batches:
        return []
    results = Runner(loaded, workers, **options).run(batches)
    return results if has_batches else joined(loaded, batches, results)


class Runner:
    """Runs micro-batches of a model.

    Args:
        model: Which.
        workers: A number of processes, kinds of them, "job", or "job:4".
        tasks: Into how many tasks the model is cut; None: see `plan`.
        compiled: A plan to use instead of making one.
        folder: For the net's journal and the tasks' models; it stays. None: a temporary one. All nodes of a
            job need to see it, so for workers of "job" a temporary one is in the working directory.
        memory: The most that tensors in flight take of the node's shared memory, such as "8GiB".
        threads: Of one operator in each worker. None: the node's processors by the number of workers, and 1
            for workers of "job".
        watch: Is called with the run of the net and a number when that micro-batch was given to it.

    Attributes:
        plan: The plan, after `run`.
        notices: What happened while it ran, such as workers that were killed.
    """

    def __init__(
        self,
        model: Model,
        workers: str | int | Mapping[str, int],
        *,
        tasks: int | None = None,
        compiled: Plan | None = None,
        folder: str | os.PathLike[str] | None = None,
        memory: int | str | None = None,
        threads: int | None = None,
        watch: Any = None,
    ) -> None:
        self.model, self.workers = model, parse_workers(workers)
        self._job = workers if is_job(workers) else None
        self.plan = compiled
        self.notices: list[str] = []
        self._tasks, self._folder, self._memory, self._watch = tasks, folder, memory, watch
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise OnnxError(f"{threads!r} is not a valid number of threads.", "Give 1 or more.")
        self._threads = threads
        if self.workers.get("gpu") and CUDA not in library("onnxruntime").get_available_providers():
            raise OnnxError(
                "This ONNX Runtime cannot use GPUs.",
                "Install onnxruntime-gpu, or use workers of the kind cpu.",
            )

    def run(self, batches: Sequence[Inputs]) -> list[dict[str, Any]]:
        """The outputs of each micro-batch, in their order. Raises as `carme_runtime.onnx.run`."""
        if self.plan is None:
            graph = trace(self.model, batches[0], measure=len(batches) >= _MEASURED)
            workers = self._job or self.workers
            self.plan = plan(graph, workers, tasks=self._tasks, micro_batches=len(batches), model=self.model)
        if self._folder is not None:
            folder = Path(self._folder).absolute()
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(str(folder), error, _OTHER_FOLDER) from error
            return self._run(folder, self.plan, batches)
        with temporary(Path.cwd(), _SHARED_FOLDER) if self._job else temporary() as folder:
            try:
                return self._run(folder, self.plan, batches)
            except BaseException:
                _free(folder / "run")
                raise

    def _run(self, folder: Path, found: Plan, batches: Sequence[Inputs]) -> list[dict[str, Any]]:
        count = sum(found.workers.values())
        threads = self._threads or (1 if self._job else max(len(os.sched_getaffinity(0)) // count, 1))
        # A run that may be resumed has all results in the net; with a limit of memory each tensor goes early.
        is_slotted = not self._job and self._folder is None and self._memory is None
        slots = slots_for(count, found.value_bytes, store.usual_limit()) if is_slotted else 0
        pipeline = Pipeline(found, self.model.outputs, folder, threads, slots)
        try:
            write_parts(split_model(self.model, found), found, folder)
            pipeline.save()
        except OSError as error:
            raise unwritable(str(folder), error, _SHARED_FOLDER if self._job else _OTHER_FOLDER) from error
        self.notices = []
        while (results := self._attempt(pipeline, found, folder / "run", batches)) is None:
            _free(folder / "run")
        for number, batch in enumerate(batches):  # outputs that are inputs
            results[number] = {
                name: results[number].get(name, batch.get(name)) for name in self.model.outputs
            }
        return results

    def _attempt(
        self, pipeline: Pipeline, found: Plan, folder: Path, batches: Sequence[Inputs]
    ) -> list[dict[str, Any]] | None:
        """Run the net from its beginning; None: a node was lost with tensors that were needed still."""
        gpus = found.workers.get("gpu", 0)
        offers = f"gpu:{gpus}" if gpus else ""
        results: list[dict[str, Any]] = [{} for _ in batches]
        net, workers = pipeline.net, self._job or sum(found.workers.values())
        with net.start(workers, folder=folder, offers=offers, memory=self._memory, checked=False) as run:
            nodes = run.status()["nodes"]
            if self._folder is None:
                run.discard()  # its folder goes: nothing needs to be on the disk
            try:
                _Feed(run, pipeline, results).give(batches, self._watch)
            except BaseException as error:
                if self._folder is not None:
                    raise
                lost = [node for node in nodes if node not in run.status()["nodes"]]
                if isinstance(error, PetriError) and lost:
                    self.notices.append(
                        f"Tensors were lost with {' and '.join(lost)}: the model ran again from its "
                        "beginning on the other nodes."
                    )
                    return None
                if isinstance(error, PetriError) and str(folder) in error.remedy:
                    raise PetriError(error.message, _remedy(error)) from error.__cause__
                raise
            self.notices += run.notices
        return results


def _remedy(error: PetriError) -> str:
    """What to do where there is no folder in which the run could be resumed."""
    _, *trace = error.remedy.split("\n", 1)
    return "\n".join(["Mend it and run the model again; with folder= what is done is not lost.", *trace])


def _free(folder: Path) -> None:
    """Free shared memory of a run that has failed and that nobody can resume, once its workers have ended."""
    shutil.rmtree(folder, ignore_errors=True)
    mark, end = json.dumps(str(folder)), time.monotonic() + store.ENDING_SECONDS
    while True:
        store.sweep("", lasting)
        left = False
        for each in store.SHARED.glob(f"carme-net-{os.getuid()}-*"):
            with contextlib.suppress(OSError):
                left = left or (each / ".run").read_text() == mark
        if not left or time.monotonic() > end:
            return
        time.sleep(0.01)


class _Feed:
    """Puts micro-batches into a run, and takes their results.

    Args:
        run: Of the net.
        pipeline: With the net.
        results: Get what comes.
    """

    def __init__(self, run: Any, pipeline: Pipeline, results: list[dict[str, Any]]) -> None:
        self._run, self._pipeline, self._results = run, pipeline, results
        self._slots = Slots()
        self._names = list(dict.fromkeys(name for names in pipeline.entries.values() for name in names))

    def give(self, batches: Sequence[Inputs], watch: Any) -> None:
        """Have all computed; `watch` is called with the run and a number when that one was put."""
        count, pipeline, run = self._pipeline.slots, self._pipeline, self._run
        try:
            for number, batch in enumerate(batches):
                while count and number >= count and not self._results[number - count]:
                    self._take_some()
                self._put(number, batch)
                if watch:
                    watch(run, number)
            while count and not all(self._results):
                self._take_some()
            for number, values in run.wait()[pipeline.done.name]:
                self._take(number, values)
        finally:
            self._slots.close()

    def _put(self, number: int, batch: Inputs) -> None:
        placed = {name: self._placed(name, number, batch[name]) for name in self._names}
        for place, names in self._pipeline.entries.items():
            self._run.put(place, (number, tuple(placed[name] for name in names)))

    def _placed(self, name: str, number: int, array: Any) -> Any:
        """An input as its token has it."""
        count, memory = self._pipeline.slots, self._run.memory
        if count and array.nbytes > INLINE_BYTES and not array.dtype.hasobject:
            slot = slot_of(name, number % count)
            target = self._slots.target(memory, slot, array.shape, array.dtype)
            if target is not None:
                target[...] = array
                return Slotted(slot)
        return stored(memory, label(name, number), array)

    def _take_some(self) -> None:
        found = self._run.take(self._pipeline.done)
        for number, values in found:
            self._take(number, values)
        if not found:
            missing = next(number for number, each in enumerate(self._results) if not each)
            raise PetriError(
                f"The net has ended without a result for micro-batch {missing}.", "Run it again."
            )

    def _take(self, number: int, values: Sequence[Any]) -> None:
        for name, value in zip(self._pipeline.results, values, strict=True):
            if isinstance(value, Slotted):
                self._results[number][name] = self._slots.array(self._run.memory, value.name).copy()
            else:
                self._results[number][name] = _taken(value)


def _taken(value: Any) -> Any:
    if not hasattr(value, "lifetime"):
        return value
    array = value.array().copy()
    value.close()
    return array


def micro_batches(model: Model, inputs: Inputs, workers: str | int | Mapping[str, int]) -> list[Inputs]:
    """A batch as micro-batches, where these give the same results; else as one.

    Args:
        model: Which.
        inputs: As `check_inputs` gives them.
        workers: Who is to run them: each gets some, where the model leaves their number open.

    Raises:
        OnnxError: The inputs are of different numbers of batches.
    """
    wanted = _EACH * sum(parse_workers(workers).values())
    sizes = {name: array.shape[0] for name, array in inputs.items() if array.ndim}
    own = {each.name: each.shape[0] if each.shape else None for each in model.inputs}
    if not sizes:
        return [inputs]
    fixed = {name for name in sizes if isinstance(own[name], int)}
    if fixed == set(sizes):
        counts = {sizes[name] // int(own[name] or 1) for name in sizes}
        if len(counts) > 1:
            raise OnnxError(
                f"The inputs of {model.name} are of {' and '.join(map(str, sorted(counts)))} batches.",
                "Give each the same number of batches.",
            )
        return _slices(inputs, sizes, counts.pop())
    if fixed or len(set(sizes.values())) > 1 or min(sizes.values()) < 2:
        return [inputs]
    samples = next(iter(sizes.values()))
    return _slices(inputs, sizes, min(wanted, samples)) if _is_separable(model, inputs, sizes) else [inputs]


def _slices(inputs: Inputs, sizes: Mapping[str, int], count: int) -> list[Inputs]:
    numpy = library("numpy")
    parts = {name: numpy.array_split(inputs[name], count) for name in sizes}
    return [
        {
            name: numpy.ascontiguousarray(parts[name][place]) if name in parts else inputs[name]
            for name in inputs
        }
        for place in range(count)
    ]


def _is_separable(model: Model, inputs: Inputs, sizes: Mapping[str, int]) -> bool:
    """Whether two samples give the same together and one after the other.

    They are different ones: a model that mixes samples may give the same for equal ones. Where all are equal
    nothing is known.
    """
    numpy = library("numpy")
    differing = next(
        (
            k
            for k in range(1, min(sizes.values()))
            if any((inputs[n][0] != inputs[n][k]).any() for n in sizes)
        ),
        None,
    )
    if differing is None:
        return False

    def at_places(*places: int) -> dict[str, Any]:
        return {name: array[list(places)] if name in sizes else array for name, array in inputs.items()}

    with temporary() as folder:
        own = session(as_source(model.proto, folder, "whole"), name=model.name)
        try:
            together = result_of(own, None, at_places(0, differing), model.name)
            apart = [result_of(own, None, at_places(k), model.name) for k in (0, differing)]
        except OnnxError:  # it takes one of them only; what is wrong shows when it runs
            return False
    for whole, first, second in zip(together, *apart, strict=True):
        if not hasattr(whole, "ndim") or not whole.ndim or first.shape[:1] != (1,):
            return False
        concatenated = numpy.concatenate([first, second])
        if concatenated.shape != whole.shape or not _are_close(numpy, concatenated, whole):
            return False
    return True


def _are_close(numpy: Any, a: Any, b: Any) -> bool:
    if a.dtype.kind not in "fc":
        return bool((a == b).all())
    return bool(numpy.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True))


def joined(model: Model, batches: Sequence[Inputs], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The outputs of micro-batches as those of their batch.

    Raises:
        OnnxError: The first dimension of an output is not that of the micro-batch.
    """
    if len(results) == 1:
        return results[0]
    numpy = library("numpy")
    for inputs, outputs in zip(batches, results, strict=True):
        sizes = {array.shape[0] for array in inputs.values() if array.ndim}
        for name in model.outputs:
            shape = list(numpy.shape(outputs[name]))
            if not shape or shape[0] not in sizes:
                raise OnnxError(
                    f"Output {name} of {model.name} has the shape {shape} for {min(sizes)} samples, so the "
                    f"outputs of {len(results)} micro-batches cannot be joined.",
                    "Give a list of inputs, each of the size that the model takes: each has its outputs.",
                )
    return {name: numpy.concatenate([each[name] for each in results]) for name in model.outputs}
