"""Sentences for values that do not fit a model."""

from __future__ import annotations

from collections.abc import Iterable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    # Not all who want a plural want to wait for it.
    from pydantic_core import ErrorDetails

__all__ = ["listing", "nearest", "number", "place", "problem", "size"]


def listing(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`; `none` when there are none."""
    words = list(words)
    if len(words) < 2:
        return words[0] if words else "none"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def number(count: int, singular: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def size(count: float) -> str:
    """A number of bytes for people, in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known word nearest to `word`, or all of them when none is near."""
    import difflib

    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"The nearest known one is {close[0]!r}." if close else f"Known are: {', '.join(known)}."


def place(detail: ErrorDetails) -> str:
    """Where in the model the value sits: `environment.PATH`, `command[2]`."""
    text = ""
    for part in detail["loc"]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_EXPECTED = {
    "string_type": "a text",
    "string_unicode": "text in UTF-8",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def problem(detail: ErrorDetails, subject: str) -> str:
    """One sentence on what is wrong with `subject` and what was expected."""
    context: dict[str, Any] = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "missing":
        return f"{subject} is missing."
    if kind == "value_error":
        return f"{subject} {context['error']}."
    shown = repr(detail["input"])
    given = f"{shown[:77]}..." if len(shown) > 80 else shown
    if kind in _EXPECTED:
        return f"{subject} must be {_EXPECTED[kind]}, not {given}."
    if kind == "greater_than_equal":
        return f"{subject} must be at least {context['ge']}, not {given}."
    if kind == "less_than_equal":
        return f"{subject} must be at most {context['le']}, not {given}."
    if kind == "greater_than":
        return f"{subject} must be more than {context['gt']}, not {given}."
    if kind == "literal_error":
        return f"{subject} must be {context['expected']}, not {given}."
    if kind in ("too_short", "string_too_short"):
        return f"{subject} must not be empty."
    if kind == "string_too_long":
        length = f", not {len(detail['input'])}" if isinstance(detail["input"], str) else ""
        return f"{subject} must have at most {context['max_length']} characters{length}."
    return f"{subject} is not valid: {detail['msg']}."
