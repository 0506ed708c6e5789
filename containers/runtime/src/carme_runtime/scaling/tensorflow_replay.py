"""A training step of a Keras model on TensorFlow, made again with smaller batches."""

# pyright: reportMissingImports=false

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from carme_runtime.graph import Timing
from carme_runtime.pipeline.memory import memory_of_rank
from carme_runtime.scaling.ending import lacks_memory
from carme_runtime.scaling.errors import ScalingError
from carme_runtime.scaling.profiles import Gradient, Memory
from carme_runtime.scaling.sampling import batches, shares, split_whole, timings

_ROUNDS, _LEAST_ROUNDS = 25, 3
_PASSES = 5  # in which it is measured when gradients are complete
_FOR_PASSES = 0.8  # of the time; the rest is for the moments of gradients
_GPU = "GPU"

#: Milliseconds of a step, and of its forward pass by itself where that can be made.
Run = tuple[float, float | None]


class TensorFlowStep:
    """A step of a model that Keras trains.

    Args:
        model: Compiled, and trained for some steps.
        data: Of one step, as its `train_step` gets it.
        batch: Samples of it.
    """

    def __init__(self, model: Any, data: Any, batch: int) -> None:
        import keras
        import tensorflow as tf

        self._tf, self._keras = tf, keras
        self.model, self._data, self._batch = model, data, batch
        self._compiles = bool(model.jit_compile)
        self._is_eager = bool(model.run_eagerly)
        #: Whether it has Keras' own `train_step`, whose passes can be measured one by one.
        self.has_parts = type(model).train_step is _train_step_of_keras()
        self.parameters: list[Any] = list(model.trainable_variables)
        self.gpu = next(iter(tf.config.list_logical_devices(_GPU)), None)
        self._passes_by_size: dict[int, Callable[[Any], Run]] = {}  # in samples
        self._is_used = [True] * len(self.parameters)  # whether a gradient comes to each

    def measured(self, seconds: float) -> tuple[tuple[Timing, ...], tuple[Gradient, ...]]:
        """Passes by batch, in an order drawn anew for each round, and the gradients. Raises ScalingError."""
        if not self.parameters or self._batch < 1:
            raise ScalingError(
                "The model trains no weights, or its batches hold no samples.",
                "Let the script train a model with a batch of tensors.",
            )
        begin = time.monotonic()
        until = begin + _FOR_PASSES * seconds
        self._first()
        sizes = [self._batch]
        for size in reversed(batches(self._batch)[:-1]):
            # Each batch is compiled by itself, which may take longer than all of the measuring.
            if time.monotonic() > until:
                break
            if not self._takes(size):
                break
            sizes.append(size)
        runs: dict[int, list[Run]] = {size: [] for size in sizes}
        order = list(sizes)
        for turn in range(_ROUNDS):
            random.Random(turn).shuffle(order)
            for size in order:
                runs[size].append(self._run(size))
            if turn + 1 >= _LEAST_ROUNDS and time.monotonic() >= until:
                break
        passes = {size: [_split(repeats)] for size, repeats in runs.items()}
        return timings(passes), self._gradients(sorted(sizes), begin + seconds)

    def memory(self, smallest: int) -> Memory:
        """What one rank needs."""
        most = self._batch
        low, high = self._peak(smallest), self._peak(most)
        each = (high - low) // (most - smallest) if most > smallest else high // most
        optimizer = getattr(self.model, "optimizer", None)
        state = sum(map(_bytes, getattr(optimizer, "variables", ())))
        limit = 0 if self.gpu else memory_of_rank() or 0
        return Memory(2 * sum(map(_bytes, self.parameters)) + state, max(each, 0), limit)

    def device_name(self) -> str:
        """For people."""
        config = self._tf.config
        if self.gpu:
            physical = config.list_physical_devices(_GPU)[0]
            return config.experimental.get_device_details(physical).get("device_name", "GPU")
        threads = config.threading.get_intra_op_parallelism_threads()
        return f"cpu, {threads} thread{'s' * (threads > 1)}" if threads else "cpu, all threads"

    def _run(self, samples: int) -> Run:
        """One step. The first one compiles it."""
        if samples not in self._passes_by_size:
            self._passes_by_size[samples] = self._passes()
        return self._passes_by_size[samples](self._part(samples))

    def _first(self) -> None:
        try:
            self._run(self._batch)
            self._run(self._batch)
        except Exception as error:
            if lacks_memory(error):
                raise ScalingError(
                    "There is too little memory to measure beside the script.", "Use a smaller batch."
                ) from None
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise ScalingError(
                f"A step of the model cannot be made again ({reason}).",
                "Let the model take the same arguments twice.",
            ) from None

    def _takes(self, samples: int) -> bool:
        """Whether the model takes so small a batch, which is compiled then."""
        try:
            self._run(samples)
        except Exception:  # whatever a model makes of a batch that it does not expect
            return False
        return True

    def _part(self, samples: int) -> Any:
        """The first samples of the batch."""

        def first_samples(value: Any) -> Any:
            is_batch = hasattr(value, "shape") and len(value.shape) and value.shape[0] == self._batch
            return value[:samples] if is_batch else value

        return self._keras.tree.map_structure(first_samples, self._data)

    def _passes(self) -> Callable[[Any], Run]:
        """What makes a step."""
        if not self.has_parts:
            whole = self._compiled(self.model.train_step)
            return lambda data: (self._timed(whole, data), None)
        forward = self._compiled(self._loss)
        step = self._compiled(self._with_gradients)
        return lambda data: (self._timed(step, data), self._timed(forward, data))

    def _compiled(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self._is_eager:
            return function
        return self._graph(function, self._compiles)

    def _graph(self, function: Callable[[Any], Any], compiles: bool) -> Callable[[Any], Any]:
        """A function of TensorFlow, without AutoGraph as in Keras.

        TensorFlow warns about code that it traces for batch after batch; a partial call has none.
        """
        return self._tf.function(functools.partial(function), jit_compile=compiles, autograph=False)

    def _timed(self, function: Callable[[Any], Any], data: Any) -> float:
        begin = time.perf_counter()
        result = function(data)
        if self.gpu:  # has worked when a part of what it made last is here
            for each in self._tf.nest.flatten(result)[:1]:
                self._tf.convert_to_tensor(each).numpy()
        return 1000 * (time.perf_counter() - begin)

    def _loss(self, data: Any) -> Any:
        """As `train_step` of Keras has it."""
        x, y, weight = self._keras.utils.unpack_x_y_sample_weight(data)
        model = self.model
        result = model(x, training=True) if model._call_has_training_arg else model(x)
        loss = model._compute_loss(x=x, y=y, y_pred=result, sample_weight=weight, training=True)
        return model.optimizer.scale_loss(loss)

    def _with_gradients(self, data: Any) -> tuple[Any, list[Any]]:
        with self._tf.GradientTape() as tape:
            loss = self._loss(data)
        gradients = tape.gradient(loss, self.parameters)
        self._is_used = [gradient is not None for gradient in gradients]
        return loss, gradients

    def _gradients(self, sizes: list[int], until: float) -> tuple[Gradient, ...]:
        """With the moments when they are complete where TensorFlow shows them."""
        found = self._moments(sizes, until)
        return tuple(
            Gradient(str(getattr(v, "path", v.name)), _bytes(v), tuple(by_size[place] for by_size in found))
            for place, v in enumerate(self.parameters)
            if self._is_used[place]
        )

    def _moments(self, sizes: list[int], until: float) -> list[tuple[float, ...]]:
        """For each batch the share of the backward pass after which each gradient is complete.

        Batches for which there is no time are taken to be like the next larger one.

        A step that XLA compiles returns all of them at its end. On a GPU operations of the processor, such as
        looking at the clock, run when a gradient is requested, not when it is complete. So there, and where
        the model has its own `train_step`, all are taken to be complete at the end.
        """
        late = [tuple(1.0 for _ in self.parameters)] * len(sizes)
        if self.gpu or self._compiles or self._is_eager or not self.has_parts:
            return late
        found: list[tuple[float, ...]] = []
        try:
            for size in reversed(sizes):
                is_late = bool(found) and time.monotonic() > until
                found.append(found[-1] if is_late else self._shares(size))
        except Exception:  # the step itself has run before: what fails is looking at the clock in it
            return late
        return found[::-1]

    def _shares(self, samples: int) -> tuple[float, ...]:
        """When each gradient is complete, in the middle of some passes."""
        clock, data = self._graph(self._clocked, compiles=False), self._part(samples)
        runs = [clock(data) for _ in range(_PASSES)]
        by_run = [shares([float(end) for end in ends], float(begin)) for begin, ends in runs]
        return tuple(statistics.median(of_gradient) for of_gradient in zip(*by_run, strict=True))

    def _clocked(self, data: Any) -> tuple[Any, list[Any]]:
        """When the forward pass ended, and when each gradient was complete, in seconds."""
        tf = self._tf
        loss, gradients = self._with_gradients(data)
        with tf.control_dependencies([loss]):
            begin = tf.timestamp()
        ends = []
        # TensorFlow reads the clock in the order in which this loop runs, so each reading waits for those
        # before it: the last gradients are complete first.
        for gradient in reversed(gradients):
            parts = [each for each in tf.nest.flatten(gradient, expand_composites=True) if each is not None]
            with tf.control_dependencies(parts or [loss]):
                ends.append(tf.timestamp())
        return begin, ends[::-1]

    def _peak(self, samples: int) -> int:
        """Bytes that a step takes at its peak, by TensorFlow's own account; 0 where it keeps none."""
        memory, name = self._tf.config.experimental, "GPU:0" if self.gpu else "CPU:0"
        with contextlib.suppress(ValueError):
            memory.reset_memory_stats(name)
            before = memory.get_memory_info(name)["current"]
            self._run(samples)
            return max(memory.get_memory_info(name)["peak"] - before, 0)
        return 0


def _split(runs: Sequence[Run]) -> tuple[float, float]:
    """Forward and backward pass in the middle of some runs."""
    forwards = [forward for _, forward in runs if forward is not None]
    whole = statistics.median(whole for whole, _ in runs)
    return split_whole(whole, statistics.median(forwards) if forwards else None)


def _train_step_of_keras() -> Any:
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    return TensorFlowTrainer.train_step


def _bytes(variable: Any) -> int:
    import keras

    count = 1
    for length in variable.shape:
        count *= int(length)
    kind = keras.backend.standardize_dtype(variable.dtype)
    return count * {"bool": 1}.get(kind, int("".join(filter(str.isdigit, kind.partition("_")[0])) or 32) // 8)


def samples_of(data: Any, flatten: Callable[[Any], list[Any]]) -> int:
    """The first dimension of the first tensor of a step's data; 0: there is none."""
    shapes = (each.shape for each in flatten(data) if hasattr(each, "shape"))
    return next((int(shape[0]) for shape in shapes if len(shape)), 0)
