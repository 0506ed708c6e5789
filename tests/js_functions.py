"""The functions of a script in JavaScript, and their lines.

It looks at brackets only, so it needs no parser. It knows formatted code, whose statements end in semicolons.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

__all__ = ["functions"]

#: Comments, and texts in quotes.
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'", re.DOTALL)
#: A regular expression; a slash that follows a value divides.
_PATTERN = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
_BEFORE_PATTERN = re.compile(r"(?:^|[(,=:\[!&|?{};+*<>~^%-]|\b(?:return|typeof|case|in|of|await|yield))\s*$")
#: What begins a function: an arrow, or a block after parameters.
_BEGIN = re.compile(r"=>\s*\{?|\)\s*\{")
#: Blocks after brackets that are not functions.
_STATEMENTS = {"if", "for", "while", "switch", "catch", "with"}
_FOR_AWAIT = re.compile(r"\bfor\s+await\s*$")
_ASYNC = re.compile(r"\basync\s*$")
_LETTERS = string.ascii_letters + string.digits + "_$"
#: A method, or a function with a name or none, with what stands before it.
_NAME = re.compile(r"(?:\b(?:async|static|get|set|function)\b[\s*]*)*([\w$#]*)\s*$")
#: What a value is assigned to.
_NAMED = re.compile(r"([\w$#]+)\s*[=:]\s*$")
_OPEN, _CLOSE = "([{", ")]}"
_NAMELESS = "(function without a name)"


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The name and the lines of each function, from its first line to its last brace, with those within it.

    The function that holds a whole script and is called at once, `(() => { ... })();`, counts as its file.
    """
    code = _code_of(source)
    for found in _BEGIN.finditer(code):
        start = (_arrow if found[0].startswith("=") else _block)(code, found.start())
        if start is None:
            continue
        begin, name = start
        end = _end(code, found.end()) if found[0].endswith("{") else _end_of_value(code, found.end())
        if not _holds_script(code, begin, end):
            yield name, code.count("\n", begin, end) + 1


def _arrow(code: str, place: int) -> tuple[int, str]:
    """Where the function of the arrow at this place begins, and its name."""
    before = code[:place].rstrip()
    begin = _begin(before, len(before) - 1) if before.endswith(")") else len(before.rstrip(_LETTERS))
    if found := _ASYNC.search(code[:begin]):
        begin = found.start()
    return begin, _name_of_value(code[:begin])


def _block(code: str, close: int) -> tuple[int, str] | None:
    """The same of the block after the bracket that closes parameters at this place; None: of a statement."""
    before = code[: _begin(code, close)]
    name = _NAME.search(before)
    if name is None or name[1] in _STATEMENTS or _FOR_AWAIT.search(before):
        return None
    return name.start(), name[1] or _name_of_value(code[: name.start()])


def _name_of_value(before: str) -> str:
    """What a function is called that stands in a value after that code."""
    named = _NAMED.search(before)
    return named[1] if named else _NAMELESS


def _code_of(source: str) -> str:
    """The source with spaces for comments, texts and regular expressions; its lines stay.

    What stands in `${}` of a template is code as well.
    """
    code: list[str] = []
    #: For each template around this place: how many braces are open in its value.
    open_braces: list[int] = []
    place = 0
    while place < len(source):
        letter = source[place]
        if found := _no_code(source, place, code):
            code.append(_blank(found))
            place += len(found)
            continue
        if letter == "`" or (letter == "}" and open_braces and open_braces[-1] == 0):
            if letter == "}":
                open_braces.pop()
            found = _text_of_template(source, place + 1)
            code.append(_blank(letter + found))
            place += 1 + len(found)
            if found.endswith("${"):
                open_braces.append(0)
            continue
        if open_braces:
            open_braces[-1] += {"{": 1, "}": -1}.get(letter, 0)
        code.append(letter)
        place += 1
    return "".join(code)


def _no_code(source: str, place: int, code: list[str]) -> str:
    """The comment, text or regular expression that begins at this place, after that code; else nothing."""
    if source[place] not in "/\"'":
        return ""
    if found := _NO_CODE.match(source, place):
        return found[0]
    before = "".join(code[-80:])
    found = _PATTERN.match(source, place) if _BEFORE_PATTERN.search(before) else None
    return found[0] if found else ""


def _text_of_template(source: str, place: int) -> str:
    """A template's text from this place to its end, or to the beginning of a value."""
    found = re.compile(r"(?:[^`\\$]|\\.|\$(?!\{))*(?:`|\$\{|\Z)", re.DOTALL).match(source, place)
    return found[0] if found else ""


def _blank(text: str) -> str:
    """A comment becomes spaces; a text in quotes, a template or a regular expression becomes a value."""
    if text.startswith(("//", "/*")) or len(text) < 2:
        return re.sub(r"[^\n]", " ", text)
    return "0" + re.sub(r"[^\n]", " ", text[1:])


def _begin(code: str, close: int) -> int:
    """Where the bracket opens that closes at this place."""
    depth = 0
    for place in range(close, -1, -1):
        depth += (code[place] in _CLOSE) - (code[place] in _OPEN)
        if not depth:
            return place
    return 0


def _end(code: str, place: int) -> int:
    """Where the block ends whose first brace stands before this place."""
    depth = 1
    for found in re.compile(r"[(){}\[\]]").finditer(code, place):
        depth += 1 if found[0] in _OPEN else -1
        if not depth:
            return found.end()
    return len(code)


def _end_of_value(code: str, place: int) -> int:
    """Where the value ends that an arrow at this place returns."""
    depth = 0
    for found in re.compile(r"[(){}\[\],;]").finditer(code, place):
        if not depth and found[0] not in _OPEN:
            return found.start()
        depth += (found[0] in _OPEN) - (found[0] in _CLOSE)
    return len(code)


def _holds_script(code: str, begin: int, end: int) -> bool:
    """Whether nothing but a directive stands before the function, and it is called at once."""
    is_first = re.fullmatch(r"(?:[\s;]|\b0\b)*\(\s*", code[:begin]) is not None
    return is_first and re.match(r"\s*\)\s*\(", code[end:]) is not None
