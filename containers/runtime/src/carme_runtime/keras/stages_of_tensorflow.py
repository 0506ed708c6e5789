"""Keras models in stages on the TensorFlow backend.

Keras' trainer runs these steps as they are, without a graph around them; each piece of the model is a graph
of its own.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np

from carme_runtime import strategies
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.keras.calls import Calls
from carme_runtime.keras.data import Share
from carme_runtime.keras.library import keras
from carme_runtime.keras.masks import Carried
from carme_runtime.keras.optimizer import as_they_are, reducing
from carme_runtime.keras.stage_loops import LoopingSteps
from carme_runtime.keras.stages import Wanted
from carme_runtime.keras.tensorflow_passes import sum_of_gradients
from carme_runtime.keras.tensorflow_pipeline import TensorFlowPipeline, agreed_plan, request_of, without_tapes
from carme_runtime.keras.world import World


class TensorFlowPipelineSteps(LoopingSteps):
    """See `PipelineSteps`."""

    def __init__(self, model: Any, world: World, wanted: Wanted) -> None:
        self._tf: Any = import_module("tensorflow")
        super().__init__(model, world, wanted)
        self._compiled_as: Any = None  # what Keras makes anew each time that a model is compiled
        self._was_eager = False
        self._run_eagerly()

    def recompiled(self) -> None:
        """The model was compiled, which sets how it runs."""
        super().recompiled()
        self._run_eagerly()

    def build(self, data: Any) -> None:
        """The model is built; it may have been compiled, or run by somebody else, meanwhile."""
        self._run_eagerly()

    def give_up(self) -> None:
        """See `Steps`. It runs as it was compiled."""
        super().give_up()
        self._note_compilation()
        self._model.run_eagerly = self._was_eager
        self._forget_functions()

    def _note_compilation(self) -> None:
        """How the model runs by itself, where it has been compiled since then."""
        tracker = self._model._loss_tracker
        if self._compiled_as is None or tracker is not self._compiled_as[0]:
            self._compiled_as, self._was_eager = (tracker,), self._model.run_eagerly

    def _run_eagerly(self) -> None:
        self._note_compilation()
        self._model.run_eagerly, self._model.jit_compile = True, False
        self._forget_functions()

    def _forget_functions(self) -> None:
        """Let Keras' trainer make its functions anew. They must stay while it is at work."""
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    def _graph_of(self, model: Any, carried: Carried | None = None) -> Calls:
        return Calls(model, carried)

    def _build_pipeline(self, example: tuple[Any, ...], whole_batch: bool) -> TensorFlowPipeline:
        wanted, world = self._wanted, self._world
        state = _state_factor(getattr(self._model, "optimizer", None))
        stages = self.stages or wanted.stages
        request = request_of(wanted, self._graph, len(example[0]), world, whole_batch, stages, state)
        try:
            plan = without_tapes(lambda: agreed_plan(self._graph, example, request, wanted.memory, world))
        except CarmeRuntimeError as error:
            if strategies.plans_only():
                strategies.refuse_plan(error, world.rank)
            raise
        if strategies.plans_only():
            strategies.show_plan(str(plan), world.rank)
        pipe = TensorFlowPipeline(self._graph, plan, world)
        for name, v in self._graph.variables.items():
            self._give_out(v)
            if pipe.stage not in pipe.owners(name):
                self._free(v)
        return pipe

    def _content(self, v: Any, holds: bool) -> np.ndarray:
        if holds:
            return np.array(v.value.numpy(), order="C")
        return np.empty(tuple(v.shape), v.value.dtype.as_numpy_dtype)

    def _bytes_of(self, content: np.ndarray) -> np.ndarray:
        return content.reshape(-1).view(np.uint8)

    def _put(self, v: Any, content: np.ndarray) -> None:
        # The variable may have no memory now, so its shape is not compared.
        value = self._tf.convert_to_tensor(content)
        self._tf.raw_ops.AssignVariableOp(resource=v.value.handle, value=value)

    def _free(self, v: Any) -> None:
        self._put(v, np.empty((0,), v.value.dtype.as_numpy_dtype))

    def _is_whole(self, v: Any) -> bool:
        shape = self._tf.raw_ops.VariableShape(input=v.value.handle)
        return tuple(shape.numpy().tolist()) == tuple(v.shape)

    def _unrecorded(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _detached(self, value: Any) -> Any:
        return self._tf.stop_gradient(value)

    def _outputs(self, pipe: TensorFlowPipeline, inputs: Any) -> Any:
        return pipe.outputs(inputs)

    def _own_counts(self, variables: list[Any]) -> np.ndarray:
        """See `PipelineSteps`. The losses of each of several outputs count by batches, as in Keras' graphs.

        These do not know how many samples a batch has when they are made.
        """
        own, compiled = super()._own_counts(variables), self._model._compile_loss
        if self._was_eager or compiled is None:
            return own
        by_batch = {id(v) for metric in compiled.metrics for v in metric.variables}
        parts = [1 / self._running.total if id(v) in by_batch else 1.0 for v in variables]
        return own * np.repeat(parts, [int(np.prod(tuple(v.shape), dtype=np.int64)) for v in variables])

    def _train_batch(self, data: Any) -> None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        self._share_losses()
        with self._tf.GradientTape() as tape:
            penalty, added = self._penalty()

        def loss(outputs: Any, target: Any) -> Any:
            targets, weighted = target
            return self._loss(self._graph.outputs_of(outputs), targets, weighted, added)

        y, weights = keras.tree.map_structure(_tensor, (y, weights))
        inputs = self._graph.inputs_of(x)
        self._count_before(inputs, y, weights)
        share = self._running
        parts = (share.begin, share.samples, share.total)
        gradients = self._pipe.step(inputs, (y, weights), loss, parts)
        if penalty is not None:
            own = [name for name, v in self._graph.variables.items() if v.trainable and v.regularizer]
            own = [name for name in own if self._pipe.stage in self._pipe.owners(name)]
            added_to = tape.gradient(penalty, [self._graph.variables[name] for name in own])
            for name, more in zip(own, added_to, strict=True):
                if more is not None:
                    gradients[name] = sum_of_gradients(gradients.get(name), more)
        self._step(self._model.optimizer, gradients)

    def check_loop(self) -> None:
        """See `LoopingSteps`."""
        super().check_loop()
        if not self._tf.executing_eagerly():
            raise InvalidCall(
                "A loop calls a model in stages within tf.function, whose graph is on one rank.",
                "Leave tf.function out: each stage is a graph of its own.",
            )

    def _trained(self, inputs: Sequence[Any], part: Share) -> list[Any]:
        return self._pipe.call(inputs, part)

    def _prepare_optimizer(self, optimizer_of_loop: Any = None) -> None:
        optimizer = optimizer_of_loop or getattr(self._model, "optimizer", None)
        if optimizer is not None and optimizer.gradient_accumulation_steps:
            raise InvalidCall(
                f"{type(optimizer).__name__} has gradient_accumulation_steps, which a pipeline cannot on "
                "Keras' TensorFlow backend.",
                "Leave it out and use larger batches in more micro-batches, or use the torch backend.",
            )
        super()._prepare_optimizer(optimizer_of_loop)

    def _step(self, optimizer: Any, gradients: dict[str, Any]) -> None:
        if optimizer.global_clipnorm:
            norm = self._pipe.norm(gradients)
            scale = min(1.0, optimizer.global_clipnorm / max(norm, 1e-30))
            # An embedding's rows become a tensor by that, in Keras too.
            tensors = {name: self._tf.convert_to_tensor(g) for name, g in gradients.items()}
            gradients = {name: t * self._tf.cast(scale, t.dtype) for name, t in tensors.items()}
        own = [self._graph.variables[name] for name in gradients]
        with reducing(as_they_are):
            if own:
                optimizer.apply(list(gradients.values()), own)
            elif self._slots:
                self._slots.count_step()


def _tensor(value: Any) -> Any:
    """What micro-batches can be cut of."""
    return value if value is None else keras.ops.convert_to_tensor(value)


def _state_factor(optimizer: Any) -> float:
    """Bytes that an optimizer keeps for each byte of a parameter."""
    own = float(bool(optimizer.momentum)) if isinstance(optimizer, keras.optimizers.SGD) else 2.0
    return own + float(bool(getattr(optimizer, "use_ema", False)))
