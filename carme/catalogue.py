#!/usr/bin/env python3
"""The catalogue of the German for Carme's own sentences: `catalogue.py` brings it up to date with the code.

It collects the templates that `carme.translation` marks (`message`, which modules call `_`, `plural`, `noop`,
and the nouns of `carme.wording.number`) from the code of `carme`, the spawner and the portal, and those of
notebooks' magics (`carme_runtime.wording.translate`), into `locale/de/LC_MESSAGES/carme.po`, and compiles
that. A sentence that was reworded keeps its German, marked as fuzzy, until somebody has checked it: it is
not compiled, and the test of the catalogue fails. Both files belong to the source, so that an installation
needs no gettext.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).parents[1]
LOCALE = Path(__file__).parent / "src/carme/translation/locale/de/LC_MESSAGES"
MARKS = ("message", "noop", "plural", "number")
#: In the portal `_` is Django's, whose catalogue is its own.
SOURCES = {
    "carme/src/carme": (*MARKS, "_"),
    "spawner/src": (*MARKS, "_"),
    "webui/src": MARKS,
    "containers/runtime/src": ("translate",),
}
#: One template, or those for one thing and for several.
Template = str | tuple[str, str]


def calls_of(path: Path, marks: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    """The calls of these functions in a module, each with the function's name."""
    source = path.read_text(encoding="utf-8")
    # Most modules have none, and it takes long to parse them.
    if not re.search(rf"(?<![\w.])(?:{'|'.join(marks)})\s*\(", source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in marks:
            yield node.func.id, node


def of_module(path: Path, marks: tuple[str, ...]) -> Iterator[Template]:
    """The templates of a module."""
    for mark, node in calls_of(path, marks):
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        words = [word for word in words if isinstance(word, str)]
        if not words:
            continue
        if mark == "number":
            many = words[1] if len(words) > 1 else f"{words[0]}s"
            yield f"{{count}} {words[0]}", f"{{count}} {many}"
        elif mark == "plural":
            yield words[0], words[1]
        else:
            yield words[0]


def templates() -> list[Template]:
    """All templates, each once, in order."""
    found: dict[Template, None] = {}
    for folder, marks in SOURCES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= dict.fromkeys(of_module(path, marks))
    return list(found)


def known() -> Catalog:
    """The catalogue as it is."""
    with (LOCALE / "carme.po").open("rb") as stream:
        return read_po(stream, locale="de")


def unsettled(catalogue: Catalog) -> list[str]:
    """What somebody has to look at: without German, with that of another wording, or not used any more."""
    found = []
    for entry in catalogue:
        key = entry.id[0] if isinstance(entry.id, tuple) else entry.id
        strings = entry.string if isinstance(entry.string, tuple) else (entry.string,)
        if key and (not all(strings) or entry.fuzzy):
            found.append(f"{'Look at' if all(strings) else 'Write'} the German of {key!r}.")
    return found + [f"Delete the unused {key!r}." for key in catalogue.obsolete]


def main() -> int:
    """Bring it up to date, and say what is missing."""
    current = Catalog(locale="de", project="carme", version="1", charset="utf-8", fuzzy=False)
    for template in templates():
        current.add(template, flags=["python-brace-format"])
    catalogue = known()
    catalogue.update(current, update_header_comment=False, update_creation_date=False)
    with (LOCALE / "carme.po").open("wb") as stream:
        write_po(stream, catalogue, width=110)
    with (LOCALE / "carme.mo").open("wb") as stream:
        write_mo(stream, catalogue)
    found = unsettled(catalogue)
    for sentence in found:
        print(sentence)
    if found:
        print(f"Do so in {LOCALE / 'carme.po'} and run this again.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
