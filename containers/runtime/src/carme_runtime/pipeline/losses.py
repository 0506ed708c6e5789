"""What to say when a loss cannot be computed for what the last stage makes."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.errors import CarmeRuntimeError

_OF_MEMORY = ("OutOfMemoryError", "ResourceExhaustedError")  # of PyTorch and TensorFlow


@contextlib.contextmanager
def explained(outputs: Sequence[Any], targets: Sequence[Any], subject: str = "The loss") -> Iterator[None]:
    """Turn what a loss raises into a sentence that names the shapes.

    Args:
        outputs: Of the model, for a micro-batch.
        targets: For the same samples; what has no shape is left out.
        subject: What is computed, as a sentence begins.

    Raises:
        InvalidCall: The loss failed. Errors of this package and lack of memory pass as they are.
    """
    try:
        yield
    except (CarmeRuntimeError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ in _OF_MEMORY:
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidCall(
            f"{subject} fails for outputs {_shapes(outputs)} and targets {_shapes(targets)}: "
            f"{first.rstrip('.')}.",
            "Give targets that fit the model's outputs, and a loss for both.",
        ) from error


def not_a_single_number(shape: Sequence[int]) -> InvalidCall:
    """What to say of a loss that is no mean."""
    return InvalidCall(
        f"The loss has the shape {list(shape)}, and is to be one number: the mean over the samples.",
        "Use reduction='mean', or take the mean of it.",
    )


def _shapes(values: Sequence[Any]) -> str:
    found = [str(list(value.shape)) for value in values if hasattr(value, "shape")]
    return f"of shape {', '.join(found)}" if found else "of unknown shape"
