"""Carme's sentences in the reader's language: errors, and why jobs wait or have ended.

They are made in English wherever something is found wrong, the broker included, which knows no reader. Who
shows them calls `follow` once, and from then on `str()` of an error is in the language that holds at the
moment. What has no translation stays as it is.

A sentence is looked up by its template: `A booking lasts at most {0}, not {1}.` Its values are looked up in
turn.
"""

import functools
import os
import re
from collections.abc import Callable

__all__ = ["follow", "language_of_terminal", "translated"]

#: Each has a file here: English templates of sentences, and of the parts that are values, to its own.
_LANGUAGES = ("de",)
_PLACE = re.compile(r"\\{(\d)\\}")
# What is added to a sentence's cause in brackets: a limit and its use, which nodes.
_DETAIL = re.compile(r"(?P<cause>[^;]*?) \((?P<detail>.*)\)(?P<rest>; [^;]*|\.)", re.DOTALL)
_QUOTED = re.compile(r"(['\"]).*\1", re.DOTALL)  # names
_LONGEST = 1000  # letters; what is longer holds somebody's log
_DEPTH = 3  # templates whose values are made of templates

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
    return _look_up(text, code, _DEPTH) if text and code in _LANGUAGES else text


@functools.lru_cache(maxsize=2048)
def _look_up(text: str, code: str, depth: int) -> str:
    if found := _table(code).get(text):
        return found
    if not depth or len(text) > _LONGEST or _QUOTED.fullmatch(text):
        return text
    for pattern, template in _patterns(code):
        if match := pattern.fullmatch(text):
            values = [_look_up(value, code, depth - 1) for value in match.groups()]
            return template.format(*values)
    if match := _DETAIL.fullmatch(text):
        plain = match["cause"] + match["rest"]
        if (found := _look_up(plain, code, 0)) != plain:
            cause, mark, step = found.partition("; ")
            return f"{cause.rstrip('.')} ({_look_up(match['detail'], code, depth - 1)}){mark or '.'}{step}"
    return text


@functools.cache
def _table(code: str) -> dict[str, str]:
    # Programs that must start at once import the errors, and few of them need another language.
    import json
    from pathlib import Path

    return json.loads(Path(__file__).with_name(f"{code}.json").read_text("utf-8"))


@functools.lru_cache(maxsize=4)
def _patterns(code: str) -> list[tuple[re.Pattern[str], str]]:
    """The templates with values, those that say most first: `A booking lasts` comes before `{0} lasts`."""
    found = []
    for template, said in _table(code).items():
        escaped = re.escape(template)
        if _PLACE.search(escaped):
            pattern = re.compile(_PLACE.sub("(.+?)", escaped), re.DOTALL)
            found.append((len(_PLACE.sub("", escaped)), pattern, said))
    return [(pattern, said) for _length, pattern, said in sorted(found, key=lambda one: -one[0])]
