"""Which steps and batches a probe of Keras on TensorFlow measures, and how it ends, without either."""

import itertools
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carme_runtime.scaling import ScalingError, keras_watching, probing, sampling
from carme_runtime.scaling.ending import failure_sentence
from carme_runtime.scaling.keras_watching import Drawn, KerasWatch, draw
from carme_runtime.scaling.sampling import common_batch


class Measured(BaseException):
    """In place of a process's end."""


class Epoch:
    """The iterator of an epoch; its batches are their numbers of samples."""

    element_spec = None

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = iter(sizes)

    def __iter__(self) -> Iterator[int]:
        return self._sizes

    def __next__(self) -> int:
        return next(self._sizes)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KerasWatch:
    """Watches steps, which end at once, until it measures."""

    def stop(*arguments: Any) -> None:
        raise Measured(*arguments)

    monkeypatch.setattr(keras_watching, "_samples", int)
    monkeypatch.setattr(keras_watching, "_wait_for", lambda result: None)
    monkeypatch.setattr(probing, "finish", stop)
    monkeypatch.setattr(probing, "end", stop)
    monkeypatch.setattr(KerasWatch, "_profile", lambda self, model, drawn: drawn)
    return KerasWatch(tmp_path / "scale.json", None, 60.0)


def fit(watch: KerasWatch, sizes: list[int], epochs: int) -> Drawn:
    """Train as Keras does, with one iterator for each epoch; what was drawn to be measured."""
    model = object()
    with pytest.raises(Measured) as found:
        for _ in range(epochs):
            epoch = Epoch(sizes)
            for _ in sizes:
                try:
                    watch._step(model, next, epoch)
                except StopIteration:  # Keras ends the epoch
                    break
    return found.value.args[0]


@pytest.mark.parametrize("steps", [1, 2, 4, 11, 22, 43, 44, 45, 60])
def test_the_last_batch_of_an_epoch_is_not_measured_for_the_usual_one(watch: KerasWatch, steps: int) -> None:
    """40 steps after 3 are enough, so the probe looks for batches before the next one."""
    sizes = [300] * (steps - 1) + [100] if steps > 1 else [300]
    drawn = fit(watch, sizes, 100)
    assert drawn.data == 300 == common_batch(drawn.sizes, drawn.data)
    assert len(drawn.sizes) >= min(steps, 3) and watch.steps <= 43 + steps


def test_the_rest_of_an_epoch_is_measured_where_it_has_enough(watch: KerasWatch) -> None:
    drawn = fit(watch, [300] * 45 + [100], 1)
    assert (drawn.sizes, drawn.data) == ([300, 300, 100], 300)


def test_train_on_batch_is_measured_with_a_batch_of_the_usual_size(watch: KerasWatch) -> None:
    model, sizes = object(), [300, 300, 300, 100] * 20
    with pytest.raises(Measured) as found:
        for size in sizes:
            watch._step(model, next, iter([size]))
    assert watch.steps == 44 and found.value.args[0].data == 300


class End(Exception):
    """What TensorFlow raises after the last batch."""


