"""The functions of a source file in C or C++, and their lines.

It looks at braces only, so it needs no compiler: it knows formatted code, and no macros that open a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["code_of", "functions"]

#: Parts whose braces are not code: comments, texts, characters and lines of the preprocessor.
_NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*"'
    r"|(?<![0-9A-Fa-f])'(?:[^'\\\n]|\\.)+'"
    r"|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
#: Blocks that have functions within.
_OUTER = re.compile(r"^(?:template\s*<[^;{}]*>\s*)?(?:inline\s+)?(?:namespace|class|struct|union|extern)\b")
_NAME = re.compile(r"([\w:~]+(?:\s*operator\s*\S+?)?)\s*\(")


def code_of(source: str) -> str:
    """The source with spaces for comments and texts, of C, C++ or JavaScript; its lines stay."""
    return _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The name and the lines of each function with a body, from its first line to its last brace."""
    code = code_of(source)
    header, place, last = 0, 0, ("", 0)
    while found := re.compile(r"[;{}]").search(code, place):
        place = found.end()
        text = code[header : found.start()]
        if found[0] != "{" or _is_outer(text):
            header = place
            continue
        place = _end(code, place)
        begin = header + len(text) - len(text.lstrip())
        if text.lstrip().startswith("catch"):  # of the function whose body is a try block
            begin = last[1]
        elif name := _NAME.search(text):
            last = name[1], begin
        else:  # an initializer, an enumeration
            header = place
            continue
        header = place
        yield last[0], code.count("\n", begin, place) + 1


def _is_outer(header: str) -> bool:
    return bool(_OUTER.match(header.strip())) and "(" not in header


def _end(code: str, place: int) -> int:
    """Where the block ends whose first brace stands before this place."""
    depth = 1
    for found in re.compile(r"[{}]").finditer(code, place):
        depth += 1 if found[0] == "{" else -1
        if not depth:
            return found.end()
    return len(code)
