"""The first training step of a Keras model runs while rank 0's weights still travel.

    keras_streamed.py equal|mistakes

KERAS_BACKEND is torch or tensorflow.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import logging
import sys
from typing import Any

import keras
import numpy as np
import pytest

import carme_runtime.keras as ck
from carme_runtime.collectives.errors import InvalidCall

(action,) = sys.argv[1:]
on_tensorflow = keras.backend.backend() == "tensorflow"
WIDTH = 48  # whose kernels are no small variables
numbers = np.random.default_rng(3)
x = numbers.normal(size=(24, WIDTH)).astype("float32")
y = numbers.normal(size=(24, WIDTH)).astype("float32")


def layers() -> list[Any]:
    normal, drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.25)
    first, *others = (keras.layers.Dense(WIDTH, activation="tanh") for _ in range(4))
    return [first, normal, drop, *others]


class Own(keras.Model):
    """Keras knows nothing of when it uses which layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([keras.Input((WIDTH,)), *layers()])

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.body(inputs, training=training)


def made(seed: int, start: str, kind: str = "functional") -> Any:
    """A compiled model; that of rank 0 has this seed."""
    keras.utils.set_random_seed(seed + 100 * ck.get_rank())
    model = Own() if kind == "own" else keras.Sequential([keras.Input((WIDTH,)), *layers()])
    model(x[:1])
    model = ck.Model(model, start=start)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def trained(seed: int, start: str, kind: str) -> tuple[list[float], list[Any]]:
    """Losses and weights of two fits; the second one begins with what all ranks have."""
    model = made(seed, start, kind)
    losses = []
    for _ in range(2):
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses += history.history["loss"]
    losses.append(float(model.train_on_batch(x[:8], y[:8])))
    return losses, model.get_weights()


class Rate(keras.callbacks.Callback):
    """Looks at weights before the first batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.weights = [np.array(value) for value in self.model.get_weights()]


def equal() -> None:
    for kind in ("functional", "own"):
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, heard=heard: heard.append(record.getMessage())  # pyright: ignore
        logging.getLogger("carme_runtime").addHandler(handler)
        expected = trained(5, "", kind)
        found = trained(5, "streamed", kind)
        logging.getLogger("carme_runtime").removeHandler(handler)
        assert found[0] == expected[0], (kind, found[0], expected[0])
        for ours, theirs in zip(found[1], expected[1], strict=True):
            assert np.array_equal(ours, theirs), kind
        waits = any("waits for all weights" in text for text in heard)
        assert waits == (on_tensorflow and kind == "own"), heard
    keras.utils.set_random_seed(5)
    own = keras.Sequential([keras.Input((WIDTH,)), *layers()])
    callback = Rate()
    model = made(5, "streamed")
    model.fit(x, y, batch_size=8, callbacks=[callback], verbose=0)
    if ck.is_master_rank():
        return
    for ours, theirs in zip(callback.weights, own.get_weights(), strict=True):
        assert np.array_equal(ours, theirs)


def mistakes() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), *layers()])
    with pytest.raises(InvalidCall, match=r"no start 'slowly'.*'streamed'"):
        ck.Model(model, start="slowly")
    with pytest.raises(InvalidCall, match=r"may be cut into stages.*Leave start out"):
        ck.Model(model, parallel_strategy=ck.ParallelStrategy.PIPELINING, start="streamed")


globals()[action]()
