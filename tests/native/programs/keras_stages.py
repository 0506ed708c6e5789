"""Trains a Keras model in stages, and sees that Keras alone does the same on the whole batch.

keras_stages.py MODEL STRATEGY [NAME=VALUE ...]
"""

# pyright: reportMissingImports=false

import sys
from typing import Any

import keras
import numpy as np

import carme_runtime.keras as tnt
import carme_runtime.keras.layers as tnt_layers

TENSORFLOW = keras.backend.backend() == "tensorflow"
if TENSORFLOW:
    import tensorflow

    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
else:
    import torch

    torch.set_num_threads(1)
LIMIT = 1e-5
SAMPLES, BATCH = 44, 12  # the last batch of an epoch has 8
numbers = np.random.default_rng(5)


def split(x, name):
    """A mark where the model is to be cut."""
    return tnt_layers.SplitLayer(name=name)(x) if "marked" in sys.argv[1] else x


def two_inputs():
    first, second = keras.Input((6,), name="first"), keras.Input((4,), name="second")
    shared = keras.layers.Dense(8, "tanh", name="shared")
    hidden = shared(keras.layers.Dense(8, "relu", kernel_regularizer="l2")(first))
    skip = keras.layers.Dense(8)(second)
    hidden = split(keras.layers.Dropout(0.3)(hidden + skip), "split_hidden")
    skip = split(skip, "split_skip")
    hidden = keras.layers.LayerNormalization()(hidden + skip)
    hidden = keras.layers.Concatenate()([shared(hidden), keras.layers.Dropout(0.2, seed=4)(skip)])
    model = keras.Model({"first": first, "second": second}, keras.layers.Dense(3)(hidden))
    data = {
        name: numbers.normal(size=(SAMPLES, n)).astype("float32") for name, n in (("first", 6), ("second", 4))
    }
    return model, data


def skips():
    inputs = keras.Input((8,))
    first = keras.layers.Dense(8, "tanh")(inputs)
    second = keras.layers.Dense(8, "tanh")(first)
    third = keras.layers.Dense(8, "tanh")(second)
    fourth = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(8)], name="inner")(third)
    outputs = keras.layers.Dense(3)(keras.layers.Add()([first, fourth, second]))
    return keras.Model(inputs, outputs), numbers.normal(size=(SAMPLES, 8)).astype("float32")


def images():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, padding="same", use_bias=False),  # whose gradient BatchNorm makes zero
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(3),
        ]
    )
    return model, numbers.normal(size=(SAMPLES, 8, 8, 2)).astype("float32")


def words():
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(11, 8, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(8, return_sequences=True)(hidden)
    hidden = keras.layers.LSTM(6)(hidden)
    return keras.Model(inputs, keras.layers.Dense(3)(hidden)), numbers.integers(0, 11, (SAMPLES, 5))


def make():
    keras.utils.set_random_seed(7)
    name = sys.argv[1].removesuffix("_averaged").removesuffix("_marked")
    model, x = {"two_inputs": two_inputs, "skips": skips, "images": images, "words": words}[name]()
    return model, x, numbers.integers(0, 3, SAMPLES)


def options() -> dict[str, Any]:
    found = dict(word.split("=") for word in sys.argv[3:])
    return {name: int(text) if text.isdigit() else text for name, text in found.items()}


def compiled(model):
    averages = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4}
    is_averaged = sys.argv[1].endswith("_averaged")
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5, **averages if is_averaged else {})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weighted = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=[weighted])
    return model


def alike(tested, expected_value, what):
    tested, expected_value = (np.asarray(value, np.float64) for value in (tested, expected_value))
    assert tested.shape == expected_value.shape, what
    difference = np.linalg.norm(tested - expected_value) / max(np.linalg.norm(expected_value), 1e-12)
    assert difference < LIMIT or abs(tested - expected_value).max() < 1e-6, (what, difference)


def fitted(model, x, y, **more):
    keras.utils.set_random_seed(11)
    weights = np.linspace(0.5, 1.5, SAMPLES).astype("float32")
    validation = (keras.tree.map_structure(lambda a: a[:10], x), y[:10])
    return model.fit(
        x,
        y,
        BATCH,
        epochs=2,
        verbose=0,
        sample_weight=weights,
        validation_data=validation,
        shuffle=not TENSORFLOW,  # Keras alone shuffles there by TensorFlow's own numbers
        **more,
    ).history


def main():
    strategy = tnt.ParallelStrategy[sys.argv[2]]
    reference, x, y = make()
    model = keras.models.clone_model(reference)
    for v, another in zip(model.variables, reference.variables, strict=True):
        v.assign(another)  # weights, and where Dropout layers without a seed begin to draw
    compiled(reference)
    tested = compiled(tnt.Model(model, parallel_strategy=strategy, **options()))
    expected = fitted(reference, x, y)
    for name, values in fitted(tested, x, y).items():
        alike(values, expected[name], name)
    plan = tested.plan()
    print(plan)
    for found, expected_value in zip(tested.get_weights(), reference.get_weights(), strict=True):
        alike(found, expected_value, "weights")
    alike(tested.predict(x, BATCH, verbose=0), reference.predict(x, BATCH, verbose=0), "predictions")
    alike(tested.evaluate(x, y, BATCH, verbose=0), reference.evaluate(x, y, BATCH, verbose=0), "evaluation")
    part = keras.tree.map_structure(lambda a: a[:9], x)
    keras.utils.set_random_seed(3)
    expected = reference.train_on_batch(part, y[:9])
    keras.utils.set_random_seed(3)
    alike(tested.train_on_batch(part, y[:9]), expected, "a batch")


if __name__ == "__main__":
    main()
