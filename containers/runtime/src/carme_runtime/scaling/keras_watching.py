"""Watches Keras train on TensorFlow, until there are enough steps to measure; then measures, and ends it.

Keras calls its train function for each step, which TensorFlow runs as a whole. So steps are seen from there,
and their parts when they are made again.
"""

# pyright: reportMissingImports=false

import functools
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from carme_runtime.graph import Timing
from carme_runtime.scaling.ending import end
from carme_runtime.scaling.own_loops import OwnLoop
from carme_runtime.scaling.probing import Probe, reference
from carme_runtime.scaling.profiles import Input, Profile
from carme_runtime.scaling.sampling import (
    LOADING,
    REPLAYING,
    WARM,
    Step,
    common_batch,
    draws_another,
    drift,
    is_loaded_ahead,
    shortage,
    spread,
)

_FEWEST_BATCHES, _BATCHES = 3, 50  # that are drawn to see their sizes and how fast they come
_ANY_BATCHES = 2  # of them however slowly they come: a single one may be the small last one of an epoch
_IN_BUFFERS = 3  # batches that may have been loaded while the script computed
_OWN_LOOP = (
    "The script trains in a loop of its own, and on TensorFlow the probe sees steps of Keras' "
    "fit and train_on_batch alone. Let it train with one of them."
)


@dataclass
class Drawn:
    """Batches that were drawn one after the other; one of them is kept.

    Args:
        sizes: Samples of each.
        moments: Seconds: before the first of them, and after each.
        data: A batch of the size that most have.
        is_over: Whether there are no more.
    """

    sizes: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=lambda: [time.perf_counter()])
    data: Any = None
    is_over: bool = False
    _samples: int = 0  # samples of `data`

    def add(self, data: Any, samples: int) -> None:
        """Count a batch that has just been drawn."""
        self.moments.append(time.perf_counter())
        self.sizes.append(samples)
        common, known = ((self.sizes.count(size), size) for size in (samples, self._samples))
        if self.data is None or common > known:
            self.data, self._samples = data, samples

    def goes_on(self, seconds: float) -> bool:
        """Whether to draw another one, where drawing is to take so many seconds."""
        if len(self.sizes) < _ANY_BATCHES:
            return True
        spent, last = self.moments[-1] - self.moments[0], self.moments[-1] - self.moments[-2]
        return draws_another(len(self.sizes), _FEWEST_BATCHES, spent, last, seconds)


