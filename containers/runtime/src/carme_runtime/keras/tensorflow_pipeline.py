"""Pipelines of Keras models on the TensorFlow backend: the plan, and the variables of a rank's stage."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from carme_runtime import strategies
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph
from carme_runtime.graph.files import from_json, to_json
from carme_runtime.keras.calls import Calls
from carme_runtime.keras.data import Share
from carme_runtime.keras.library import keras
from carme_runtime.keras.tensorflow_costs import measured
from carme_runtime.keras.tensorflow_passes import Batch, Loss, Passes, mask_of_batch
from carme_runtime.keras.world import MASTER, World
from carme_runtime.logs import log
from carme_runtime.out_of_core import pages
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.pipeline import KINDS, Device, Plan, PlanError, Request, plan
from carme_runtime.pipeline.devices import devices_of_ranks, reference_ms
from carme_runtime.pipeline.memory import free_memory_of_rank

T = TypeVar("T")
_LAST_STEPS = 50


def agreed_plan(calls: Calls, example: Sequence[Any], request: Request, memory: Any, world: World) -> Plan:
    """The plan on which all ranks agree.

    Args:
        calls: The model.
        example: What it is called with.
        request: What is requested, without memory.
        memory: Of each rank, as given; None: what it has.
        world: All ranks, which call this together.

    Raises:
        InvalidCall: The model cannot run with the example, or ranks have different ones.
        PlanError: There is no such plan; it names the nearest that works.
    """
    kind = KINDS.get(request.schedule or "")
    if kind is not None and kind.split:
        raise PlanError(
            f"The schedule {request.schedule} divides backward passes, which needs Keras' torch backend.",
            "Use schedule='1f1b', 'gpipe' or 'interleaved'.",
        )
    if request.batch_norm not in ("", "micro", "exact"):
        raise InvalidCall(
            f"There is no batch_norm='{request.batch_norm}' on Keras' TensorFlow backend.",
            "Choose from micro, exact; deferred needs the torch backend.",
        )
    memories = [parse_size(memory)] * world.size if memory is not None else _free_memory(calls, world)
    graph = _agreed(calls, example, request, world)
    devices = _devices(memories, world)
    found = plan(graph, dataclasses.replace(request, memory=min(memories) or None, devices=devices))
    found = _with_batch_norm(found, calls, request.batch_norm, world)
    text = repr((found.cuts, found.schedule, found.samples, found.batch_norm))
    remedy = "Call fit with the same arguments on all ranks."
    world.agree({"The plan of the pipeline": zlib.crc32(text.encode())}, remedy=remedy)
    differing = [call.name for call in calls.calls if call.draws_otherwise]
    if differing and found.schedule.micro_batches > 1 and world.is_master:
        log.warning("Layer %s draws other random numbers than in a single process.", differing[0])
    return found


def _agreed(calls: Calls, example: Sequence[Any], request: Request, world: World) -> Graph:
    """Rank 0's graph, on all ranks."""
    bare = calls.graph()
    samples, micro = len(example[0]), request.micro_batches
    smallest = -(-samples // micro) if micro and micro > 1 else max(samples // 8, 1)
    links = world.links(_copying_us)
    found: list[str] = [""]

    def measure() -> None:
        if world.is_master:
            graph = measured(calls, example, (smallest, samples))
            found[0] = to_json(dataclasses.replace(graph, links=links))

    world.together(measure, **{"The model": zlib.crc32(to_json(bare).encode())})
    return from_json(world.exchange(found[0])[MASTER])


def _copying_us(size: int) -> float:
    source, target, times = np.ones(size, np.uint8), np.empty(size, np.uint8), []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source  # into a slot, and from there into the receiver's
        source[:] = target
        times.append((time.perf_counter() - began) * 1e6)
    return sorted(times)[2] + 20.0  # with the call and the notification


def _free_memory(calls: Calls, world: World) -> list[int]:
    """What each rank has for a stage: of the job's limit, without what the job's processes take already.

    Returns:
        Bytes by rank; 0 on all where one does not know.
    """
    pages.trim()
    world.table([0])  # each rank counts what all have taken
    free = world.table([free_memory_of_rank(sum(p.bytes for p in calls.graph().parameters)) or 0])[:, 0]
    return free.tolist() if free.all() else [0] * world.size


def _devices(memories: Sequence[int], world: World) -> tuple[Device, ...]:
    """What each rank has, by the same work on all; empty where they are alike."""
    if world.size == 1:
        return ()
    world.barrier()  # ranks that share cores work at the same time, as they will in training
    nanoseconds = world.table([max(int(1e6 * _reference_ms()), 1)])[:, 0]
    return devices_of_ranks(nanoseconds.tolist(), memories, world.nodes())


@functools.cache
def _reference_ms() -> float:
    """Measured once in a process, with TensorFlow's threads."""
    tf: Any = import_module("tensorflow")
    matrix = tf.fill((256, 256), 1 / 256)
    return reference_ms(lambda: tf.nn.relu(matrix @ matrix).numpy())


def _with_batch_norm(plan: Plan, calls: Calls, requested: str, world: World) -> Plan:
    """The plan with how BatchNormalization is treated, where there is any."""
    if not any(call.normalises_batches for call in calls.calls):
        return dataclasses.replace(plan, batch_norm="")
    has_several = plan.schedule.micro_batches > 1
    if not requested and has_several and world.is_master:
        log.warning(
            "BatchNormalization: each of the %d micro-batches has its own statistics, so results differ from "
            "those of a single process. Give batch_norm='micro' to accept that, 'exact' to change it.",
            plan.schedule.micro_batches,
        )
    return dataclasses.replace(plan, batch_norm=requested or ("micro" if has_several else "exact"))


class TensorFlowPipeline:
    """A model in stages: this rank's, and what it does together with the others.

    Args:
        calls: The model.
        plan: The one on which all ranks agreed.
        world: All ranks, which make this together.
    """

    def __init__(self, calls: Calls, plan: Plan, world: World) -> None:
        self._tf: Any = import_module("tensorflow")
        self._calls, self._plan, self._world = calls, plan, world
        self._took: list[float] = []
        stages = plan.schedule.ranks
        self.replica, self.stage = divmod(world.rank, stages)
        ranks = list(range(self.replica * stages, (self.replica + 1) * stages))
        world.tidy_mailboxes()
        # All ranks form all groups that they are in, in the same order.
        self._line = world.subset(ranks)
        self._replicas = world.subset(list(range(self.stage, world.size, stages)))
        self._owners = self._holders()
        shared = sorted({tuple(owners) for owners in self._owners.values() if len(owners) > 1})
        self._sharing = {
            owners: world.subset([ranks[stage] for stage in owners])
            for owners in shared
            if self.stage in owners
        }
        self._passes = Passes(calls, plan, world.subset(ranks), ranks)

    @property
    def ends_here(self) -> bool:
        """Whether this rank's stage is the one that computes the loss."""
        return self._plan.schedule.holders[-1] == self.stage

    def owners(self, name: str) -> list[int]:
        """The stages that hold a variable; ranks of the first replica."""
        return self._owners[name]

    def plan(self) -> Plan:
        """How the model is cut, what that is expected to take, and what steps took; print it."""
        if not self._took:
            return self._plan
        return self._plan.after(sorted(self._took)[len(self._took) // 2])

    def close(self) -> None:
        """Give up the memory of messages. All ranks call it together."""
        self._passes.close()

    def step(self, inputs: Sequence[Any], targets: Any, loss: Loss, shares: Sequence[int]) -> dict[str, Any]:
        """Forward and backward passes of a batch.

        Args:
            inputs: What the model is called with; the same on all ranks of a replica.
            targets: Tensors with as many samples, in any structure.
            loss: From outputs and targets of a micro-batch to the mean over its samples.
            shares: Where this replica's samples begin in the batch of all, how many it has, and how many all
                have. If it has none, it takes part with any one sample.

        Returns:
            Gradients of the mean loss over all replicas, by name of this rank's variables.

        Raises:
            InvalidCall: A batch that does not fit the plan.
            PeerLost: Another rank ended.
        """
        began = time.perf_counter()
        self._check(inputs)
        begin, samples, total = shares
        batch = self._batch(inputs, targets, total if samples else 0, loss)
        batch.masks = self._masks(total, begin if samples else 0, [len(i[0]) for i in batch.inputs])
        gradients = self._reduced(self._passes.train(batch))
        self._average_statistics()
        self._took = [*self._took[1 - _LAST_STEPS :], (time.perf_counter() - began) * 1000]
        return gradients

    def outputs(self, inputs: Sequence[Any]) -> list[Any]:
        """What the model makes of any number of samples in evaluation, on all ranks of the pipeline."""
        self._check(inputs)
        return self._everywhere(self._passes.call(self._batch(inputs, None, 0, None))[0])

    def call(self, inputs: Sequence[Any], share: Share) -> list[Any]:
        """The outputs of a batch in training, on all ranks of the pipeline, which call it together.

        They are a function of this rank's variables for the tapes that record this call. When a tape makes
        gradients, on all ranks, the backward passes run.

        Args:
            inputs: What the model is called with; the same on all ranks of a replica.
            share: This replica's part of the batch of all. If it has none, it takes part with any one sample,
                and no gradients come back to its outputs.

        Raises:
            InvalidCall: A batch that does not fit the plan.
            PeerLost: Another rank ended.
        """
        tf = self._tf
        self._check(inputs)
        batch = self._batch(inputs, None, 0, None, training=True)
        sizes = [len(each[0]) for each in batch.inputs]
        batch.masks = self._masks(share.total, share.begin if share.samples else 0, sizes)
        found, held = without_tapes(lambda: self._passes.call(batch))
        outputs, names = self._everywhere(found), self._trained()

        def backward(*gradients: Any) -> list[Any]:
            if not held:
                raise InvalidCall(
                    "A second backward pass through the same outputs of a model in stages is not possible.",
                    "Call the model again, or make the gradients of a sum of the losses.",
                )
            by_name = without_tapes(lambda: self._passes.call_backward(held, sizes, gradients))
            held.clear()
            by_name = self._reduced(by_name)
            self._average_statistics()
            return [None, *(tf.convert_to_tensor(by_name[n]) if n in by_name else None for n in names)]

        @tf.custom_gradient
        def connected(*_: Any) -> Any:
            return outputs, backward

        # A stage may have no variable that a tape knows.
        anchor = tf.Variable(0.0)
        variables = [self._calls.variables[name]._value for name in names]
        return list(connected(*(tf.convert_to_tensor(v) for v in (anchor, *variables))))

    def _trained(self) -> list[str]:
        """Names of this rank's variables that get gradients."""
        return [name for name in self._passes.variables if self._calls.variables[name].trainable]

    def _everywhere(self, found: list[Any]) -> list[Any]:
        """The outputs of the last piece's rank, on all ranks of the pipeline."""
        root, tf = self._plan.schedule.holders[-1], self._tf
        if self._line.size == 1:
            return found
        described = [(part.shape.as_list(), part.dtype.name) for part in found]
        described = self._line.exchange(described)[root]
        outputs = []
        for place, (shape, dtype) in enumerate(described):
            array = found[place].numpy() if self.stage == root else np.empty(shape, np.dtype(dtype))
            array = np.array(array, order="C")
            self._line.broadcast(array.reshape(-1).view(np.uint8), root, "an output")
            outputs.append(tf.convert_to_tensor(array))
        return outputs

    def norm(self, gradients: dict[str, Any]) -> float:
        """The norm of the gradients of all stages."""
        own = [g for name, g in gradients.items() if self._owners[name][0] == self.stage]
        # As Keras has it: of an embedding's gradient, that of its rows.
        squares = sum(float(self._tf.reduce_sum(self._tf.square(getattr(g, "values", g)))) for g in own)
        return float(self._line.add(np.array([squares]), "the norm of gradients")[0]) ** 0.5

    # -- parts

    def _holders(self) -> dict[str, list[int]]:
        """By name of a variable: the stages that hold it."""
        holders: dict[str, set[int]] = {}
        for piece in range(self._plan.pieces.count):
            for name in self._plan.pieces.parameters(piece):
                holders.setdefault(name, set()).add(self._plan.schedule.holders[piece])
        return {name: sorted(holders[name]) for name in self._calls.variables}

    def _check(self, inputs: Sequence[Any]) -> None:
        for name, tensor in zip(self._calls.inputs, inputs, strict=True):
            value = self._plan.graph.value[name]
            if tuple(tensor.shape[1:]) != value.shape[1:] or tensor.dtype.name != value.dtype:
                raise InvalidCall(
                    f"The input {name} has samples of shape {tensor.shape[1:].as_list()} and type "
                    f"{tensor.dtype.name}; in the first batch they had {list(value.shape[1:])} and "
                    f"{value.dtype}.",
                    "Give samples of one shape, or train with ParallelStrategy.DATA.",
                )

    def _batch(
        self,
        inputs: Sequence[Any],
        targets: Any,
        total: int,
        loss: Loss | None,
        *,
        training: bool = False,
    ) -> Batch:
        """The batch in parts. `total` is 0 where it does not count; with a loss it is for training."""
        samples = len(inputs[0])
        if loss is None:
            micro = self._plan.micro_samples
            sizes = [min(micro, samples - at) for at in range(0, samples, micro)]
        else:
            sizes = self._passes.sizes(samples)
        begins = np.cumsum([0, *sizes]).tolist()
        spans = list(zip(begins, sizes, strict=False))
        parts = [[tensor[at : at + size] for tensor in inputs] for at, size in spans]

        def part(leaf: Any, at: int, size: int) -> Any:
            if leaf is None or not leaf.shape.rank or len(leaf) != samples:
                return leaf
            return leaf[at : at + size]

        cut = [keras.tree.map_structure(lambda leaf, s=span: part(leaf, *s), targets) for span in spans]
        shares = [size / total if total else 0.0 for size in sizes]
        rows = [range(at, at + size) for at, size in spans]
        return Batch(parts, cut, shares, [{} for _ in sizes], rows, loss, training or loss is not None)

    def _masks(self, total: int, begin: int, sizes: list[int]) -> list[dict[str, Any]]:
        """Dropout's, by micro-batch; layers that another stage has too draw there alike."""
        masks: list[dict[str, Any]] = [{} for _ in sizes]
        for call in self._calls.dropouts():
            if self.stage not in self._owners[self._calls.seed_of(call)]:
                continue
            drawn = mask_of_batch(call, total, begin, sizes)
            for mask, part in zip(masks, drawn, strict=True):
                if call.name in self._passes.calls:
                    mask[call.name] = part
        return masks

    def _reduced(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """Gradients summed over replicas, and those of shared variables over stages."""
        trained = self._trained()
        if self._replicas.size > 1:
            gradients = self._summed(self._replicas, gradients, trained)
        for owners, group in self._sharing.items():
            # In an order that all of the group have.
            shared = sorted(name for name in trained if tuple(self._owners[name]) == owners)
            gradients |= self._summed(group, gradients, shared)
        return gradients

    def _summed(self, group: World, gradients: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """The sums over a group, without variables for which none of it has a gradient."""
        tf, found = self._tf, {}
        if not names:
            return found
        own = [gradients.get(name) for name in names]
        has = [gradient is not None for gradient in own]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in own]
        table = group.table([*has, *sparse])
        anywhere = table[:, : len(names)].max(axis=0)
        all_sparse = table[:, len(names) :].min(axis=0)
        for place, (name, gradient) in enumerate(zip(names, own, strict=True)):
            if all_sparse[place]:
                found[name] = self._gathered(group, gradient)
            elif anywhere[place]:
                found[name] = self._added(group, gradient, self._calls.variables[name])
        return found

    def _added(self, group: World, gradient: Any, v: Any) -> Any:
        """The sum of a variable's gradients; some may be None or rows."""
        tf = self._tf
        dense = np.zeros(tuple(v.shape), v.value.dtype.as_numpy_dtype) if gradient is None else gradient
        array = np.array(tf.convert_to_tensor(dense).numpy(), order="C")
        if array.dtype.kind != "f" or array.itemsize < 4:
            array = array.astype(np.float32)
        group.add(array.reshape(-1), "gradients")
        return tf.cast(tf.convert_to_tensor(array), v.value.dtype)

    def _gathered(self, group: World, gradient: Any) -> Any:
        """The rows of an embedding's gradient from all ranks of a group."""
        tf = self._tf
        values = np.concatenate(group.concatenate(gradient.values.numpy(), "gradients of rows"))
        numbers = np.concatenate(group.concatenate(gradient.indices.numpy(), "rows with gradients"))
        rows = tf.convert_to_tensor(values), tf.convert_to_tensor(numbers)
        return tf.IndexedSlices(*rows, gradient.dense_shape)

    def _average_statistics(self) -> None:
        """Moving averages are the means of those of the replicas."""
        if self._replicas.size == 1 or not self._plan.batch_norm:
            return
        for name in self._passes.variables:
            v = self._calls.variables[name]
            if not v.trainable and v.name.startswith("moving_"):
                array = np.array(v.value.numpy(), np.float64, order="C")
                self._replicas.add(array.reshape(-1), "moving averages")
                v.assign((array / self._replicas.size).astype(v.value.dtype.as_numpy_dtype))


def without_tapes(work: Callable[[], T]) -> T:
    """Do something that the gradient tapes of this thread do not record."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def request_of(
    wanted: Any,
    calls: Calls,
    samples: int,
    world: World,
    whole: bool,
    stages: int | None,
    state: float,
) -> Request:
    """What is required of the plan.

    Args:
        wanted: See `stages.Wanted`.
        calls: The model.
        samples: Of a batch.
        world: The ranks.
        whole: Whether they are those of all replicas together.
        stages: How many, where that is known.
        state: Bytes that the optimizer keeps for each byte of a parameter.
    """
    marked = calls.stages > 1
    return Request(
        world.size,
        samples,
        stages,
        wanted.micro_batches,
        wanted.schedule,
        cut_points=tuple(calls.cut_points),
        state_factor=state,
        batch_norm=wanted.batch_norm or "",
        strategy=strategies.chosen_strategy(strategies.AUTO if marked else wanted.strategy),
        whole=whole,
    )
