"""What ranges hold: types and shapes, as NumPy has them; bytes need no NumPy."""

import math
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.range_files import Description


def describe(
    name: str, shape: int | str | tuple[int, ...], dtype: Any, lifetime: str, task: int
) -> Description:
    """A range of this shape and type. Raises PetriError where it is none."""
    kind, width = type_of(dtype)
    try:
        if isinstance(shape, str):
            shape = parse_size(shape) // width
        sizes = (shape,) if isinstance(shape, int) else tuple(int(each) for each in shape)
    except (CarmeRuntimeError, TypeError, ValueError):
        sizes = ()
    size = math.prod(sizes) * width
    if not sizes or min(sizes) < 1 or size >= 1 << 62:
        raise PetriError(
            f"{shape!r} is not a valid size of range {name}.",
            'Give a number, a shape, or a size such as "2GiB".',
        )
    return Description(name, size, lifetime, kind, sizes, task)


def type_of(type_name: Any) -> tuple[str, int]:
    """A type as NumPy writes it, and its bytes; bytes need no NumPy."""
    if type_name in ("|u1", "uint8", "u1", bytes):
        return "|u1", 1
    try:
        found = numpy_module().dtype(type_name)
    except TypeError:
        found = None
    if found is None or found.hasobject or found.itemsize == 0 or found.names:
        raise PetriError(
            f"{type_name!r} is not a valid type of the elements of a range.", "Give one such as 'float32'."
        )
    return found.str, found.itemsize


def numpy_module() -> Any:
    """NumPy. Raises PetriError where it is not installed."""
    try:
        import numpy
    except ImportError:
        raise PetriError(
            "NumPy is not installed, so ranges hold bytes only.", "Install numpy, or use range.buffer."
        ) from None
    return numpy


def kind_of(description: Description) -> str:
    """What a range holds, in words."""
    return f"{description.dtype} of shape {description.shape}"
