"""What a model is given: checked against its inputs, and made up where only shapes are needed."""

from collections.abc import Mapping
from typing import Any

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Input, Model


def check_inputs(model: Model, inputs: Mapping[str, Any], *, batch: bool = False) -> dict[str, Any]:
    """Inputs as arrays of the model's types.

    Args:
        model: Which.
        inputs: An array for each of its inputs.
        batch: Whether the first dimension may be a multiple of the model's.

    Raises:
        OnnxError: One is missing, unknown, of another type or shape; the sentence names it.
    """
    numpy = library("numpy")
    known = {each.name: each for each in model.inputs}
    unknown = sorted(set(inputs) - set(known))
    missing = [name for name in known if name not in inputs]
    if unknown or missing:
        mismatch = f"has no input {unknown[0]}" if unknown else f"needs the input {missing[0]}"
        raise OnnxError(
            f"{model.name} {mismatch}.", f"Its inputs are {', '.join(map(str, model.inputs)) or 'none'}."
        )
    found = {}
    for name, each in known.items():
        array = numpy.ascontiguousarray(inputs[name]).reshape(numpy.shape(inputs[name]))
        if each.dtype != "str" and array.dtype != each.dtype:
            if not numpy.can_cast(array.dtype, each.dtype, "same_kind"):
                raise OnnxError(
                    f"Input {name} of {model.name} is {array.dtype}, and the model takes {each.dtype}.",
                    f"Convert it: inputs['{name}'].astype('{each.dtype}').",
                )
            array = array.astype(each.dtype)
        _check_shape(model, each, array.shape, batch)
        found[name] = array
    return found


def _check_shape(model: Model, each: Input, shape: tuple[int, ...], batch: bool) -> None:
    wanted = each.shape
    if wanted is None:
        return
    fits = len(shape) == len(wanted)
    for place, (stated, size) in enumerate(zip(wanted, shape, strict=False)):
        whole = batch and place == 0 and isinstance(stated, int) and size > 0 and size % stated == 0
        fits = fits and (not isinstance(stated, int) or stated == size or whole)
    if not fits:
        raise OnnxError(
            f"Input {each.name} of {model.name} has the shape {list(shape)}, and the model takes {each}.",
            "Give it that shape" + (", or a multiple of its first dimension." if batch else "."),
        )


def example_of(
    model: Model, shapes: Mapping[str, tuple[int, ...]] | None = None, seed: int = 0
) -> dict[str, Any]:
    """Made-up inputs. An unknown first dimension is taken as 1.

    Args:
        model: Which.
        shapes: Of inputs whose dimensions the model leaves open.
        seed: Of the numbers.

    Raises:
        OnnxError: A shape is open and not given.
    """
    numpy = library("numpy")
    random, found = numpy.random.default_rng(seed), {}
    stated = dict(shapes or {})
    unknown = sorted(set(stated) - {each.name for each in model.inputs})
    if unknown:
        raise OnnxError(
            f"{model.name} has no input {unknown[0]}.", f"It has {', '.join(map(str, model.inputs))}."
        )
    for each in model.inputs:
        shape = stated.get(each.name)
        if shape is None:
            shape = tuple(
                size if isinstance(size, int) else 1 if place == 0 else -1
                for place, size in enumerate(each.shape if each.shape is not None else (-1,))
            )
        if min(shape, default=0) < 0:
            raise OnnxError(
                f"Input {each} of {model.name} has dimensions that the model leaves open.",
                f"Give an example of it, or its shape: --shape {each.name}=1,3,224,224",
            )
        _check_shape(model, each, shape, batch=False)
        found[each.name] = _numbers(numpy, random, each.dtype, shape)
    return found


def _numbers(numpy: Any, random: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype == "str":
        return numpy.full(shape, "text", dtype=object)
    if dtype.startswith(("float", "bfloat")):
        return random.standard_normal(shape).astype(dtype)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)
