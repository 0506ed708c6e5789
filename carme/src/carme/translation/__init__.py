"""Carme's sentences in the reader's language: errors, and why jobs wait or have ended.

They are made wherever something is found wrong, the broker included, which knows no reader: a `Message` is
the English text, and carries the template and the values that it was made of. Sockets and databases keep
these (`carme.translation.models`). Who shows sentences calls `follow` once; from then on `translated` and
`str()` of an error render them by the gettext catalogue in the language that holds at the moment. What has no
translation stays as it is.

`carme/catalogue.py` brings the catalogue up to date with the code.
"""

from __future__ import annotations

import os

from carme.translation.messages import (
    Message,
    joined,
    message,
    moment,
    moments,
    noop,
    plural,
    row_of,
    until_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Message",
    "follow",
    "joined",
    "language_of_terminal",
    "language_shown",
    "message",
    "moment",
    "moments",
    "noop",
    "plural",
    "row_of",
    "translated",
    "until_of",
]

_language: Callable[[], str | None] = lambda: None  # noqa: E731


def follow(language: Callable[[], str | None]) -> None:
    """From now on sentences are in the language that this says at each moment, like `de` or `de-at`."""
    global _language
    _language = language


def language_of_terminal() -> str:
    """The language that `LC_ALL`, `LC_MESSAGES` or `LANG` names, in this order, as POSIX has it.

    https://pubs.opengroup.org/onlinepubs/9799919799/basedefs/V1_chap08.html
    """
    named = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return next((each for each in named if each), "")


def translated(text: str, language: str | None = None) -> str:
    """A sentence in another language, as far as it is known there.

    Args:
        text: What Carme says: a `Message`. Other text stays as it is.
        language: By default the one that `follow` was given.
    """
    if not isinstance(text, Message):
        return text
    code = _language() if language is None else language
    return text.in_language(code) if code else str.__str__(text)


def language_shown(text: str) -> str:
    """The language in which `translated` shows a text now: `de` for German, `en` where it stays as it is.

    Pages whose other words are English mark with it what is not.
    """
    code = _language() or ""
    return "en" if translated(text) == str.__str__(text) else code[:2].lower()