@pytest.mark.parametrize("steps", [1, 2, 11, 22, 43, 44, 60])
def test_an_epoch_of_a_generator_is_measured_as_one_of_tensorflow(
    watch: KerasWatch, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Models of `carme_runtime.keras` have such. It stays for later steps what a step does not take."""
    monkeypatch.setitem(
        sys.modules, "tensorflow", SimpleNamespace(errors=SimpleNamespace(OutOfRangeError=End))
    )
    sizes = [300] * (steps - 1) + [100] if steps > 1 else [300]
    trained: list[int] = []

    def batches() -> Iterator[int]:
        yield from sizes
        raise End

    def train(iterator: Iterator[int]) -> None:
        trained.append(next(iterator))

    model = object()
    with pytest.raises(Measured) as found:
        for _ in range(100):
            epoch = batches()
            for _ in sizes:
                try:
                    watch._step(model, train, epoch)
                except StopIteration:
                    break
    assert trained[:steps] == sizes[: len(trained)] and 43 <= len(trained) <= 43 + steps
    drawn = found.value.args[0]
    assert drawn.data == 300 == common_batch(drawn.sizes, drawn.data)


def test_the_end_of_a_generator_ends_the_epoch(watch: KerasWatch) -> None:
    with pytest.raises(StopIteration):
        watch._step(object(), next, (size for size in list[int]()))
    assert watch.steps == 0


def test_a_batch_of_the_usual_size_is_measured() -> None:
    class Data:
        def __init__(self, samples: int) -> None:
            self.samples = samples

    alive: list[weakref.ref[Data]] = []

    def batches() -> Iterator[Data]:
        for samples in itertools.cycle([8, 32, 32]):
            assert sum(each() is not None for each in alive) <= 2  # the one kept, and the last
            data = Data(samples)
            alive.append(weakref.ref(data))
            yield data
            del data

    drawn = draw(batches(), 60.0, lambda data: data.samples)
    assert len(drawn.sizes) == 50 and len(drawn.moments) == 51 and not drawn.is_over
    assert drawn.data.samples == 32
    alive.clear()


@pytest.mark.parametrize(
    ("each", "sizes"),
    [(0.1, [8] + 49 * [32]), (1.0, [8] + 8 * [32]), (9.0, [8, 32, 32]), (9.1, [8, 32]), (600.0, [8, 32])],
)
def test_drawing_slow_batches_takes_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, each: float, sizes: list[int]
) -> None:
    """Of a minute's probe nine seconds, or 27 for three batches; two show whether one is an epoch's last."""
    now = 0.0
    monkeypatch.setattr(keras_watching, "time", SimpleNamespace(perf_counter=lambda: now))

    def batches() -> Iterator[int]:
        nonlocal now
        for samples in itertools.chain([8], itertools.repeat(32)):
            now += each
            yield samples

    drawn = draw(batches(), sampling.LOADING * 60, int)
    assert (drawn.sizes, drawn.data, drawn.is_over) == (sizes, 32, False)
    assert keras_watching.samples_per_s(drawn.sizes, drawn.moments) == pytest.approx(32 / each)


class ResourceExhaustedError(Exception):
    """As TensorFlow has it."""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ResourceExhaustedError("OOM when"), "There is too little memory to measure beside the script."),
        (ScalingError("It is so.", "Change it."), "It is so. Change it."),
        (
            ValueError("an odd number\nof lines"),
            "The probe itself failed when it measured the script's steps (",
        ),
    ],
)
def test_what_fails_in_measuring_is_no_error_of_the_script(
    watch: KerasWatch, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(KerasWatch, "_profile", fail)
    with pytest.raises(Measured, match=f"^{re.escape(sentence)}") as found:
        for _ in range(2):
            epoch = Epoch([32] * 60)
            for _ in range(60):
                watch._step("model", next, epoch)
    assert str(found.value) == failure_sentence(error) and watch.over
    assert "of lines" not in str(found.value)


def test_what_scripts_lack_that_end_too_early_is_reported() -> None:
    assert sampling.shortage(1, 60.0).startswith("The script ended after 1 step, and the probe needs 7. ")
    assert sampling.shortage(30, 60.0) == (
        "The script ended after 30 steps, before the probe could measure: it watches 43 steps, or about 12 s"
        ", and then needs a few batches more. Let it train longer, or give a smaller --scale-seconds."
    )
    assert "30 steps, and the probe needs 70." in sampling.shortage(30, 60.0, 10)
    assert "it watches 430 steps, or about 1 s, and" in sampling.shortage(80, 5.0, 10)


def test_what_trains_on_is_measured_and_not_what_made_the_first_steps(watch: KerasWatch) -> None:
    """Two models that take turns are no reason to change."""
    first, second, third = object(), object(), object()
    for _ in range(2):
        watch._step(first, next, iter([8]))
    with pytest.raises(Measured) as found:
        for _ in range(100):
            watch._step(second, next, iter([32]))
            watch._step(third, next, iter([16]))
    assert found.value.args[0].data == 32 and watch.steps == 43


def test_what_trains_now_and_then_between_others_stays_the_one(watch: KerasWatch) -> None:
    first, further = object(), [object() for _ in range(20)]
    with pytest.raises(Measured) as found:
        for _ in range(100):
            watch._step(first, next, iter([8]))
            for model in [*further, *further[:1] * 5]:
                watch._step(model, next, iter([32]))
    assert found.value.args[0].data == 8 and watch.steps == 43


def test_what_trains_after_one_that_is_gone_is_measured_from_its_own_first_step_on(watch: KerasWatch) -> None:
    class Model:
        pass

    first, second = Model(), Model()
    for _ in range(10):
        watch._step(first, next, iter([8]))
    assert watch.steps == 10
    del first
    for _ in range(5):
        watch._step(second, next, iter([32]))
    assert watch.steps == 5 and [step.batch for step in watch._watched] == 2 * [32]


def test_steps_that_keras_makes_in_one_call_are_seen_as_one(watch: KerasWatch) -> None:
    class Model:
        steps_per_execution = 10

    model, epoch = Model(), Epoch([32] * 60)
    for _ in range(3):
        watch._step(model, next, epoch)
    assert "after 30 steps, and the probe needs 70." in watch.shortage()
