"""A Keras script for `carme-run --plan` and `--strategy`, which does not say how ranks share the model."""

# pyright: reportMissingImports=false

import sys

import keras
import numpy as np

import carme_runtime.keras as ck

if keras.backend.backend() == "torch":
    import torch

    torch.set_num_threads(1)
keras.utils.set_random_seed(1)
x = np.ones((12, 4), "float32")
layers = [keras.layers.Dense(4, "tanh") for _ in range(4)]
first = [] if "unknown" in sys.argv else [keras.Input((4,))]  # without it nobody knows how long samples are
model = ck.Model(keras.Sequential([*first, *layers]))
model.compile("sgd", "mse")
model.fit(x, x, batch_size=12, verbose=0)
print("trained", model.plan().strategy if model.plan() else "with all layers on each rank", flush=True)
