"""What the calls of a Keras model cost on this rank, on the TensorFlow backend.

Each is run by itself with the values that the calls before it made. TensorFlow does not say what its tapes
keep, so what a call holds for its backward pass is taken from the size of what it makes.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.graph import Graph, Timing, Value
from carme_runtime.keras.calls import Call, Calls
from carme_runtime.keras.library import keras

_MOST_REPEATS = 7


def measured(calls: Calls, example: Sequence[Any], samples: Sequence[int], seconds: float = 10.0) -> Graph:
    """The graph with sizes and times. The model's variables stay as they are.

    Args:
        calls: The model.
        example: What it is called with.
        samples: Numbers of samples with which to measure.
        seconds: About how long to measure.

    Raises:
        InvalidCall: The model cannot run with the example.
    """
    return _Measurement(calls).measure(example, sorted(set(samples)), seconds)


class _Measurement:
    def __init__(self, calls: Calls) -> None:
        self._tf: Any = import_module("tensorflow")
        self._calls, self._graph = calls, calls.graph()

    def measure(self, example: Sequence[Any], sizes: list[int], seconds: float) -> Graph:
        began = time.perf_counter()
        smallest = {v.name: v for v in self._all_values(self._resized(example, sizes[0]))}
        largest = {v.name: v for v in self._all_values(self._resized(example, sizes[-1]))}
        took = max(time.perf_counter() - began, 1e-6)
        repeats = max(1, min(_MOST_REPEATS, int(seconds / took)))
        timings: dict[str, list[Timing]] = {call.name: [] for call in self._calls.calls}
        for size in sizes:
            for name, timing in self._timings(self._resized(example, size), size, repeats):
                timings[name].append(timing)
        operators = tuple(
            dataclasses.replace(
                operator,
                timings=tuple(timings[operator.name]),
                held_bytes=sum(largest[name].bytes for name in operator.outputs),
            )
            for operator in self._graph.operators
        )
        values = tuple(
            dataclasses.replace(
                value, per_sample=sizes[0] == sizes[-1] or value.bytes != smallest[value.name].bytes
            )
            for value in largest.values()
        )
        return dataclasses.replace(self._graph, samples=sizes[-1], values=values, operators=operators)

    def _resized(self, example: Sequence[Any], samples: int) -> list[Any]:
        tf = self._tf
        return [tf.gather(tensor, tf.range(samples) % len(tensor)) for tensor in example]

    def _all_values(self, example: list[Any]) -> Iterator[Value]:
        """All values, by running every call once."""
        reached = self._graph.with_gradients
        for name, tensor in zip(self._calls.inputs, example, strict=True):
            yield self._value(name, tensor, False)
        for call, values in self._each(example):
            for name in call.outputs:
                yield self._value(name, values[name], name in reached)

    def _value(self, name: str, tensor: Any, reached: bool) -> Value:
        kind = keras.backend.standardize_dtype(tensor.dtype)
        size = int(self._tf.size(tensor)) * tensor.dtype.size
        gradient = reached and keras.backend.is_float_dtype(kind)
        return Value(name, tuple(tensor.shape), kind, size, True, gradient)

    def _timings(self, example: list[Any], samples: int, repeats: int) -> Iterator[tuple[str, Timing]]:
        for call, values in self._each(example):
            times = [self._timed(call, values) for _ in range(repeats)]
            forward, backward = (statistics.median(part) for part in zip(*times, strict=True))
            yield call.name, Timing(samples, round(forward, 6), round(backward, 6))

    def _each(self, example: list[Any]) -> Iterator[tuple[Call, dict[str, Any]]]:
        """The calls, and the values that there are after each."""
        values = dict(zip(self._calls.inputs, example, strict=True))
        calls = self._calls.calls
        last = {name: place for place, call in enumerate(calls) for name in call.sources}
        for place, call in enumerate(calls):
            try:
                results = self._run(call, values)
            except Exception as error:
                raise InvalidCall(
                    f"The model cannot run with the data ({str(error).splitlines()[0]}).",
                    "Give data that fit the model.",
                ) from error
            values |= zip(call.outputs, results, strict=True)
            yield call, values
            for name in [n for n, used in last.items() if used == place]:
                values.pop(name, None)

    def _run(self, call: Call, values: dict[str, Any]) -> list[Any]:
        with keras.StatelessScope(collect_losses=True) as scope:  # moving averages and seeds stay
            return call.run(values, training=True, scope=scope)

    def _timed(self, call: Call, values: dict[str, Any]) -> tuple[float, float]:
        tf = self._tf
        sources = [v for name in call.variables if (v := self._calls.variables[name]).trainable]
        differentiable = [values[name] for name in call.sources if values[name].dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(differentiable)
            began = time.perf_counter()
            results = self._run(call, values)
            forward = time.perf_counter() - began
        began = time.perf_counter()
        targets = [result for result in results if result.dtype.is_floating]
        if targets and (differentiable or sources):
            tape.gradient(targets, [*differentiable, *sources])
        return 1000 * forward, 1000 * (time.perf_counter() - began)
