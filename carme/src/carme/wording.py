"""Sentences for values that do not fit a model."""

from __future__ import annotations

from collections.abc import Iterable

from carme.translation import joined
from carme.translation import message as _
from carme.translation import plural as by_count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    # Not all who want a plural want to wait for it.
    from pydantic_core import ErrorDetails

__all__ = [
    "decimal",
    "in_units",
    "listing",
    "memory",
    "nearest",
    "number",
    "percent",
    "place",
    "problem",
    "size",
]


def listing(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`; `none` when there are none."""
    words = list(words)
    if len(words) < 2:
        return words[0] if words else _("none")
    return _("{first} and {last}", first=joined(words[:-1], ", "), last=words[-1])


def number(count: int, singular: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`."""
    return by_count(f"{{count}} {singular}", f"{{count}} {plural or singular + 's'}", count)


def decimal(value: float) -> str:
    """A number with at most one decimal, in the reader's language: `12`, `0.5`."""
    return _("{value:.15g}", value=round(value, 1))


def size(count: float) -> str:
    """A number of bytes for people, in units of 1024."""
    value, unit = in_units(count)
    return f"{value:.0f} {unit}" if unit == "B" else _("{value:.1f} {unit}", value=value, unit=unit)


def in_units(count: float) -> tuple[float, str]:
    """A number of bytes as a number with one decimal, below 1024 where there is such a unit, and its unit."""
    value, unit = round(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        count /= 1024
        value, unit = round(count, 1), larger
    return value, unit


def percent(share: float) -> str:
    """A share in words, its number and sign kept on one line: `40 %`."""
    return f"{share * 100:.0f}\xa0%"


def memory(mib: int) -> str:
    """What a job has or asks for, given in MiB as Slurm does: `512 MiB`, `64 GiB`, `3.9 GiB`."""
    value, unit = in_units(mib << 20)
    return _("{value} {unit}", value=decimal(value), unit=unit)


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known word nearest to `word`, or all of them when none is near."""
    import difflib

    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (
        _("The nearest known one is {close!r}.", close=close[0])
        if close
        else _("Choose from: {known}.", known=", ".join(known))
    )


def place(detail: ErrorDetails) -> str:
    """Where in the model the value sits: `environment.PATH`, `command[2]`."""
    text = ""
    for part in detail["loc"]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_EXPECTED = {
    "string_type": _("a text"),
    "string_unicode": _("text in UTF-8"),
    "int_type": _("a whole number"),
    "int_parsing": _("a whole number"),
    "int_from_float": _("a whole number"),
    "float_type": _("a number"),
    "float_parsing": _("a number"),
    "bool_type": _("true or false"),
    "bool_parsing": _("true or false"),
    "list_type": _("a list"),
    "dict_type": _("a table"),
    "model_type": _("a table"),
    "model_attributes_type": _("a table"),
}


def problem(detail: ErrorDetails, subject: str) -> str:
    """One sentence on what is wrong with `subject` and what was expected."""
    context: dict[str, Any] = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "missing":
        return _("{subject} is missing.", subject=subject)
    if kind == "value_error":
        return _("{subject} {what}.", subject=subject, what=context["error"])
    shown = repr(detail["input"])
    given = f"{shown[:77]}..." if len(shown) > 80 else shown
    if kind in _EXPECTED:
        return _(
            "{subject} must be {expected}, not {given}.",
            subject=subject,
            expected=_EXPECTED[kind],
            given=given,
        )
    if kind == "greater_than_equal":
        return _(
            "{subject} must be at least {least}, not {given}.",
            subject=subject,
            least=context["ge"],
            given=given,
        )
    if kind == "less_than_equal":
        return _(
            "{subject} must be at most {most}, not {given}.",
            subject=subject,
            most=context["le"],
            given=given,
        )
    if kind == "greater_than":
        return _(
            "{subject} must be more than {bound}, not {given}.",
            subject=subject,
            bound=context["gt"],
            given=given,
        )
    if kind == "literal_error":
        return _(
            "{subject} must be {expected}, not {given}.",
            subject=subject,
            expected=context["expected"],
            given=given,
        )
    if kind in ("too_short", "string_too_short"):
        return _("{subject} must not be empty.", subject=subject)
    if kind == "string_too_long":
        most = context["max_length"]
        if not isinstance(detail["input"], str):
            return _("{subject} must have at most {most} characters.", subject=subject, most=most)
        return _(
            "{subject} must have at most {most} characters, not {length}.",
            subject=subject,
            most=most,
            length=len(detail["input"]),
        )
    return _("{subject} is not valid: {detail}.", subject=subject, detail=detail["msg"])
