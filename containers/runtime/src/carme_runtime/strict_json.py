"""JSON that every program reads: the standard has no word for what is not a number, so it becomes null."""

import json
import math
from collections.abc import Callable
from typing import Any


def dumps(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """The JSON of a value, with null for NaN and for the infinities.

    Args:
        value: Dictionaries, lists, texts, numbers; those within `value` stay as they are.
        indent: Spaces by which each level is moved; None: all on one line.
        default: Makes something that JSON has out of what it has not.
    """
    whole = finite(value)
    if default is None:
        return json.dumps(whole, indent=indent, allow_nan=False)
    return json.dumps(whole, indent=indent, allow_nan=False, default=lambda each: finite(default(each)))


def finite(value: Any) -> Any:
    """The same with None for each number that is none or is infinite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
