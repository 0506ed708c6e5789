"""A Keras script for `carme-run --plan` and `--strategy`, which does not say how ranks share the model."""

# pyright: reportMissingImports=false

import keras
import numpy as np
import torch

import carme_runtime.keras as ck

torch.set_num_threads(1)
keras.utils.set_random_seed(1)
x = np.ones((12, 4), "float32")
layers = [keras.layers.Dense(4, "tanh") for _ in range(4)]
model = ck.Model(keras.Sequential([keras.Input((4,)), *layers]))
model.compile("sgd", "mse")
model.fit(x, x, batch_size=12, verbose=0)
print("trained", model.plan().strategy if model.plan() else "with all layers on each rank", flush=True)
