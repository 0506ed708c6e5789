"""Trains a model with six weights for a few steps and prints them; KERAS_BACKEND is torch or tensorflow."""

# pyright: reportMissingImports=false

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np

import carme_runtime.keras as ck

keras.utils.set_random_seed(3)
numbers = np.random.default_rng(5)
x = numbers.normal(size=(32, 12)).astype("float32")
layers = [keras.layers.Dense(20, "tanh"), keras.layers.Dense(20, "tanh"), keras.layers.Dense(3)]
model = ck.Sequential([keras.Input((12,)), *layers])
model.compile("sgd", "mse")
model.fit(x, x[:, :3], batch_size=8, epochs=2, verbose=0)
if ck.is_master_rank():
    print("SUM", *(float(np.abs(weight).sum()) for weight in model.get_weights()))
