"""What a rank does with its share of a batch, so that losses and metrics are those of the whole batch."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import numpy as np

from carme_runtime.keras.data import Share, length
from carme_runtime.keras.library import keras
from carme_runtime.keras.losses import WEIGHTS, GlobalLoss
from carme_runtime.keras.optimizer import as_they_are, reducing, take_over
from carme_runtime.keras.streaming import Streamed
from carme_runtime.keras.sums import eagerly
from carme_runtime.keras.variables import SEEDS, compare, give_out, make_equal
from carme_runtime.keras.world import World

VALIDATION = "val_"  # before the names of logs


class Steps:
    """Replaces the steps of a Keras model's trainer.

    The state of Keras' metrics are sums over samples: each rank's part of a step is counted from zero, added
    over ranks, and laid upon what was there. So the state is the same on all ranks after every step.

    Args:
        model: The Keras model, whose `train_step` and `test_step` are replaced on this instance.
        world: The ranks.
        streams: Whether weights travel while the first training step runs.
    """

    def __init__(self, model: Any, world: World, streams: bool = False) -> None:
        self._model, self._world = model, world
        self._streams = streams and world.size > 1
        self._arrivals: Any = None
        self._gradients: Any = None
        self._begun = False
        self._settled = True
        self.in_loop = False
        self.share: Share | None = None
        self._running = Share(0, 0, 0)
        self.wants_local_logs = False
        self._local: dict[str, np.ndarray] = {}
        self._local_logs: dict[str, Any] = {}
        before = getattr(vars(model).get("train_step"), "__self__", None)
        if isinstance(before, Steps):
            before.give_up()
        # The class's own: the model may have been given to another object of this kind before.
        self._train = MethodType(type(model).train_step, model)
        self._test = MethodType(type(model).test_step, model)
        model.train_step, model.test_step = self._train_step, self._test_step
        model.predict_step = MethodType(type(model).predict_step, model)

    def take(self, share: Share) -> None:
        """The next step is over this share."""
        self.share = share

    def restart(self) -> None:
        """The model was compiled, or is trained anew: make the ranks equal before the next training step."""
        self._begun = False

    def build(self, data: Any) -> None:
        """Keras' torch trainer makes the model's variables by itself, with its first batch."""

    @property
    def begun(self) -> bool:
        """Whether the ranks are equal."""
        return self._begun

    def begin(self) -> None:
        """Make the ranks equal, and take over the gradients. The model is built."""
        self._begun = True
        if self._world.size > 1:
            from carme_runtime.keras.gradients import Gradients

            variables = self._variables()
            compare(self._world, variables)
            self._gradients = self._gradients or Gradients()
            if self._streams:
                self._stream()
            sent = self._gradients.attach(self._model, self._arrivals)
            if not self._arrivals:
                # Seeds do not stay as they were sent.
                give_out(self._world, [v for v in variables if v.name == SEEDS or id(v.value) not in sent])
            for optimizer in optimizers(self._model):
                take_over(optimizer)

    def _stream(self) -> None:
        """Let the weights travel while the next training step runs, which is the first one."""
        from carme_runtime.torch.arrivals import Arrivals

        self._streams = False
        streamed = self._streamed_variables()
        self._arrivals = Arrivals(self._model)
        for v in streamed.variables:
            # Who needs it here waits; what leaves the master rank is a copy.
            fetch = functools.partial(streamed.wait_for, [v])
            if self._world.is_master:
                self._arrivals.leave(fetch)
            else:
                self._arrivals.travel([v.value], fetch)

    def _streamed_variables(self) -> Streamed:
        own = set(map(id, weights := self._model.weights))
        return Streamed(self._world, weights, [v for v in self._variables() if id(v) not in own])

    def give_up(self) -> None:
        """Leave the model whole, and to run as it was compiled, to another object of this kind.

        All ranks call it together.
        """
        self.arrive()
        if self._gradients:
            self._gradients.detach()
        losses = self._losses()
        for index, entry in enumerate(losses):
            if isinstance(entry.loss, GlobalLoss):
                losses[index] = entry._replace(loss=entry.loss.loss)

    def arrive(self) -> None:
        """Wait for all weights that travel."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals:
            arrivals.wait_all()
            arrivals.remove()

    def enter_loop(self, arguments: Any, keywords: dict[str, Any]) -> None:
        """A loop of the script's own trains the model from now on: make the ranks equal.

        The loop calls the model with these arguments; their shapes and types count if it is not built.
        """
        self.in_loop = True
        with eagerly():
            if not self._model.built:
                alike = keras.tree.map_structure(_zeros, (arguments, keywords | {"training": False}))
                self._model(*alike[0], **alike[1])
            make_equal(self._world, list(self._model.variables))

    def settle(self) -> None:
        """Give all ranks the mean of what the ranks have gathered on the way, such as moving averages."""
        if self._settled and not self.in_loop:  # a step in a graph of the script's own does not come by here
            return
        self._settled = True
        moving = [v for v in self._model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
        if not moving:
            return
        mean = self._world.add(flat_values(moving), "moving averages") / self._world.size
        assign_values(moving, mean)

    def expose(self) -> None:
        """Callbacks look at the model now; each rank has all of it anyway."""

    def resume(self) -> None:
        """Callbacks have looked."""

    def recompiled(self) -> None:
        """The model was compiled."""
        self.restart()

    def whole(self, everywhere: bool = False, changes: bool = False) -> AbstractContextManager[None]:
        """The model is whole here, on rank 0 or everywhere, and may change; each rank has all anyway."""
        return nullcontext()

    def keep_local_logs(self, wanted: bool) -> None:
        """Whether a callback wants this rank's own logs."""
        self.wants_local_logs = wanted

    def forget_local_logs(self, prefix: str) -> None:
        """Count this rank's own logs from zero: those of training, or those with the prefix `val_`."""
        self._local.pop(prefix, None)

    def localize(self, logs: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The logs with the values of this rank alone, where it has them; it has them with the prefix."""
        return {name: self._local_logs.get(prefix + name, value) for name, value in logs.items()}

    def _results(self, counted: np.ndarray, prefix: str) -> dict[str, float]:
        """What the metrics make of these values of their variables, in which they are left."""
        assign_values(self._model.metrics_variables, counted)
        metrics = self._model.get_metrics_result()
        return {prefix + name: float(value) for name, value in metrics.items()}

    # -- steps

    def _train_step(self, data: Any) -> dict[str, Any]:
        if not self._begun:
            self.begin()
        self._settled = self._world.size == 1
        return self._counted(self._train, data, training=True)

    def _test_step(self, data: Any) -> dict[str, Any]:
        return self._counted(self._test, data, training=False)

    def _counted(self, step: Callable[[Any], Any], data: Any, training: bool) -> dict[str, Any]:
        if self._world.size == 1:
            return step(data)
        share = self.share or self._undivided(data)
        self.share = None
        if training:
            self._gradients.expect(share)
        self._running = share
        self._share_losses()
        model = self._model
        before = {id(v): _copy(v) for v in model.metrics_variables}
        model.reset_metrics()
        travelling = self._arrivals.looking(None) if self._arrivals else nullcontext()
        try:
            with reducing(as_they_are), travelling:
                logs = step(data)
        finally:
            self.arrive()
            if training:
                self._gradients.rest()
        variables = model.metrics_variables
        own = flat_values(variables)
        if share.samples == 0:
            own[:] = 0
        if self.wants_local_logs:
            self._keep_local_logs(own, training)
        earlier = np.concatenate([before.get(id(v), np.zeros(_count(v))) for v in variables] or [np.zeros(0)])
        assign_values(variables, earlier + self._world.add(own.copy(), "metrics"))
        return self._logs(logs, share)

    def _undivided(self, data: Any) -> Share:
        """What a batch is that did not come through `Shares`: all of it is this rank's."""
        lengths = self._world.table([length(data)])[:, 0]
        return Share(int(lengths[: self._world.rank].sum()), length(data), int(lengths.sum()))

    def _logs(self, logs: dict[str, Any], share: Share) -> dict[str, Any]:
        """The logs of the whole batch; what is not a metric is averaged by samples."""
        metrics = self._model.get_metrics_result()
        averaged = [name for name in logs if name not in metrics]
        if not averaged:
            return {name: metrics[name] for name in logs}
        values = np.array([float(logs[name]) for name in averaged], np.float64)
        parts = values * share.samples if share.samples else np.zeros_like(values)
        mean = self._world.add(parts, "logs") / share.total
        whole = dict(zip(averaged, mean.tolist(), strict=True))
        return {name: whole[name] if name in whole else metrics[name] for name in logs}

    def _keep_local_logs(self, own: np.ndarray, training: bool) -> None:
        prefix = "" if training else VALIDATION
        saved = self._local.get(prefix)
        self._local[prefix] = whole = own.copy() if saved is None else saved + own
        self._local_logs |= self._results(whole, prefix)

    def _losses(self) -> list[Any]:
        """The losses of the compiled model, as Keras lists them."""
        return getattr(getattr(self._model, "_compile_loss", None), "_flat_losses", None) or []

    def _share_losses(self) -> None:
        """Wrap the losses of the compiled model, which Keras builds with its first batch."""
        losses = self._losses()
        for index, entry in enumerate(losses):
            plain = entry.loss.loss if isinstance(entry.loss, GlobalLoss) else entry.loss
            losses[index] = entry._replace(loss=GlobalLoss(plain, self._factor))

    def _factor(self, kind: int, weight: Any, value: Any) -> Any:
        """See `GlobalLoss`, for the step that runs."""
        share = self._running
        part = share.samples / share.total
        if kind == WEIGHTS:
            own = float(weight) if share.samples else 0.0
            whole = float(self._world.add(np.array([own]), "the denominator of a loss")[0])
            return own / whole / part if own else 0.0
        return 1 / part if part else 0.0

    # -- the beginning

    def _variables(self) -> list[Any]:
        """Those of model and optimizers."""
        model = self._model
        return [*model.variables, *(v for optimizer in optimizers(model) for v in optimizer.variables)]


def optimizers(model: Any) -> list[Any]:
    """That which the model was compiled with, and those in its attributes, which its own steps use."""
    looked_at: dict[int, Any] = {}  # by identity: lists may hold each other
    waiting = [model.optimizer, vars(model)]
    for value in waiting:
        if id(value) in looked_at:
            continue
        looked_at[id(value)] = value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return [value for value in looked_at.values() if isinstance(value, keras.optimizers.Optimizer)]


def _zeros(argument: Any) -> Any:
    """What is like a tensor that may stand in a graph, where it has no values yet."""
    if not hasattr(argument, "shape"):
        return argument
    return keras.ops.zeros([length or 1 for length in argument.shape], argument.dtype)


def _count(variable: Any) -> int:
    return int(np.prod(tuple(variable.shape), dtype=np.int64))


def _copy(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value), np.float64).reshape(-1)


def flat_values(variables: list[Any]) -> np.ndarray:
    """The values of all, one after the other."""
    return np.concatenate([_copy(v) for v in variables] or [np.zeros(0)])


def assign_values(variables: list[Any], values: np.ndarray) -> None:
    """Give all their values, laid one after the other."""
    begin = 0
    for v in variables:
        part = values[begin : begin + _count(v)]
        v.assign(part.reshape(tuple(v.shape)).astype(keras.backend.standardize_dtype(v.dtype)))
        begin += _count(v)
