"""A sentence looked up in a language's table, by its template."""

import functools
import json
import re
from pathlib import Path

__all__ = ["look_up"]

_PLACE = re.compile(r"\\{(\d)\\}")
# What is added to a sentence's cause in brackets: a limit and its use, which nodes.
_DETAIL = re.compile(r"(?P<cause>[^;]*?) \((?P<detail>.*)\)(?P<rest>; [^;]*|\.)", re.DOTALL)
_QUOTED = re.compile(r"(['\"]).*\1", re.DOTALL)  # names
_LONGEST = 1000  # letters; what is longer holds somebody's log
_DEPTH = 4  # templates whose values are made of templates


def look_up(text: str, code: str) -> str:
    """The sentence in that language, as far as it is known there."""
    return _said(text, code, _DEPTH)


@functools.lru_cache(maxsize=2048)
def _said(text: str, code: str, depth: int) -> str:
    if found := _table(code).get(text):
        return found
    if not depth or len(text) > _LONGEST or _QUOTED.fullmatch(text):
        return text
    # Before the templates, as words of the detail alone may look like one.
    if match := _DETAIL.fullmatch(text):
        plain = match["cause"] + match["rest"]
        if (found := _said(plain, code, 0)) != plain:
            cause, mark, step = found.partition("; ")
            return f"{cause.rstrip('.')} ({_said(match['detail'], code, depth - 1)}){mark or '.'}{step}"
    for pattern, template in _patterns(code):
        if match := pattern.fullmatch(text):
            values = [_said(value, code, depth - 1) for value in match.groups()]
            return template.format(*values)
    return text


@functools.cache
def _table(code: str) -> dict[str, str]:
    return json.loads(Path(__file__).with_name(f"{code}.json").read_text("utf-8"))


@functools.lru_cache(maxsize=4)
def _patterns(code: str) -> list[tuple[re.Pattern[str], str]]:
    """The templates with values, those that say most first: `A booking lasts` comes before `{0} lasts`."""
    found = []
    for template, message in _table(code).items():
        escaped = re.escape(template)
        if _PLACE.search(escaped):
            pattern = re.compile(_PLACE.sub("(.+?)", escaped), re.DOTALL)
            found.append((len(_PLACE.sub("", escaped)), pattern, message))
    return [(pattern, message) for _length, pattern, message in sorted(found, key=lambda one: -one[0])]
