"""Optimizers that see the gradients of the whole batch, also in loops that a script writes itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any, Protocol
from weakref import WeakSet

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras.library import keras
from carme_runtime.keras.sums import eagerly, sums
from carme_runtime.keras.variables import make_equal
from carme_runtime.keras.world import World, world

Reduce = Callable[[list[Any], list[Any]], list[Any]]

_BEGUN = "_carme_begun"  # an attribute of optimizers that have stepped in a loop
_reduce: Reduce | None = None  # of the step that runs


def Optimizer(optimizer: Any) -> Any:
    """A Keras optimizer that takes the mean of the gradients over ranks before it updates the variables.

        optimizer = Optimizer(keras.optimizers.SGD(1e-3))
        ...
        optimizer.apply_gradients(zip(gradients, model.trainable_weights))

    It is the given object, so everything else is as before. Ranks count by the samples that they got of the
    batch that `data.Dataset` gave last, and all the same where the batches come from elsewhere. All ranks get
    rank 0's variables when it first steps.
    """
    found = keras.optimizers.get(optimizer)
    take_over(found)
    loop().expected = True
    return found


class Stages(Protocol):
    """A model in stages that a loop of the script's own, or its own training step, trains."""

    def trains(self, variables: list[Any]) -> bool:
        """Whether some of these are its variables."""
        ...

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Let an optimizer step: gradients of other ranks' variables are None, the others are complete."""
        ...


class Loop:
    """What loops of a script's own have in common."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = sums(world)
        self.expected = False  # there is an optimizer for them
        self.stages: WeakSet[Stages] = WeakSet()  # models in stages that they train
        self._has_batch = False
        self.rest()

    def take(self, samples: int, total: int) -> None:
        """The script works on so many samples of a global batch of `total`."""
        self._has_batch = True
        self._sums.take(samples, total)

    def rest(self) -> None:
        """It has no batch from here: its ranks count all the same."""
        self._has_batch = False
        self._sums.take(1, self._world.size)

    def trains(self, training: Any) -> bool:
        """Whether what calls a model now, with this argument, is a training loop on all ranks."""
        return self.expected and (self._has_batch or bool(training))

    def reduced(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of the whole batch; before the first of them, the ranks are made equal."""
        if not vars(optimizer).get(_BEGUN):
            with eagerly():
                if any(not getattr(v.value, "is_initialized", lambda: True)() for v in variables):
                    raise InvalidCall(
                        "The model gets its variables while TensorFlow makes the graph of its first step.",
                        "Give the model to carme_runtime.keras.Model, or call it once before the loop.",
                    )
                if not optimizer.built:
                    optimizer.build(variables)
                make_equal(self._world, [*variables, *optimizer.variables])
            setattr(optimizer, _BEGUN, True)
        return self._sums.reduced(gradients, variables)


_loop: Loop | None = None


def loop() -> Loop:
    """That of this run."""
    global _loop
    if _loop is None:
        _loop = Loop(world())
    return _loop


def take_over(optimizer: Any) -> None:
    """Let the optimizer see the gradients of the whole batch."""
    if world().size == 1:
        return
    function: Any = apply
    if keras.backend.backend() == "tensorflow":
        function = import_module("tensorflow").autograph.experimental.do_not_convert(apply)
    optimizer.apply = MethodType(function, optimizer)


def apply(optimizer: Any, gradients: Any, trainable_variables: Any = None) -> None:
    """What replaces the method of this name."""
    of_class = type(optimizer).apply
    gradients = list(gradients)
    if not gradients:
        return
    variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
    variables = list(variables)
    for stages in () if _reduce else list(loop().stages):
        if stages.trains(variables):
            return stages.apply(optimizer, gradients, variables)
    whole = _reduce(gradients, variables) if _reduce else loop().reduced(optimizer, gradients, variables)
    with reducing(as_they_are):  # an optimizer around another one calls that one's apply
        of_class(optimizer, whole, None if trainable_variables is None else variables)


@contextmanager
def reducing(reduce: Reduce) -> Iterator[None]:
    """Optimizers that step meanwhile get what this makes of their gradients and variables."""
    global _reduce
    before, _reduce = _reduce, reduce
    try:
        yield
    finally:
        _reduce = before


def as_they_are(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """For gradients that were reduced already."""
    return gradients
