#!/usr/bin/env python3
"""The catalogue of the portal's German texts: `catalogue.py` brings it up to date and says what is missing.

It collects the texts of the portal's code and templates, and the words of the tables of `carme` that pages
show, into `locale/de/LC_MESSAGES/django.po`, and compiles that. Both files belong to the source, as Django's
own do, so that an installation needs no gettext.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from django.conf import settings
from django.template import Engine
from django.templatetags.i18n import BlockTranslateNode, TranslateNode

SOURCE = Path(__file__).parent / "src/carme_webui"
LOCALE = SOURCE / "locale/de/LC_MESSAGES"
SINGLE = {"_", "gettext", "gettext_lazy", "gettext_noop"}
PLURAL = {"ngettext", "ngettext_lazy"}
#: One text, or its singular and plural.
Text = str | tuple[str, str]


def of_code(path: Path) -> Iterator[Text]:
    """The texts of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        words = [word for word in words if isinstance(word, str)]
        if node.func.id in SINGLE and words:
            yield words[0]
        elif node.func.id in PLURAL and len(words) > 1:
            yield words[0], words[1]


def of_template(engine: Engine, path: Path) -> Iterator[Text]:
    """The texts of a template, as Django looks them up."""
    nodes = engine.get_template(str(path.relative_to(SOURCE / "templates"))).nodelist
    yield from of_nodes(nodes)
    yield from re.findall(r'\b_\("([^"]+)"\)', path.read_text(encoding="utf-8"))


def of_nodes(nodes: Any) -> Iterator[Text]:
    for node in nodes.get_nodes_by_type(TranslateNode):
        yield node.filter_expression.var.literal
    for node in nodes.get_nodes_by_type(BlockTranslateNode):
        singular, _names = node.render_token_list(node.singular)
        if node.plural:
            yield singular, node.render_token_list(node.plural)[0]
        else:
            yield singular


def of_tables() -> Iterator[Text]:
    """Words of `carme` that pages show."""
    from carme.bookings import CAUSES
    from carme.bookings import STATES as BOOKINGS
    from carme.jobs import JobState
    from carme.sessions import ENDINGS, STEPS
    from carme.sessions import STATES as SESSIONS

    yield from CAUSES.values()
    yield from BOOKINGS.values()
    yield from SESSIONS.values()
    yield from STEPS.values()
    for words, _failed in ENDINGS.values():
        yield words
    for state in JobState:
        yield state.replace("_", " ").lower()


def texts() -> list[Text]:
    """All texts, each once, in order."""
    found: dict[Text, None] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if "migrations" not in path.parts:
            found |= dict.fromkeys(of_code(path))
    engine = Engine.get_default()
    for path in sorted((SOURCE / "templates").rglob("*.html")):
        found |= dict.fromkeys(of_template(engine, path))
    found |= dict.fromkeys(of_tables())
    # A plural brings its singular along.
    singles = {text[0] for text in found if isinstance(text, tuple)}
    return [text for text in found if text and text not in singles]


def bring_up_to_date() -> list[str]:
    """Write both files; the texts that have no German one."""
    file = LOCALE / "django.po"
    with file.open("rb") if file.exists() else Path(os.devnull).open("rb") as stream:
        before = read_po(stream, locale="de")
    catalogue = Catalog(locale="de", project="carme-webui", version="1", charset="utf-8", fuzzy=False)
    catalogue.creation_date = catalogue.revision_date = before.creation_date
    missing = []
    for text in texts():
        key = text[0] if isinstance(text, tuple) else text
        known = before.get(key)
        message = known.string if known is not None else ""
        plain = isinstance(text, str)
        if plain != isinstance(message, str):
            message = "" if plain else ("", "")
        catalogue.add(text, message, flags=["python-format"] if "%(" in key or "%s" in key else ())
        if not message or not all(message):
            missing.append(key)
    LOCALE.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        write_po(stream, catalogue, width=110, omit_header=False)
    with (LOCALE / "django.mo").open("wb") as stream:
        write_mo(stream, catalogue)
    return missing


def main() -> int:
    """Bring it up to date, and say what is missing."""
    # Templates are only parsed here, which needs no site.
    templates = {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [SOURCE / "templates"],
        "OPTIONS": {
            "libraries": {
                name: f"carme_webui.jobs.templatetags.{name}"
                for name in ("amounts", "terms", "times", "translated")
            }
        },
    }
    settings.configure(INSTALLED_APPS=["django.contrib.humanize"], TEMPLATES=[templates])
    django.setup()
    missing = bring_up_to_date()
    for text in missing:
        print(f"No German text: {text!r}")
    if missing:
        print(f"Write them into {LOCALE / 'django.po'} and run this again.")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
