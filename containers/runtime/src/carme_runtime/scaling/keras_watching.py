"""Watches Keras train on TensorFlow, until there are enough steps to measure; then measures, and ends it.

Keras calls its train function for each step, which TensorFlow runs as a whole. So steps are seen from there,
and their parts when they are made again.
"""

# pyright: reportMissingImports=false

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.graph import Timing
from carme_runtime.scaling.ending import end
from carme_runtime.scaling.profiles import Input, Profile
from carme_runtime.scaling.sampling import (
    FEWEST,
    LEAST,
    LOADING,
    LONGEST,
    MOST,
    REPLAYING,
    WARM,
    WATCHING,
    common_batch,
    finish,
    is_loaded_ahead,
    links_of,
    shortage,
    spread,
)

_BATCHES = 50  # that are drawn to see how fast they come
_IN_BUFFERS = 3  # batches that may have been loaded while the script computed


class KerasWatch:
    """Of one process.

    Args:
        file: Where the result is written.
        network: The links' description, if one was given.
        seconds: About how long to measure.
    """

    def __init__(self, file: Path, network: str | None, seconds: float) -> None:
        self._file, self._network, self._seconds = file, network, seconds
        self.steps = 0
        self.over = False
        self._has_own_loop = False
        self._in_step = False
        self._model: Any = None
        self._began = 0.0
        self._took: list[float] = []  # seconds of steps that count

    def watch_trainer(self, trainer: ModuleType) -> None:
        """Let models call us for each step that they train. Gets Keras' module of it."""
        kind: Any = trainer.TensorFlowTrainer
        make = kind.make_train_function

        @functools.wraps(make)
        def make_and_watch(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = make(model, *args, **kwargs)
            known = model.train_function
            if not getattr(known, "is_watched", False):
                watched = functools.partial(self._step, model, known)
                watched.is_watched = True  # pyright: ignore[reportAttributeAccessIssue]
                model.train_function = watched
            return result

        kind.make_train_function = make_and_watch

    def watch_optimizers(self, optimizers: ModuleType) -> None:
        """Notice loops of the script's own, which call optimizers themselves. Gets Keras' module of these."""
        kind: Any = optimizers.BaseOptimizer
        apply = kind.apply

        @functools.wraps(apply)
        def applied(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._has_own_loop = self._has_own_loop or not self._in_step
            return apply(optimizer, *args, **kwargs)

        kind.apply = applied

    def shortage(self) -> str:
        """What is missing for a result; empty: nothing was seen that could have one."""
        if self.steps:
            return shortage(self.steps)
        if self._has_own_loop:
            return (
                "The script trains in a loop of its own, and on TensorFlow the probe sees steps of Keras' "
                "fit and train_on_batch alone. Let it train with one of them."
            )
        return ""

    def _step(self, model: Any, known: Callable[[Any], Any], iterator: Any) -> Any:
        """Make a step of the script, and look at it."""
        if self.over or self._model not in (None, model):
            return known(iterator)
        self._model = model
        is_stream = hasattr(iterator, "element_spec")
        drawn = [] if is_stream else list(iterator)
        if self._is_enough():
            self._measure(model, iterator if is_stream else iter(drawn))
        begin = time.perf_counter()
        self._in_step = True
        try:
            result = known(iterator if is_stream else iter(drawn))
            _wait_for(result)
        finally:
            self._in_step = False
        now = time.perf_counter()
        count = int(getattr(model, "steps_per_execution", 1) or 1)
        self._began = self._began or now
        self.steps += count
        if self.steps > WARM * count:
            self._took.append((now - begin) / count)
        return result

    def _is_enough(self) -> bool:
        count, seconds = len(self._took), time.perf_counter() - self._began
        if count >= FEWEST and seconds >= LONGEST:
            return True
        return count >= MOST or (count >= LEAST and seconds >= WATCHING * self._seconds)

    def _measure(self, model: Any, iterator: Iterator[Any]) -> None:
        """Measure, write the result, and end the script. Goes on where no batch comes: an epoch is over."""
        batches, moments = _draw(iterator, LOADING * self._seconds)
        if not batches:
            return
        self.over = True
        try:
            profile = self._profile(model, batches, moments)
        except CarmeRuntimeError as error:
            end(str(error))
        finish(profile, self._file)

    def _profile(self, model: Any, batches: list[Any], moments: list[float]) -> Profile:
        """Raises ScalingError."""
        import keras

        from carme_runtime.scaling.tensorflow_replay import TensorFlowStep, samples_of

        sizes = [samples_of(data, keras.tree.flatten) for data in batches]
        batch = common_batch(sizes)
        step = TensorFlowStep(model, batches[sizes.index(batch)], batch)
        timings, gradients = step.measured(REPLAYING * self._seconds)
        whole = 1000 * statistics.median(self._took)
        rate = samples_per_s(sizes, moments)
        timings, fixed, ahead = parts(timings, whole, 1000 * batch / rate if rate else 0.0)
        return Profile(
            type(model).__name__,
            step.device_name(),
            batch,
            timings,
            fixed,
            gradients,
            spread=spread(self._took),
            input=Input(rate, int(ahead)) if rate else Input(),
            memory=step.memory(timings[0].samples),
            links=links_of(self._network),
        )


def parts(timings: tuple[Timing, ...], whole: float, load: float) -> tuple[tuple[Timing, ...], float, bool]:
    """What a step consists of.

    Args:
        timings: Of passes that were made again.
        whole: Milliseconds of the script's step.
        load: Of loading its batch alone.

    Returns:
        The timings, not longer than the step of the script; what it takes besides; and whether it loads its
        next batch meanwhile.
    """
    computed = timings[-1].forward_ms + timings[-1].backward_ms
    if computed > whole > 0:  # the machine was slower than before
        factor = whole / computed
        timings = tuple(Timing(t.samples, t.forward_ms * factor, t.backward_ms * factor) for t in timings)
        computed = whole
    ahead = is_loaded_ahead(whole, computed, load)
    return timings, max(whole - computed - (0.0 if ahead else load), 0.0), ahead


def samples_per_s(sizes: list[int], moments: list[float]) -> float:
    """The rate of batches that were drawn one after the other; 0: there are too few for that.

    Args:
        sizes: Of them.
        moments: Seconds: before the first of them, and after each.
    """
    first = _IN_BUFFERS if len(sizes) > 2 * _IN_BUFFERS else 1
    took = moments[-1] - moments[min(first, len(moments) - 1)]
    return sum(sizes[first:]) / took if took > 0 else 0.0


def _draw(iterator: Iterator[Any], seconds: float) -> tuple[list[Any], list[float]]:
    """The next batches, and the moments before and after them."""
    import keras
    import tensorflow as tf

    def plain(value: Any) -> Any:
        # Keras has its own train function turn these into None, too.
        return None if isinstance(value, tf.experimental.Optional) else value

    found: list[Any] = []
    moments = [time.perf_counter()]
    while len(found) < _BATCHES and (not found or moments[-1] - moments[0] < seconds):
        data = next(iterator, None)
        if data is None:
            break
        moments.append(time.perf_counter())
        found.append(keras.tree.map_structure(plain, data))
    return found, moments


def _wait_for(result: Any) -> None:
    """Have a GPU end the step: one of the numbers that it returns is looked at."""
    import keras

    for value in keras.tree.flatten(result)[:1]:
        if hasattr(value, "numpy"):
            value.numpy()
