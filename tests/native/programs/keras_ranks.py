"""What the programs for Keras scripts share; argument 1: which of it, 2: a folder all ranks see.

KERAS_BACKEND is torch or tensorflow. Importing this joins the ranks.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import sys
from pathlib import Path

import keras
import numpy as np

import carme_runtime.keras as tnt

kind, folder = sys.argv[1], Path(sys.argv[2])
on_torch = keras.backend.backend() == "torch"
if on_torch:
    import torch

    torch.set_num_threads(1)
tnt.init(devices_per_node=1)
rank, size = tnt.get_rank(), tnt.get_size()
keras.utils.set_random_seed(3 + rank)  # what the ranks share comes from rank 0
numbers = np.random.default_rng(5)
x = numbers.normal(size=(64, 6)).astype("float32")
y = x[:, :2].copy()


def mlp(*more):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), *more, keras.layers.Dense(2)])


def compiled(*more, **options):
    model = tnt.Model(mlp(*more))
    model.compile(**({"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"} | options))
    return model


def everywhere(value):
    return tnt.TensorAllgatherer(value).allgather(value)


def same(model):
    return all((everywhere(w[None]) == w).all() for w in model.get_weights())


def end():
    """Leave the other ranks."""
    if not on_torch:
        return
    import torch

    if torch.distributed.is_initialized():  # not for a rank alone
        torch.distributed.destroy_process_group()
