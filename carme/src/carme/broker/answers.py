"""The result of an operation as JSON, in pieces where it is long: a large site's has tens of megabytes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_json

from carme.broker.overview import Overview
from carme.broker.protocol import EventBatch

__all__ = ["pieces"]

#: Elements of a list in one piece.
AT_ONCE = 1000
#: Models with long lists. Nothing but their fields is in their JSON, so these are written one by one.
_OF_FIELDS = (EventBatch, Overview)


def pieces(result: Any) -> Iterable[bytes]:
    """A whole `protocol.Answer` with this result, piece by piece; a short one is made at once."""
    if isinstance(result, _OF_FIELDS) and any(_is_long(value) for _name, value in result):
        return _answer(_of_fields(result))
    if _is_long(result):
        return _answer(_of_list(cast(Sequence[Any], result)))
    return [_json({"result": result, "error": None})]


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > AT_ONCE  # pyright: ignore[reportUnknownArgumentType]


def _answer(result: Iterator[bytes]) -> Iterator[bytes]:
    yield b'{"result":'
    yield from result
    yield b',"error":null}'


def _of_fields(model: BaseModel) -> Iterator[bytes]:
    before = b"{"
    for name, value in model:
        yield before + _json(name) + b":"
        yield from _of_list(value) if _is_long(value) else (_json(value),)
        before = b","
    yield b"}"


def _of_list(values: Sequence[Any]) -> Iterator[bytes]:
    for first in range(0, len(values), AT_ONCE):
        part = _json(values[first : first + AT_ONCE])
        yield (b"," if first else b"[") + part[1:-1]
    yield b"]"


def _json(value: Any) -> bytes:
    # JSON has no NaN.
    return to_json(value, inf_nan_mode="null")
