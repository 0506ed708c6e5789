"""The same as `steps` where TensorFlow runs a step as a graph."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from carme_runtime.keras.data import Share, Shares
from carme_runtime.keras.library import keras
from carme_runtime.keras.losses import WEIGHTS
from carme_runtime.keras.optimizer import reducing, take_over
from carme_runtime.keras.steps import VALIDATION, Steps, assign_values, flat_values, optimizers
from carme_runtime.keras.streaming import is_all_of_keras
from carme_runtime.keras.sums import GraphSums, eagerly
from carme_runtime.keras.variables import compare, make_equal
from carme_runtime.keras.world import World


class GraphSteps(Steps):
    """Steps whose exchanges are nodes of the graph.

    TensorFlow runs such nodes in the order in which they were made, which is the same on all ranks, and each
    as soon as its inputs are there: the gradients of the last layers are reduced while backpropagation goes
    on.
    """

    def __init__(self, model: Any, world: World, streams: bool = False) -> None:
        super().__init__(model, world, streams)
        self._tf: Any = import_module("tensorflow")
        self._sums = GraphSums(world)
        self._of_total = self._sums.of_total
        self._waiting_layers: list[Any] = []  # whose calls wait for their variables
        self._travels: Any = None  # a variable of the graph: whether something does
        self._local_counts: dict[str, Any] = {}  # what this rank has counted, as variables of the graph
        self._keeps = False
        model.train_function = model.test_function = None

    def take(self, share: Share) -> None:
        """The next step is over this share."""
        self._leave_layers()
        self._sums.take(share.samples, share.total)
        self._settled = self._world.size == 1

    def build(self, data: Any) -> None:
        """Make the model's variables for data like these, before the graph is made."""
        if self._world.size > 1:
            # XLA has no node that leaves the graph, and Keras takes XLA by itself where there is a GPU. All
            # that makes a graph with such nodes comes here before.
            self._model.jit_compile = False
        if _only_steps_call(self._model):
            return
        if isinstance(data, Shares):
            data = data.example()
        self._model._symbolic_build(data_batch=data)

    def keep_local_logs(self, wanted: bool) -> None:
        """Whether a callback wants this rank's own logs: then the graph is another."""
        super().keep_local_logs(wanted)
        if wanted != self._keeps:
            self._keeps = wanted
            self._model.train_function = self._model.test_function = None

    def forget_local_logs(self, prefix: str) -> None:
        """Count this rank's own logs from zero: those of training, or those with the prefix `val_`."""
        if prefix in self._local_counts:
            self._local_counts[prefix].assign(self._tf.zeros_like(self._local_counts[prefix]))

    def localize(self, logs: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The logs with the values of this rank alone, where it has them; it has them with the prefix."""
        whole = flat_values(self._model.metrics_variables)
        own: dict[str, float] = {}
        for kind, saved in self._local_counts.items():
            own |= self._results(saved.numpy(), kind)
        assign_values(self._model.metrics_variables, whole)
        return {name: own.get(prefix + name, value) for name, value in logs.items()}

    def begin(self) -> None:
        """Make the ranks equal, and take over the gradients."""
        self._begun = True
        if self._world.size == 1:
            return
        if self._streams:
            compare(self._world, self._variables())
            self._stream()
        else:
            make_equal(self._world, self._variables())
        for optimizer in optimizers(self._model):
            take_over(optimizer)

    def _stream(self) -> None:
        """Let the weights travel while the graph of the first training step is made, and runs."""
        self._streams = False
        self._arrivals = self._streamed_variables()
        if not is_all_of_keras(self._model):
            self.arrive()
            return
        with eagerly():
            self._travels = self._tf.Variable(True, trainable=False)
        travelling = set(map(id, self._arrivals.variables))
        for layer in self._model._flatten_layers(include_self=False):
            own = [*layer._trainable_variables, *layer._non_trainable_variables]
            if own := [v for v in own if id(v) in travelling]:
                vars(layer)["call"] = self._waiting(layer.call, own)
                self._waiting_layers.append(layer)

    def _waiting(self, call: Callable[..., Any], variables: list[Any]) -> Callable[..., Any]:
        """A layer's call that begins when its variables are there."""
        tf = self._tf

        def wait() -> np.ndarray:
            arrivals = self._arrivals
            if arrivals:
                arrivals.wait_for(variables)
                if not arrivals.travelling:
                    self._travels.assign(False)
            return np.zeros((), np.int32)

        def waiting(*arguments: Any, **keywords: Any) -> Any:
            # The node stays in the graph. Once all is there, it costs a look at a variable.
            node = tf.cond(
                self._travels,
                lambda: tf.numpy_function(wait, [], tf.int32),
                lambda: tf.constant(0, tf.int32),
            )
            with tf.control_dependencies([node]):
                return call(*arguments, **keywords)

        return waiting

    def _leave_layers(self) -> None:
        """Give layers their own calls back when all weights are there."""
        if self._waiting_layers and not (self._arrivals and self._arrivals.travelling):
            for layer in self._waiting_layers:
                vars(layer).pop("call", None)
            self._waiting_layers.clear()
            self._arrivals = None

    def arrive(self) -> None:
        """Wait for all weights that travel."""
        if self._arrivals:
            self._arrivals.wait_all()
            if self._waiting_layers:
                self._travels.assign(False)
        self._leave_layers()

    def settle(self) -> None:
        """Callbacks or other calls look at the model."""
        self.arrive()
        super().settle()

    def _train_step(self, data: Any) -> dict[str, Any]:
        return self._counted(self._train, data, training=True)

    def _counted(self, step: Callable[[Any], Any], data: Any, training: bool) -> dict[str, Any]:
        if self._world.size == 1:
            return self._counted_alone(step, data)
        tf, model = self._tf, self._model
        self._share_losses()
        variables = model.metrics_variables
        before = [tf.identity(v.value) for v in variables]
        model.reset_metrics()
        with reducing(self._sums.reduced):
            logs = step(data)
        if variables:
            own = self._counting(self._by_share(variables, self._of_total[0] / self._of_total[1]))
            if self.wants_local_logs:
                self._keep(own, "" if training else VALIDATION)
            whole = self._sums.sum(own, "metrics")
            parts = tf.split(whole, [int(np.prod(tuple(v.shape), dtype=np.int64)) for v in variables])
            for v, earlier, part in zip(variables, before, parts, strict=True):
                v.assign(earlier + tf.cast(tf.reshape(part, v.shape), v.dtype))
        metrics = model.get_metrics_result()
        averaged = {name: value for name, value in logs.items() if name not in metrics}
        if averaged:
            samples, total = tf.unstack(self._of_total)
            values = tf.stack([tf.cast(value, "float64") for value in averaged.values()])
            values = self._sums.sum(tf.where(samples > 0, values * samples, 0.0), "logs") / total
            averaged = dict(zip(averaged, tf.unstack(values), strict=True))
        return {name: averaged[name] if name in averaged else metrics[name] for name in logs}

    def _keep(self, own: Any, prefix: str) -> None:
        if prefix not in self._local_counts or self._local_counts[prefix].shape != own.shape:
            with self._tf.init_scope():
                self._local_counts[prefix] = self._tf.Variable(
                    np.zeros(own.shape), trainable=False, dtype="float64"
                )
        self._local_counts[prefix].assign_add(own)

    def _counting(self, values: list[Any]) -> Any:
        """Values in one vector; zeros where this rank's share is empty."""
        tf = self._tf
        flat = tf.concat([tf.reshape(tf.cast(value, "float64"), [-1]) for value in values], 0)
        return tf.where(self._of_total[0] > 0, flat, 0.0)

    def _counted_alone(self, step: Callable[[Any], Any], data: Any) -> dict[str, Any]:
        """The same on one rank, where only the losses of several outputs do not count as they should."""
        tf, model = self._tf, self._model
        metrics = [] if model._compile_loss is None else model._compile_loss.metrics
        if model.run_eagerly or not metrics:
            return step(data)
        variables = [v for metric in metrics for v in metric.variables]
        before = [tf.identity(v.value) for v in variables]
        for metric in metrics:
            metric.reset_state()
        logs = step(data)
        whole_batch = tf.ones((), "float64")
        for v, earlier, own in zip(variables, before, self._by_share(variables, whole_batch), strict=True):
            v.assign(earlier + tf.cast(own, v.dtype))
        return logs | {name: value for name, value in model.get_metrics_result().items() if name in logs}

    def _by_share(self, variables: list[Any], part: Any) -> list[Any]:
        """Values of metrics; of the losses of several outputs each step counts as this part of a batch.

        Keras counts them by samples where a graph knows how many these are, and else each step as one. A
        graph knows the samples of the first batch only, which are others on each rank. So all count as in
        Keras' graphs of data sets, by batches. Where no graph is made, Keras counts by samples.
        """
        tf, compiled = self._tf, self._model._compile_loss
        if self._model.run_eagerly or compiled is None:
            return variables
        counts = {id(v): metric.count for metric in compiled.metrics for v in metric.variables}
        values: list[Any] = []
        for v in variables:
            if id(v) in counts:
                value_and_count = (tf.cast(each.value, "float64") for each in (v, counts[id(v)]))
                values.append(part * tf.math.divide_no_nan(*value_and_count))
            else:
                values.append(v)
        return values

    def _factor(self, kind: int, weight: Any, value: Any) -> Any:
        """See `GlobalLoss`, for the step that runs."""
        tf = self._tf
        part = self._of_total[0] / self._of_total[1]
        if kind == WEIGHTS:
            own = self._counting([weight])[0]
            whole = self._sums.sum(own[None], "the denominator of a loss")[0]
            return tf.cast(tf.math.divide_no_nan(own, whole * part), value.dtype)
        return tf.cast(tf.math.divide_no_nan(tf.ones_like(part), part), value.dtype)


def _only_steps_call(model: Any) -> bool:
    """Whether a model is nothing but its own steps with built layers, as adversarial networks are."""
    layers = model._flatten_layers(include_self=False)
    return type(model).call is keras.Model.call and all(layer.built for layer in layers)


def steps(model: Any, world: World, streams: bool = False) -> Steps:
    """What the backend of Keras takes."""
    kind = GraphSteps if keras.backend.backend() == "tensorflow" else Steps
    return kind(model, world, streams)
