"""Carme's sentences in the reader's language: errors, and why jobs wait or have ended.

They are made in English wherever something is found wrong, the broker included, which knows no reader. Who
shows them calls `follow` once, and from then on `str()` of an error is in the language that holds at the
moment. What has no translation stays as it is.

A sentence is looked up by its template: `A booking lasts at most {0}, not {1}.` Its values are looked up in
turn.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["follow", "language_of_terminal", "translated"]

#: Each has a file here: English templates of sentences, and of the parts that are values, to its own.
_LANGUAGES = ("de",)

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
    return next((one for one in named if one), "")


def translated(text: str, language: str | None = None) -> str:
    """A sentence in another language, as far as it is known there.

    Args:
        text: What Carme says, in English.
        language: By default the one that `follow` was given.
    """
    code = (_language() if language is None else language) or ""
    code = code[:2].lower()
    if not text or code not in _LANGUAGES:
        return text
    # Programs that must start at once import the errors, and few of them need another language.
    from carme.translation.sentences import look_up

    return look_up(text, code)
