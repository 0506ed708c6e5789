"""Variables of models and optimizers, made equal on all ranks."""

from typing import Any

import numpy as np

from carme_runtime.keras.library import keras
from carme_runtime.keras.world import MASTER, World

SEEDS = "seed_generator_state"  # the name of such variables


def make_equal(world: World, variables: list[Any]) -> None:
    """Let variables that are alike on all ranks have the master rank's values."""
    compare(world, variables)
    give_out(world, variables)


def compare(world: World, variables: list[Any]) -> None:
    """See that variables of a model and its optimizers are alike on all ranks.

    Raises:
        InvalidCall: They are not.
    """
    shapes = {
        f"Variable {number} of model and optimizer": f"{tuple(v.shape)} of {v.dtype}"
        for number, v in enumerate(variables)
    }
    remedy = "Build and compile the same model on all ranks."
    world.agree({"The number of variables of model and optimizer": len(variables)}, remedy=remedy)
    world.agree(shapes, remedy=remedy)


def give_out(world: World, variables: list[Any]) -> None:
    """The master rank's values."""
    for number, v in enumerate(variables):
        value = np.array(keras.ops.convert_to_numpy(v.value), order="C")
        # Not by its name: Keras numbers layers, on one rank maybe more of them than on another.
        world.broadcast(value.reshape(-1).view(np.uint8), MASTER, f"variable {number}")
        if v.name == SEEDS:
            # Dropout shall not hit the same places in every rank's share.
            value = value + np.array([world.rank, 0], value.dtype)
        v.assign(value)
