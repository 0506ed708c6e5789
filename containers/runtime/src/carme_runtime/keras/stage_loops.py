"""Models in stages that train by loops of a script's own, or by steps of a model's own.

All ranks get the outputs of the whole batch. So losses, metrics, and what else a loop makes of outputs are on
each rank those of a single process, and so are the gradients that come back to the outputs. Gradients of the
variables are summed over replicas in the backward pass.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.data import Share, mark_of, rows, share
from carme_runtime.keras.library import keras
from carme_runtime.keras.optimizer import loop, take_over
from carme_runtime.keras.stages import PipelineSteps, Wanted
from carme_runtime.keras.world import World, ranks

#: What a model may have of its own, for which it is called as by a loop.
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss")


class LoopingSteps(PipelineSteps):
    """See `PipelineSteps`."""

    def __init__(self, model: Any, world: World, wanted: Wanted) -> None:
        super().__init__(model, world, wanted)
        self._has_own = any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _STEPS)
        world.divides = not self._has_own
        self._predict = MethodType(type(model).predict_step, model)

    # -- loops of a script's own

    def check_loop(self) -> None:
        """Raise InvalidCall where a loop that begins cannot train the model."""
        if not loop().expected:
            raise InvalidCall(
                "A loop trains a model in stages, and its optimizer does not know that.",
                "Make it with optimizer = carme_runtime.keras.Optimizer(optimizer), also that of compile().",
            )

    def call(self, inputs: Any, training: Any) -> Any:
        """What the model makes of a batch that all ranks give.

        In training, gradients of a loss of it are those of the model. All ranks call this together, and then
        make gradients, and let the optimizer step.
        """
        if not training:
            return self._evaluated(inputs, None)[0]
        loop().stages.add(self)
        return self._of_whole_batch(inputs, training=True)

    def trains(self, variables: list[Any]) -> bool:
        """Whether some of these are variables of this model, and it is in stages."""
        own = {id(v) for v in self._graph.variables.values()}
        return self._pipe is not None and any(id(v) in own for v in variables)

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Let an optimizer step: see `optimizer.Stages`."""
        names = {id(v): name for name, v in self._graph.variables.items()}
        if outside := [v for v in variables if id(v) not in names]:
            raise InvalidCall(
                f"The optimizer trains {outside[0].path} beside the layers of a model in stages.",
                "Give it the model's trainable_variables only, or train with ParallelStrategy.DATA.",
            )
        if self._slots is not None and self._slots.optimizer is not optimizer:
            raise InvalidCall(
                "Several optimizers train one model in stages.",
                "Use one, or compile the model again for another one, or train with ParallelStrategy.DATA.",
            )
        found = {names[id(v)]: g for v, g in zip(variables, gradients, strict=True) if g is not None}
        if not self._world.table([len(found)]).any():
            raise InvalidCall(
                "No variable of the model in stages has a gradient.",
                "Call the model with training=True, and make gradients of a loss of what it returns.",
            )
        self._prepare_optimizer(optimizer)
        variables_of = self._graph.variables
        self._step(optimizer, {name: g for name, g in found.items() if self._is_whole(variables_of[name])})

    # -- steps of a model's own

    def _train_step(self, data: Any) -> dict[str, Any]:
        return self._own(self._train, data) if self._has_own else super()._train_step(data)

    def _test_step(self, data: Any) -> dict[str, Any]:
        return self._own(self._test, data) if self._has_own else super()._test_step(data)

    def _predict_step(self, data: Any) -> Any:
        return self._own(self._predict, data) if self._has_own else super()._predict_step(data)

    def _own(self, step: Callable[[Any], Any], data: Any) -> Any:
        """A step as the model's class has it, in which calls of the model go through all stages."""
        self.share = None
        optimizer, own = getattr(self._model, "optimizer", None), vars(self._model)
        if optimizer is not None:
            take_over(optimizer)
        loop().stages.add(self)
        if self._pipe is None:
            self._begin_with(data)
        own["call"] = self._called
        try:
            return step(data)
        finally:
            own.pop("call", None)
            own["_losses_override"] = []

    def _begin_with(self, data: Any) -> None:
        """Make the pipeline before the step, in which Keras records a call, and maybe tapes do."""
        try:
            inputs = list(self._graph.inputs_of(keras.utils.unpack_x_y_sample_weight(data)[0]))
        except Exception:  # a step may take other data than the model: it is made with what the model gets
            return
        self._pipeline(rows(inputs, self._share_of(inputs)))

    def _called(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return self._of_whole_batch(inputs, bool(training))

    # -- the whole batch

    def _of_whole_batch(self, x: Any, training: bool) -> Any:
        """What the model makes of a batch that all ranks give: each replica of its share of it."""
        inputs = self._graph.inputs_of(x)
        part = self._share_of(inputs)
        own = rows(list(inputs), part)
        self._pipeline(own, training)
        self._begin_rows(part)
        if training:
            flat = self._trained(own, part)
        else:
            outputs = self._outputs(self._pipe, own)
            flat = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        if self._world.replicas > 1:
            flat = [self._of_replicas(tensor, part) for tensor in flat]
        found, added = self._graph.outputs_of(flat)
        penalty, whole = self._penalty()
        losses = [] if added is None else [added]
        if penalty is not None:
            losses.append(penalty + (whole - float(self._detached(penalty))))
        elif whole:
            losses.append(keras.ops.convert_to_tensor(whole, keras.backend.floatx()))
        # What the model's `losses` are: its layers have those of this rank's stage alone.
        vars(self._model)["_losses_override"] = losses
        return found

    def _share_of(self, inputs: Sequence[Any]) -> Share:
        """This replica's share of a batch that is the same on all ranks. Raises InvalidCall."""
        total = len(inputs[0])
        table = self._world.table([total, mark_of(list(inputs))])
        differing = np.flatnonzero((table != table[0]).any(1)).tolist()
        if differing:
            raise InvalidCall(
                f"{ranks(differing)} gave a model in stages another batch than rank 0.",
                "Give all ranks the whole batch: carme_runtime.keras.data.Dataset(..., num_ranks=1), and "
                "what a step draws at random by a keras.random.SeedGenerator.",
            )
        return share(total, self._world.replica, self._world.replicas)

    def _of_replicas(self, tensor: Any, part: Share) -> Any:
        """An output of all replicas' shares; gradients come back to that of this one, which may be empty."""
        tensor = tensor[: part.samples]
        array = np.array(keras.ops.convert_to_numpy(self._detached(tensor)), order="C")
        # All ranks of a replica have the same.
        outputs = self._world.concatenate(array if self._pipe.stage == 0 else array[:0], "outputs")
        whole = np.concatenate(outputs[:: self._world.stages])
        end = part.begin + part.samples
        before, behind = (
            keras.ops.convert_to_tensor(rest, tensor.dtype) for rest in (whole[: part.begin], whole[end:])
        )
        return keras.ops.concatenate([before, tensor, behind], axis=0)

    # -- what each backend does in its own way

    @abstractmethod
    def _trained(self, inputs: Sequence[Any], part: Share) -> list[Any]:
        """The outputs of this replica's share in training, on all of its ranks.

        Gradients of the whole batch's loss that come to them go back through all stages.
        """

    @abstractmethod
    def _step(self, optimizer: Any, gradients: dict[str, Any]) -> None:
        """Let the optimizer take these gradients of this rank's variables, by name."""
