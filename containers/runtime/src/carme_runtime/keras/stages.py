"""Keras models in stages: what replaces the steps of a model that is trained as a pipeline.

What depends on the backend of Keras is in `stages_of_torch` and `stages_of_tensorflow`.
"""

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from carme_runtime import strategies
from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.keras.data import Share, length, same_randomness
from carme_runtime.keras.functional import settings_checksum
from carme_runtime.keras.library import keras
from carme_runtime.keras.losses import CountedLoss, GlobalLoss, ignored_class
from carme_runtime.keras.masks import Carried, OutputMasks, Unknown, attach, carried, mask_of
from carme_runtime.keras.recurrent import stateful_layers, states_of_rows
from carme_runtime.keras.slots import Slots
from carme_runtime.keras.steps import Steps, assign_values, flat_values
from carme_runtime.keras.world import MASTER, World
from carme_runtime.logs import log
from carme_runtime.pipeline import losses
from carme_runtime.pipeline.partition import check_counts


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How a model is to be cut; None: chosen. See `carme_runtime.torch.pipeline`."""

    strategy: str = strategies.AUTO
    stages: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    memory: str | int | None = None
    batch_norm: str | None = None

    def __post_init__(self) -> None:
        check_counts(self.stages, self.micro_batches)


class PipelineSteps(Steps):
    """Steps of a model whose ranks hold a stage each.

    The pipeline is made with the first batch, of the weights that rank 0 has then. From there on a rank's
    variables of other stages, and what the optimizer keeps for them, have no memory; `whole` gives them back
    for a while.

    Args:
        model: The Keras model.
        world: The ranks; this object sets how many of them are a pipeline.
        wanted: How to cut it.
    """

    def __init__(self, model: Any, world: World, wanted: Wanted) -> None:
        super().__init__(model, world)
        self._wanted = wanted
        self._graph = self._graph_of(model)
        self._pipe: Any = None
        self._slots: Slots | None = None
        self.shows_weights = False
        self._exposed = False
        self._part = 1.0  # of a micro-batch in the whole batch
        self._last: Share | None = None  # whose layers keep states
        self.stages = self._known_stages()
        world.stages = self.stages or 1
        model.predict_step = self._predict_step
        model._symbolic_build = self._symbolic_build  # `fit` calls it as well

    def _known_stages(self) -> int | None:
        """The number of stages where it does not depend on what is measured. Raises InvalidCall."""
        size, marked, wanted = self._world.size, self._graph.stages, self._wanted
        if marked > 1:
            whole = marked == size or wanted.strategy != strategies.PIPELINE
            if size % marked or not whole or wanted.strategy == strategies.DATA:
                raise InvalidCall(
                    f"SplitLayers cut the model into {marked} stages, which the strategy {wanted.strategy} "
                    f"cannot put on {size} ranks.",
                    f"Start {marked} ranks, or a multiple of that with ParallelStrategy.ALL.",
                )
            return marked
        if wanted.stages is not None:
            return wanted.stages if size % max(wanted.stages, 1) == 0 else None
        return size if wanted.strategy == strategies.PIPELINE else None

    # -- the pipeline

    def decide(self, samples: int | None) -> bool:
        """Choose the stages for batches of so many samples over all ranks. False: each has the whole model.

        All ranks call it together.
        """
        if self._pipe is None and (self.stages is None or strategies.plans_only()):
            shapes = [(t.shape, t.dtype) for t in self._graph.symbols]
            if samples is None or any(None in shape[1:] for shape, _ in shapes):
                raise InvalidCall(
                    "The number of samples in a batch, or their length, is unknown before training.",
                    "State batch_size and the shapes in keras.Input, or how many `stages` there are.",
                )
            example = [
                keras.ops.zeros((samples, *shape[1:]), keras.backend.standardize_dtype(dtype))
                for shape, dtype in shapes
            ]
            self._make(tuple(example), whole_batch=True)
            self.stages = self.pipe.plan().schedule.ranks
        if self.stages == 1 and self._pipe:
            self.leave()
        return self.stages != 1

    def _pipeline(self, inputs: Any, training: bool = False) -> Any:
        """The pipeline, made again where a batch is larger than those before."""
        if self._pipe and training:
            counts = self._world.table([len(inputs[0])])[:, 0]
            if counts.max() > self._pipe.plan().samples:
                self.leave()
        if self._pipe is None:
            self._make(tuple(inputs), whole_batch=False)
        return self._pipe

    def _make(self, example: tuple[Any, ...], whole_batch: bool) -> None:
        self._graph = self._graph_of(self._model)
        self._graph = self._graph_of(self._model, self._carried(example))
        if len(set(self._world.table([settings_checksum(self._model)])[:, 0].tolist())) > 1:
            raise Mismatch(
                "Ranks have different models: settings of layers differ.",
                "Make the same model on all ranks. Layers need the same names, too.",
            )
        same_randomness(self._world)
        self._pipe = self._build_pipeline(example, whole_batch)
        self._world.stages = self._pipe.plan().schedule.ranks
        self._warn_of_changes()
        known = {id(v) for v in self._graph.variables.values()}
        for v in self._model.variables:
            if id(v) not in known:
                self._give_out(v)
        self._slots = None

    def _warn_of_changes(self) -> None:
        changing, micro_batches = self._graph.carried.changing, self._pipe.plan().schedule.micro_batches
        if changing and micro_batches > 1 and self._world.is_master:
            log.warning(
                "Layer %s changes its variables in each of the %d micro-batches, so results differ from "
                "those of a single process. Use micro_batches=1 to avoid that.",
                changing[0],
                micro_batches,
            )

    def _carried(self, example: tuple[Any, ...]) -> Carried:
        """What the model's calls make besides values."""
        with self._unrecorded():
            return carried(self._graph.recorded, example)

    def _give_out(self, v: Any) -> None:
        """Rank 0's value of a variable."""
        content = self._content(v, True)
        if len(self._bytes_of(content)):
            self._world.broadcast(self._bytes_of(content), MASTER, "a variable")
        self._put(v, content)

    @property
    def pipe(self) -> Any:
        """The pipeline, where it is made."""
        return self._pipe

    def leave(self) -> None:
        """Let all ranks have the whole model again. All ranks call it together."""
        if self._pipe:
            if not self._exposed:
                self._gather(everywhere=True)
            if self._last:
                self._graph.states.spread(self._world, self._last, self._holds)
            self._pipe.close()
        if self._slots:
            self._slots.let_go()
        self._pipe, self._slots, self._exposed = None, None, False

    def _holds(self, layer: Any) -> bool:
        """Whether this rank is the first one of its replica that has a layer."""
        names = {id(v): name for name, v in self._graph.variables.items()}
        return self._pipe.owners(names[id(layer.variables[0])])[0] == self._pipe.stage

    def give_up(self) -> None:
        """See `Steps`."""
        super().give_up()
        self.leave()
        vars(self._model).pop("_symbolic_build", None)

    def recompiled(self) -> None:
        """The model was compiled: other variables may be trained, by another optimizer."""
        self.leave()
        self.restart()

    # -- the whole model for a while

    @contextlib.contextmanager
    def whole(self, everywhere: bool = False, changes: bool = False) -> Iterator[None]:
        """Rank 0, or every rank, has all variables here. `changes`: rank 0's values count afterwards."""
        if self._pipe is None or self._exposed:
            yield
            return
        self._gather(everywhere)
        try:
            yield
        finally:
            if changes:
                self._distribute()
            self._release()

    def expose(self) -> None:
        """Callbacks look at the model now, where there are any that do so."""
        if self._pipe and self.shows_weights and not self._exposed:
            self._gather(everywhere=True)
            self._exposed = True

    def resume(self) -> None:
        """Callbacks have looked; what rank 0's have set holds for all."""
        if self._exposed:
            self._exposed = False
            self._distribute()
            self._release()

    def _parts(self) -> Iterator[tuple[Any, list[int]]]:
        """Variables of model and optimizer, with the stages that hold them."""
        owners = {id(v): self._pipe.owners(name) for name, v in self._graph.variables.items()}
        for v in self._graph.variables.values():
            yield v, owners[id(v)]
        for slot, reference in self._slots.pairs if self._slots else ():
            if id(reference) in owners:
                yield slot, owners[id(reference)]

    def _gather(self, everywhere: bool) -> None:
        retains = everywhere or self._world.is_master
        for v, owners in self._parts():
            holds = self._pipe.stage in owners
            content = self._content(v, holds)
            if len(self._bytes_of(content)):
                self._world.broadcast(self._bytes_of(content), owners[0], "a variable")
            if retains and not holds:
                self._put(v, content)

    def _distribute(self) -> None:
        for v, owners in self._parts():
            content = self._content(v, self._is_whole(v))
            if len(self._bytes_of(content)):
                self._world.broadcast(self._bytes_of(content), MASTER, "a variable")
            if self._pipe.stage in owners:
                self._put(v, content)

    def _release(self) -> None:
        for v, owners in self._parts():
            if self._pipe.stage not in owners:
                self._free(v)

    # -- what each backend does in its own way

    @abstractmethod
    def _graph_of(self, model: Any, carried: Carried | None = None) -> Any:
        """The model as a graph, with its `variables`, `stages`, `symbols`, `inputs_of` and `outputs_of`.

        Its calls are `recorded`, and with what is `carried` they are `flattened`; `states` are of its layers.
        """

    @abstractmethod
    def _build_pipeline(self, example: tuple[Any, ...], whole_batch: bool) -> Any:
        """The pipeline, for batches as large as the example."""

    @abstractmethod
    def _content(self, v: Any, holds: bool) -> Any:
        """A variable's value in one piece of memory; where it is not held, such memory."""

    @abstractmethod
    def _bytes_of(self, content: Any) -> np.ndarray:
        """The same memory as bytes."""

    @abstractmethod
    def _put(self, v: Any, content: Any) -> None:
        """Let a variable have this value."""

    @abstractmethod
    def _free(self, v: Any) -> None:
        """Let a variable have no memory."""

    @abstractmethod
    def _is_whole(self, v: Any) -> bool:
        """Whether it has memory."""

    @abstractmethod
    def _unrecorded(self) -> AbstractContextManager[Any]:
        """Nothing in it gets gradients."""

    @abstractmethod
    def _detached(self, value: Any) -> Any:
        """A value that gets no gradients."""

    @abstractmethod
    def _train_batch(self, data: Any) -> None:
        """A step of training."""

    @abstractmethod
    def _outputs(self, pipe: Any, inputs: Any) -> Any:
        """What the pipeline makes of inputs in evaluation."""

    # -- steps

    def begin(self) -> None:
        """The pipeline is made with the first batch, and gives all ranks the same weights."""
        self._begun = True

    def settle(self) -> None:
        """Replicas have equal moving averages after every step."""

    def _train_step(self, data: Any) -> dict[str, Any]:
        return self._counted(self._train_batch, data, training=True)

    def _test_step(self, data: Any) -> dict[str, Any]:
        return self._counted(self._test_batch, data, training=False)

    def _predict_step(self, data: Any) -> Any:
        share, self.share = self.share, None
        return self._evaluated(keras.utils.unpack_x_y_sample_weight(data)[0], share)[0]

    def _counted(self, step: Callable[[Any], Any], data: Any, training: bool) -> dict[str, Any]:
        """Do a step; metrics are counted where the last stage is."""
        share = self.share or self._undivided(data)
        self.share, self._running = None, share
        model = self._model
        self._prepare(data, training)
        self._begin_rows(share)
        before = flat_values(model.metrics_variables)
        model.reset_metrics()
        step(data)
        variables = model.metrics_variables
        own = self._own_counts(variables)
        if not self._counts:
            own[:] = 0
        if self.wants_local_logs:
            self._keep_local_logs(own, training)
        assign_values(variables, before + self._world.add(own.copy(), "metrics"))
        return dict(model.get_metrics_result())

    @property
    def _counts(self) -> bool:
        """Whether this rank's metrics are those of its replica's share."""
        return bool(self._pipe and self._pipe.ends_here and self._running.samples)

    def _own_counts(self, variables: list[Any]) -> np.ndarray:
        """What this rank's metrics have counted in this step, as it is added over ranks and steps."""
        return flat_values(variables)

    def _undivided(self, data: Any) -> Share:
        lengths = self._world.table([length(data)])[:: self._world.stages, 0]
        return Share(int(lengths[: self._world.part].sum()), length(data), int(lengths.sum()))

    def _prepare(self, data: Any, training: bool) -> None:
        """Make the pipeline, and what Keras makes with the first values, which not all ranks see."""
        self._pipeline(self._graph.inputs_of(keras.utils.unpack_x_y_sample_weight(data)[0]), training)
        self._prepare_optimizer()
        parts = (self._model._compile_metrics, self._model._compile_loss)
        if any(part is not None and not part.built for part in parts):
            self._symbolic_build(data_batch=data)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """What Keras does to make metrics and losses, with a sentence where they do not fit the data."""
        targets = keras.utils.unpack_x_y_sample_weight(data_batch)[1] if data_batch is not None else None
        outputs, flat = self._model.outputs, keras.tree.flatten(targets)
        # A replica's share of a batch has less rows than the layers have states.
        layers = stateful_layers(self._model._flatten_layers(include_self=False))
        with states_of_rows(layers, None), losses.explained(outputs, flat, "The loss or a metric"):
            type(self._model)._symbolic_build(self._model, iterator=iterator, data_batch=data_batch)

    def _begin_rows(self, share: Share | None) -> None:
        """The next batch is this share; see `States.begin`."""
        self._graph.states.begin(share)
        self._last = share or self._last

    def _loss(self, outputs: Any, y: Any, weights: Any, added: float) -> Any:
        """The loss of a micro-batch, of what `outputs_of` made of it, which is counted with its metrics."""
        model = self._model
        y_pred, more = outputs
        samples = length(y_pred)
        self._part = samples / self._running.total
        with losses.explained(keras.tree.flatten(y_pred), keras.tree.flatten(y)):
            value = model._compile_loss(y, y_pred, weights) if model._compile_loss is not None else None
        if value is None and more is None:
            raise InvalidCall("There is no loss.", "Give one to compile().")
        value = sum(part for part in (value, more) if part is not None)
        with self._unrecorded():
            model._loss_tracker.update_state(self._detached(value) + added, sample_weight=samples)
            y_pred = keras.tree.map_structure(self._with_mask, y_pred)
            with losses.explained(keras.tree.flatten(y_pred), keras.tree.flatten(y), "A metric"):
                model.compute_metrics(None, y, y_pred, sample_weight=weights)
        return value

    def _with_mask(self, output: Any) -> Any:
        """An output that gets no gradients, with its mask."""
        detached = self._detached(output)
        attach({0: detached}, {0: mask_of(output)})
        return detached

    def _test_batch(self, data: Any) -> None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self._evaluated(x, self._running)
        self._share_losses()
        if self._weighs:
            self._count(outputs[0], y, weights)
        _, added = self._penalty()
        with self._unrecorded():
            self._loss(outputs, y, weights, added)

    def _evaluated(self, x: Any, share: Share | None) -> tuple[Any, Any]:
        inputs = self._graph.inputs_of(x)
        pipe = self._pipeline(inputs)
        self._begin_rows(share)
        return self._graph.outputs_of(self._outputs(pipe, inputs))

    # -- denominators of losses

    def _share_losses(self) -> None:
        """Wrap the losses of the compiled model; micro-batches count by their samples, or by their masks."""
        entries = self._losses()
        for index, entry in enumerate(entries):
            plain = entry.loss.loss if isinstance(entry.loss, GlobalLoss) else entry.loss
            reduction = getattr(plain, "reduction", "sum_over_batch_size")
            if isinstance(plain, keras.losses.Circle):
                raise InvalidCall(
                    "The loss Circle compares the samples of the whole batch with each other.",
                    "Use another loss, or train one process with Keras alone.",
                )
            if reduction not in ("sum", "sum_over_batch_size", "mean"):
                raise InvalidCall(
                    f"A loss has reduction={reduction!r}, which depends on the whole batch.",
                    "Use 'sum_over_batch_size', or train with ParallelStrategy.DATA.",
                )
            counted = CountedLoss(plain, lambda: self._part if self._running.samples else 0.0)
            entries[index] = entry._replace(loss=counted)

    @property
    def _weighs(self) -> bool:
        """Whether a loss is a mean over what masks let through."""
        ignores = any(ignored_class(entry.loss) is not None for entry in self._losses())
        return bool(self._losses() and (self._graph.carried.results or ignores))

    def _count_before(self, inputs: Any, y: Any, weights: Any) -> None:
        """Count what a batch's losses are divided by, before its outputs are there. Raises InvalidCall."""
        plan, graph = self._pipe.plan(), self._graph
        if not self._weighs or plan.schedule.micro_batches * plan.replicas == 1:
            return
        shapes = [graph.carried.shapes[value] for value in graph.flattened.results]
        with self._unrecorded():
            try:
                masks = OutputMasks(graph.flattened, graph.carried).of(inputs)
            except Unknown:
                raise InvalidCall(
                    "The mask of an output depends on what layers with weights make, so what the loss of the "
                    "whole batch is divided by is unknown while its micro-batches are trained.",
                    "Use micro_batches=1 and one pipeline, mask the inputs, or give sample weights instead.",
                ) from None
            stand_ins = [keras.ops.zeros((len(inputs[0]), *(1 for _ in shape))) for shape in shapes]
            self._count(graph.outputs_of([*stand_ins, *masks])[0], y, weights)

    def _count(self, y_pred: Any, y: Any, weights: Any) -> None:
        """Count what the losses are divided by, over all replicas, which call this together."""
        counted = [entry.loss for entry in self._losses()]
        for loss in counted:
            loss.counting = True
        with self._unrecorded(), losses.explained(keras.tree.flatten(y_pred), keras.tree.flatten(y)):
            self._model._compile_loss(y, y_pred, weights)
        own = np.array([loss.counted if self._counts else 0.0 for loss in counted])
        for loss, whole in zip(counted, self._world.add(own, "denominators of losses").tolist(), strict=True):
            loss.counting, loss.whole = False, whole
        self._model.reset_metrics()  # a model with several outputs has some of them in its losses

    def _penalty(self) -> tuple[Any, float]:
        """What regularizers add for this rank's variables, for their gradients, and for all variables."""
        if not any(v.regularizer is not None for v in self._model.trainable_variables):
            return None, 0.0
        own, counted = [], 0.0
        for name, v in self._graph.variables.items():
            owners = self._pipe.owners(name)
            if v.trainable and v.regularizer is not None and self._pipe.stage in owners:
                own.append(v.regularizer(v.value))
                first = owners[0] == self._pipe.stage and self._pipe.replica == 0
                counted += float(self._detached(own[-1])) if first else 0.0
        whole = float(self._world.add(np.array([counted]), "regularizers")[0])
        return sum(own) if own else None, whole

    # -- the optimizer

    def _prepare_optimizer(self, optimizer_of_loop: Any = None) -> None:
        """Let the optimizer, which is the model's own or that of a loop, keep nothing for other stages."""
        optimizer = optimizer_of_loop or getattr(self._model, "optimizer", None)
        if optimizer is None or (self._slots and self._slots.optimizer is optimizer):
            return
        trained = self._model.trainable_variables
        self._slots = Slots(optimizer, trained, self._world, self._is_whole)
        self._distribute_slots()
        self._release()

    def _distribute_slots(self) -> None:
        assert self._slots
        for v in self._slots.optimizer.variables:
            self._give_out(v)
