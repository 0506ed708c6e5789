"""A Keras model on the torch backend and a GPU: ranks train as one process does on the whole batches."""

# pyright: reportMissingImports=false

import os

import keras
import numpy as np

import carme_runtime.keras as tnt

numbers = np.random.default_rng(5)
x = numbers.normal(size=(46, 12)).astype("float32")
y = (x @ numbers.normal(size=(12, 3))).astype("float32")


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers.Dense(20, activation="tanh"), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((12,)), *layers])


def compiled(model):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


alone = compiled(build())
expected = alone.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0).history
model = compiled(tnt.Model(build()))
found = model.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0).history
for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-3, err_msg=name)
for weight, expected_weight in zip(model.get_weights(), alone.get_weights(), strict=True):
    np.testing.assert_allclose(weight, expected_weight, rtol=1e-3, atol=1e-4)
np.testing.assert_allclose(model.evaluate(x, y, verbose=0), alone.evaluate(x, y, verbose=0), rtol=1e-3)
assert alone.weights[0].value.is_cuda
print("PASSED keras", flush=True)
os._exit(0)