class KerasWatch(Probe):
    """The probe of one process; see `Probe`. Nothing shows the sizes of fit's batches that are watched."""

    def __init__(self, file: Path, network: str | None, seconds: float) -> None:
        super().__init__(file, network, seconds)
        self._own_loop = OwnLoop(seconds)
        self._in_step = False
        # Of the last step, not kept with its batches. fit has one for each epoch.
        self._iterator: Callable[[], Any] = lambda: None
        self._together = 1  # steps that Keras makes in one call

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
            if not self._in_step:
                is_first = not self._own_loop.is_seen
                self._own_loop.note(optimizer)
                if is_first:
                    self._own_loop.follow(self._waits_for_fit, lambda: end(_OWN_LOOP))
            return apply(optimizer, *args, **kwargs)

        kind.apply = applied

    def _waits_for_fit(self) -> bool:
        return self._followed is None and not self.over

    def shortage(self) -> str:
        """What is missing for a result; empty: nothing was seen that could have one."""
        if self.steps:
            return shortage(self.steps, self._seconds, self._together)
        return _OWN_LOOP if self._own_loop.is_seen else ""

    def _step(self, model: Any, known: Callable[[Any], Any], iterator: Any) -> Any:
        """Make a step of the script, and look at it."""
        if self.over or not self._follows(model):
            return known(iterator)
        is_first, self._iterator = iterator is not self._iterator(), reference(iterator)
        load, batch, batches = 0.0, 0, iterator
        if not hasattr(iterator, "element_spec"):  # a generator: of a single batch, or of an epoch's
            begin = time.perf_counter()
            data = next(iterator)
            load, batch = time.perf_counter() - begin, _samples(data)
            # The others stay where they are: drawing them all would end the epoch.
            batches = itertools.chain([data], iterator)
            del data
        since = time.perf_counter() - self._began
        if self._is_enough(since, [*(step.batch for step in self._watched), batch]):
            self._measure(model, batches, is_first)
            raise StopIteration  # all of the epoch's batches are drawn
        begin = time.perf_counter()
        self._in_step = True
        try:
            result = known(batches)
            _wait_for(result)
        finally:
            self._in_step = False
        now = time.perf_counter()
        count = self._together = int(getattr(model, "steps_per_execution", 1) or 1)
        self._began = self._began or now
        self.steps += count
        if self.steps > WARM * count:
            self._watched.append(Step(whole=(load + now - begin) / count, batch=batch))
        return result

    def _measure(self, model: Any, iterator: Iterator[Any], is_first: bool) -> None:
        """Measure, write the result, and end the script.

        Returns where an epoch has too few batches left to know which size is usual: its last one may be
        smaller than all others. At the beginning of the next one all of them are seen.
        """
        drawn = draw(iterator, LOADING * self._seconds, _samples)
        if drawn.is_over and not is_first and len(drawn.sizes) < _FEWEST_BATCHES:
            # Keras would warn that the epoch ends early.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            return
        if drawn.sizes:
            self._conclude(lambda: self._profile(model, drawn))

    def _profile(self, model: Any, drawn: Drawn) -> Profile:
        """Raises ScalingError."""
        from carme_runtime.scaling.tensorflow_replay import TensorFlowStep

        known = [step.batch for step in self._watched if step.batch]
        batch = common_batch([*known, drawn.sizes[0]] if known else drawn.sizes, _samples(drawn.data))
        took = [step.whole for step in self._watched if step.batch in (0, batch)]
        step = TensorFlowStep(model, _plain(drawn.data), batch)
        timings, gradients = step.measured(REPLAYING * self._seconds)
        whole = 1000 * statistics.median(took)
        rate = samples_per_s(drawn.sizes, drawn.moments)
        timings, fixed, ahead = parts(timings, whole, 1000 * batch / rate if rate else 0.0)
        return Profile(
            type(model).__name__,
            step.device_name(),
            batch,
            timings,
            fixed,
            gradients,
            spread=spread(took),
            input=Input(rate, int(ahead)) if rate else Input(),
            memory=step.memory(timings[0].samples),
            links=self._links,
            drift=drift(took),
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


def draw(iterator: Iterator[Any], seconds: float, samples: Callable[[Any], int]) -> Drawn:
    """Draw the next batches.

    Args:
        iterator: Has them.
        seconds: For how long, where a few do not take longer.
        samples: How many a batch has.
    """
    drawn, ends = Drawn(), _ends()
    while len(drawn.sizes) < _BATCHES and drawn.goes_on(seconds):
        try:
            data = next(iterator)
        except ends:
            drawn.is_over = True
            break
        drawn.add(data, samples(data))
    return drawn


def _ends() -> tuple[type[Exception], ...]:
    """What iterators raise after their last batch: Python's, or TensorFlow's as `carme_runtime.keras`."""
    tensorflow = sys.modules.get("tensorflow")
    return (StopIteration, tensorflow.errors.OutOfRangeError) if tensorflow else (StopIteration,)


def _samples(data: Any) -> int:
    import keras

    from carme_runtime.scaling.tensorflow_replay import samples_of

    return samples_of(data, keras.tree.flatten)


def _plain(data: Any) -> Any:
    """A batch as a `train_step` gets it."""
    import keras
    import tensorflow as tf

    # Keras has its own train function turn these into None, too.
    optional = tf.experimental.Optional
    return keras.tree.map_structure(lambda value: None if isinstance(value, optional) else value, data)


def _wait_for(result: Any) -> None:
    """Have a GPU end the step: one of the numbers that it returns is read."""
    import keras

    for value in keras.tree.flatten(result)[:1]:
        if hasattr(value, "numpy"):
            value.numpy()
