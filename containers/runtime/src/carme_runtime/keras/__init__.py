"""Data-parallel training of Keras models, with one more line.

    import carme_runtime.keras as ck

    model = ck.Model(keras_model)

What follows stays as it was: compile, fit, evaluate, predict, callbacks, saving and loading. Batch sizes are
those over all ranks, and results do not depend on the number of ranks. Names and behaviour are those of
Tarantella, so that `import carme_runtime.keras as tnt` runs scripts that were written for it.
"""

import sys

from carme_runtime.keras import callbacks, data, layers, models, start
from carme_runtime.keras.collectives import Allreduce, Barrier, Group, ReductionOp
from carme_runtime.keras.model import Model, ParallelStrategy, Sequential
from carme_runtime.keras.optimizer import Optimizer
from carme_runtime.keras.tensors import TensorAllgatherer, TensorAllreducer, TensorBroadcaster
from carme_runtime.keras.world import get_master_rank, get_rank, get_size, init, is_master_rank

TarantellaModel = Model
keras = sys.modules[__name__]  # scripts also say tnt.keras.callbacks, tnt.keras.models, ...
start.begin()

__all__ = [
    "Allreduce",
    "Barrier",
    "Group",
    "Model",
    "Optimizer",
    "ParallelStrategy",
    "ReductionOp",
    "Sequential",
    "TarantellaModel",
    "TensorAllgatherer",
    "TensorAllreducer",
    "TensorBroadcaster",
    "callbacks",
    "data",
    "get_master_rank",
    "get_rank",
    "get_size",
    "init",
    "is_master_rank",
    "layers",
    "models",
]
