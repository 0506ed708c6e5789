"""A message within HTML: what JupyterHub shows of an error, from which the portal gets the template back."""

import html
import json
import re

from carme.translation.messages import Message

__all__ = ["message_in", "with_message"]

_MARK = re.compile(r'<span data-message="([^"]*)">')


def with_message(text: str) -> str:
    """The text as HTML, in which `message_in` finds the message that it is."""
    shown = html.escape(text)
    if not isinstance(text, Message):
        return shown
    return f'<span data-message="{html.escape(json.dumps(text.parts()))}">{shown}</span>'


def message_in(markup: str) -> Message | None:
    """The first message in HTML; None where there is none."""
    match = _MARK.search(markup)
    if match is None:
        return None
    try:
        return Message.of_parts(json.loads(html.unescape(match[1])))
    except (ValueError, RecursionError):
        return None
