"""What training of a Keras model goes on from, for `carme_runtime.checkpoint`."""

from typing import Any

import numpy as np

from carme_runtime.checkpoint.stream import as_arrays, as_tensors
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.library import keras
from carme_runtime.keras.variables import SEEDS
from carme_runtime.keras.world import MASTER, world
from carme_runtime.out_of_core import limits_host


def take(model: Any) -> dict[str, Any]:
    """Weights, optimizer variables and random seeds of a Keras model. All ranks call it together.

    They have no names: Keras numbers layers, and another run may count otherwise. Where the host's memory is
    limited, weights and the optimizer's variables are those themselves instead of copies.
    """
    groups = _variables(model)
    state: dict[str, Any] = {
        name: [_value(v) if name == "seeds" or not limits_host() else v.value.detach() for v in group]
        for name, group in groups.items()
    }
    for value in state["seeds"]:
        world().broadcast(value.reshape(-1).view(np.uint8), MASTER, "a random seed")
    return state


def own(structure: Any) -> Any:
    """What `give` takes of a checkpoint's structure. Where memory is limited, all of it can leave memory.

    A checkpoint that was written in limited memory has tensors of PyTorch, which other backends do without.
    """
    if keras.backend.backend() != "torch":
        return as_arrays(structure)
    return as_tensors(structure) if limits_host() else structure


def give(model: Any, state: dict[str, Any]) -> None:
    """Let a Keras model have what `take` took from the same model, on any backend of Keras.

    Raises:
        InvalidCall: It was another model, or another optimizer.
    """
    groups = _variables(model)
    for name, group in groups.items():
        values = state.get(name, [])
        if len(values) != len(group):
            raise _another(name, f"{len(values)} {name}", f"has {len(group)}")
        for number, (v, value) in enumerate(zip(group, values, strict=True)):
            if tuple(v.shape) != tuple(value.shape):
                expected = f"number {number} of the {name} with shape {tuple(value.shape)}"
                raise _another(name, expected, f"has it with {tuple(v.shape)}")
    on_torch = keras.backend.backend() == "torch"
    for name, group in groups.items():
        for v, value in zip(group, state[name], strict=True):
            v.assign(value if on_torch else np.asarray(value))


def build(model: Any) -> None:
    """Make the variables of the optimizer, if there is one."""
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _variables(model: Any) -> dict[str, list[Any]]:
    if not model.built:
        raise InvalidCall(
            f"The model {model.name} has no weights yet.",
            "Begin it with keras.Input, or call it with a batch before.",
        )
    optimizer = model.optimizer
    build(model)
    return {
        "weights": list(model.weights),
        "optimizer variables": list(optimizer.variables) if optimizer is not None else [],
        "seeds": [v for v in model.variables if v.name == SEEDS],
    }


def _value(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value), order="C")


def _another(name: str, had: str, has: str) -> InvalidCall:
    return InvalidCall(
        f"The checkpoint has {had}, and the model {has}.",
        "Compile the same model with the same optimizer."
        if name == "optimizer variables"
        else "Build the same model, or give another folder.",
    )
