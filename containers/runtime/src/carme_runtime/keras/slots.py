"""What a Keras optimizer keeps for each variable that it trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.library import keras
from carme_runtime.keras.world import World


class Slots:
    """The variables of an optimizer that belong to one of the model; the optimizer is built.

    Args:
        optimizer: Keras' own.
        variables: Those that it trains, in the order of the model.
        world: The ranks, which make this together.

    Raises:
        InvalidCall: An optimizer that needs all variables at a time.
    """

    def __init__(self, optimizer: Any, variables: list[Any], world: World) -> None:
        _refuse(optimizer)
        self.optimizer = optimizer
        if optimizer.global_clipnorm:
            optimizer._clip_gradients = _as_they_are  # they are clipped over all stages before
        if not optimizer.built:
            optimizer.build(variables)
        twin = type(optimizer).from_config(optimizer.get_config())
        with _noting(twin) as references:
            twin.build(variables)
        if len(twin.variables) != len(optimizer.variables):
            raise InvalidCall(
                f"The optimizer {optimizer.name} was built for other variables than the model trains.",
                "Compile the model again after layers were frozen or unfrozen.",
            )
        both = zip(optimizer.variables, twin.variables, strict=True)
        self.pairs = [(slot, references[id(like)]) for slot, like in both if id(like) in references]


@contextmanager
def _noting(optimizer: Any) -> Iterator[dict[int, Any]]:
    """Note for which variable the optimizer makes one of its own, by the identity of that."""
    references: dict[int, Any] = {}
    original = optimizer.add_variable_from_reference

    def add(reference_variable: Any, *arguments: Any, **keywords: Any) -> Any:
        slot = original(reference_variable, *arguments, **keywords)
        references[id(slot)] = reference_variable
        return slot

    optimizer.add_variable_from_reference = add
    try:
        yield references
    finally:
        del optimizer.add_variable_from_reference


def _refuse(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidCall(f"A pipeline cannot train with {kind}.", "Use float32 or bfloat16 for the layers.")
    if optimizer.use_ema:
        raise InvalidCall(
            f"{kind} has use_ema=True, which a pipeline cannot: it averages variables of all stages.",
            "Leave use_ema out, or train with ParallelStrategy.DATA.",
        )
    if optimizer.global_clipnorm and optimizer.gradient_accumulation_steps:
        raise InvalidCall(
            f"{kind} has both global_clipnorm and gradient_accumulation_steps, which a pipeline cannot.",
            "Use clipnorm, or larger batches in more micro-batches.",
        )


def _as_they_are(gradients: list[Any]) -> list[Any]:
    return gradients
