"""Contents of files that travel with a request: texts, and bytes that are not text in UTF-8.

In programs they are strings, in which Python's surrogates stand for bytes that are not UTF-8
(`surrogateescape`), so that no byte is lost. JSON and pages cannot hold these: on the wire such a content is
`{"base64": "..."}`, and on a page it is shown as Latin-1, which has a letter for each byte.
"""

import base64
import binascii
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from carme.translation import message as _

__all__ = [
    *("PAGE_ENCODING", "Content", "encoding_of", "from_bytes"),
    *("is_text", "shown", "to_bytes", "typed", "wire"),
]

_NEITHER = _("must be text, or {'base64': ...} for bytes that are not text")

#: For contents that are not UTF-8: each byte is a letter, so that what is shown can be taken back.
PAGE_ENCODING = "latin-1"


def from_bytes(data: bytes) -> str:
    """The content that these bytes are."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(content: str) -> bytes:
    """The bytes of a content."""
    return content.encode("utf-8", "surrogateescape")


def is_text(content: str) -> bool:
    """Whether it is text in UTF-8."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def encoding_of(content: str) -> str:
    """The name of the encoding in which pages show it; empty for what is text."""
    return "" if is_text(content) else PAGE_ENCODING


def shown(content: str) -> str:
    """What pages show of it."""
    return content if is_text(content) else to_bytes(content).decode(PAGE_ENCODING)


def typed(text: str) -> str:
    """The content that `shown` gave for what is not UTF-8, after somebody has edited it.

    Raises:
        ValueError: It has letters now that Latin-1 does not have.
    """
    return from_bytes(text.encode(PAGE_ENCODING))


def wire(content: str) -> str | dict[str, str]:
    """What JSON holds of it."""
    if is_text(content):
        return content
    return {"base64": base64.b64encode(to_bytes(content)).decode()}


def _read(given: Any) -> str:
    if isinstance(given, str):
        try:
            to_bytes(given)
        except UnicodeEncodeError:
            raise ValueError(_NEITHER) from None
        return given
    if isinstance(given, dict) and given.keys() == {"base64"} and isinstance(given["base64"], str):
        try:
            return from_bytes(base64.b64decode(given["base64"], validate=True))
        except (binascii.Error, ValueError):
            raise ValueError(_("must have bytes in base64 in 'base64'")) from None
    raise ValueError(_NEITHER)


_ENCODED = {
    "type": "object",
    "properties": {"base64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["base64"],
    "additionalProperties": False,
}

#: A field of a model that holds a content.
Content = Annotated[
    str,
    PlainValidator(_read),
    PlainSerializer(wire),
    WithJsonSchema({"anyOf": [{"type": "string"}, _ENCODED]}),
]
