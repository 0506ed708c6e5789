"""Scripts of Keras without PyTorch for `carme-run --scale-probe`.

The first argument names one, the second one says for how many seconds the probe measures.
"""

import itertools
import sys
import threading
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

KIND = sys.argv[1]
keras.utils.set_random_seed(0)
VALUES = np.random.default_rng(0).standard_normal((2048, 32), np.float32)
LABELS = np.random.default_rng(0).integers(0, 4, 2048)


class OwnStep(keras.Sequential):
    """Has a training step of its own."""

    def train_step(self, data):
        return super().train_step(data)


def compiled(jit_compile: bool, kind: type[keras.Sequential] = keras.Sequential) -> Any:
    layers = keras.layers
    model: Any = kind([layers.Dense(256, activation="relu"), layers.BatchNormalization(), layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, jit_compile=jit_compile)
    return model


def own_loop(steps: Iterable[int], is_compiled: bool) -> None:
    import tensorflow as tf

    model, optimizer = compiled(False), keras.optimizers.Adam()
    model.build((None, 32))
    optimizer.build(model.trainable_variables)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(VALUES[:32], training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    step = tf.function(step) if is_compiled else step
    for _ in steps:
        step()


def load_for_long() -> None:
    """For longer than the probe waits for the end of a loop of the script's own."""
    from carme_runtime.scaling.own_loops import OwnLoop

    has_waited, probe = threading.Event(), OwnLoop.goes_on

    def noted(loop: OwnLoop, seconds: float) -> bool:
        found = probe(loop, seconds)
        if seconds > float(sys.argv[2]):
            has_waited.set()
        return found

    OwnLoop.goes_on = noted  # pyright: ignore[reportAttributeAccessIssue] - names differ
    has_waited.wait()


if KIND == "loop":
    own_loop(range(20), False)
elif KIND == "endless loop":
    own_loop(itertools.count(), True)
elif KIND == "a step before":
    own_loop(range(1), False)
    load_for_long()
    compiled(False).fit(VALUES, LABELS, 32, 10_000, verbose=0)
elif KIND == "small last batches":
    compiled(False).fit(VALUES[:1000], LABELS[:1000], 300, 10_000, verbose=0)
elif KIND == "some small batches":
    trained = compiled(False)
    for number in range(100_000):
        size = 8 if number % 4 == 3 else 32
        trained.train_on_batch(VALUES[:size], LABELS[:size])
elif KIND == "batches":
    trained = compiled(False)
    for number in range(100_000):
        begin = number % 64 * 32
        trained.train_on_batch(VALUES[begin : begin + 32], LABELS[begin : begin + 32])
elif KIND in ("ranks", "small last batches of ranks"):
    import carme_runtime.keras as ck

    several = ck.Model(compiled(False))
    several.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    samples, each = (2048, 32) if KIND == "ranks" else (1000, 300)
    several.fit(VALUES[:samples], LABELS[:samples], each, 10_000, verbose=0)
elif KIND == "wide":
    wide: Any = keras.Sequential([keras.layers.Dense(8192, activation="relu"), keras.layers.Dense(4)])
    wide.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    wide.fit(VALUES, LABELS, 32, 10_000, verbose=0)
elif KIND == "short":
    compiled(False).fit(VALUES[:160], LABELS[:160], 32, 1, verbose=0)
elif KIND == "uneven":
    import tensorflow as tf

    sizes = [2 + place % 29 for place in range(100)]
    parts = [(VALUES[:size], LABELS[:size]) for size in sizes]
    spec = (tf.TensorSpec((None, 32), tf.float32), tf.TensorSpec((None,), tf.int64))
    compiled(False).fit(
        tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec).repeat(),
        verbose=0,
        steps_per_epoch=100_000,
    )
elif KIND == "error":
    compiled(False).fit(
        VALUES,
        LABELS,
        32,
        1,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / max(5 - batch, 0)),
        ],
    )
else:
    model = compiled(KIND == "compiled", OwnStep if KIND == "own step" else keras.Sequential)
    model.fit(VALUES, LABELS, 32, 10_000, verbose=0)
print("the script went on", flush=True)
