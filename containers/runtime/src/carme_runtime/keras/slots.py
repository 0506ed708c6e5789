"""What a Keras optimizer keeps for each variable that it trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.library import keras
from carme_runtime.keras.world import World

#: What Keras' optimizers do with the averages of `use_ema`, over all variables.
_OF_AVERAGES = ("_update_model_variables_moving_average", "_overwrite_model_variables_with_average_value")


class Slots:
    """The variables of an optimizer that belong to one of the model; the optimizer is built.

    Args:
        optimizer: Keras' own.
        variables: Those that it trains, in the order of the model.
        world: The ranks, which make this together.
        is_held: Whether this rank has a variable's memory.

    Raises:
        InvalidCall: An optimizer that needs all variables at a time.
    """

    def __init__(
        self, optimizer: Any, variables: list[Any], world: World, is_held: Callable[[Any], bool]
    ) -> None:
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
        pairs = zip(optimizer.variables, twin.variables, strict=True)
        self.pairs = [(slot, references[id(like)]) for slot, like in pairs if id(like) in references]
        self._is_held = is_held
        if optimizer.use_ema:
            optimizer._update_model_variables_moving_average = lambda _: self._average()
            optimizer._overwrite_model_variables_with_average_value = lambda _: self._take_averages()

    def let_go(self) -> None:
        """The rank has the whole model from now on: Keras averages all variables itself."""
        if self.optimizer.use_ema:
            for name in _OF_AVERAGES:
                vars(self.optimizer).pop(name, None)

    def count_step(self) -> None:
        """A step in which no variable of this rank gets a gradient; its averages go on, as in Keras alone."""
        optimizer = self.optimizer
        if optimizer.use_ema:
            self._average()
            frequency = optimizer.ema_overwrite_frequency
            if frequency and (self._steps() + 1) % frequency == 0:
                self._take_averages()
        optimizer._iterations.assign_add(1)

    def _average(self) -> None:
        """Keras' `use_ema`, for the variables of this rank's stage."""
        for variable, average in self._averages():
            # Rounded as Keras rounds it.
            old = keras.ops.cast(self.optimizer.ema_momentum if self._steps() else 0.0, variable.dtype)
            average.assign(old * average.value + (1 - old) * variable.value)

    def _steps(self) -> int:
        return int(keras.ops.convert_to_numpy(self.optimizer.iterations))

    def _take_averages(self) -> None:
        for variable, average in self._averages():
            variable.assign(average.value)

    def _averages(self) -> Iterator[tuple[Any, Any]]:
        optimizer = self.optimizer
        pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
        for variable, average in pairs:
            if average is not None and self._is_held(variable):
                yield variable, average


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
    if optimizer.global_clipnorm and optimizer.gradient_accumulation_steps:
        raise InvalidCall(
            f"{kind} has both global_clipnorm and gradient_accumulation_steps, which a pipeline cannot.",
            "Use clipnorm, or larger batches in more micro-batches.",
        )


def _as_they_are(gradients: list[Any]) -> list[Any]:
    return gradients
