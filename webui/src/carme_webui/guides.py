"""The help pages: what each part of the portal is for, and the user documentation, without internet.

The documentation is that of `docs/users` of the source tree, which is packed into the portal.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.views.decorators.http import require_safe
from markdown_it import MarkdownIt
from markdown_it.token import Token

from carme_webui.terms import TERMS

__all__ = ["Guide", "guide", "guides", "help_page"]

FOLDER = Path(__file__).parent / "documentation/users"
#: The guides in the order in which people need them; others follow.
ORDER = (
    *("sessions", "files", "data", "images", "usage", "training", "scaling", "bookings", "projects"),
    *("account", "api"),
)
#: Guides that say more of a section of the help page.
OF_SECTION = {
    "sessions": "sessions",
    "jobs": "usage",
    "bookings": "bookings",
    "files": "files",
    "images": "images",
    "datasets": "data",
    "projects": "projects",
    "profile": "account",
    "tokens": "api",
}


@dataclass(frozen=True)
class Guide:
    """A page of the documentation.

    Attributes:
        name: In its address.
        title: Its heading.
        content: The page without the heading, as HTML.
        sections: Anchors and titles of its sections.
    """

    name: str
    title: str
    content: SafeString
    sections: tuple[tuple[str, str], ...]

    def get_absolute_url(self) -> str:
        return reverse("guide", args=[self.name])


@lru_cache(maxsize=1)
def guides() -> dict[str, Guide]:
    """All guides by name; read once."""
    names = sorted(path.stem for path in FOLDER.glob("*.md"))
    names.sort(key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return {name: _read(name) for name in names}


@require_safe
def help_page(request: HttpRequest) -> HttpResponse:
    """What each part of the portal is for; the link on a page leads to its own section."""
    found = guides()
    further = {section: found[name] for section, name in OF_SECTION.items() if name in found}
    return render(request, "help.html", {"guides": found.values(), "further": further, "terms": TERMS})


@require_safe
def guide(request: HttpRequest, guide: str) -> HttpResponse:
    """One page of the documentation."""
    found = guides().get(guide)
    if found is None:
        raise Http404
    return render(request, "guide.html", {"guide": found, "guides": guides().values()})


def _read(name: str) -> Guide:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    title, sections = name, []
    for level, anchor, text in _headings(tokens):
        if level == "h1":
            title = text
        elif level == "h2":
            sections.append((anchor, text))
    if tokens and tokens[0].tag == "h1":
        tokens = tokens[3:]  # its beginning, text and end: the page has a heading of its own
    for token in tokens:
        for child in token.children or ():
            _lead_here(child)
    # All that is not Markdown is escaped: the parser takes no HTML.
    html = parser.renderer.render(list(_reachable(tokens)), parser.options, {})
    return Guide(name, title, mark_safe(html), tuple(sections))


def _headings(tokens: list[Token]) -> Iterator[tuple[str, str, str]]:
    """The level, anchor and text of each heading, which gets its anchor."""
    for token, inner in pairwise(tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in inner.children or ())
            anchor = re.sub(r"[^\w-]", "", text.lower().replace(" ", "-"))
            token.attrSet("id", anchor)
            yield token.tag, anchor, text


def _lead_here(token: Token) -> None:
    """Have links and pictures lead to the portal's own copies."""
    if token.type == "image":
        token.attrSet("src", static(f"docs/{Path(str(token.attrGet('src'))).name}"))
        token.attrSet("loading", "lazy")
    elif token.type == "link_open":
        parts = urlsplit(str(token.attrGet("href")))
        if parts.scheme or not parts.path:
            return
        path = Path(parts.path)
        if path.suffix == ".md" and (FOLDER / path.name).exists() and len(path.parts) == 1:
            anchor = f"#{parts.fragment}" if parts.fragment else ""
            token.attrSet("href", reverse("guide", args=[path.stem]) + anchor)
        else:  # a page for administrators or developers, which is not here
            token.attrSet("href", reverse("help"))


def _reachable(tokens: list[Token]) -> Iterator[Token]:
    """Have what is wider than a phone scroll in a box that the keyboard reaches."""
    caption = ""
    for token in tokens:
        if token.type == "inline" and token.content:
            caption = re.sub(r"[`*_]", "", token.content)[:60]
        if token.type == "table_open":
            label = format_html(
                '<div class="table-scroll" tabindex="0" role="region" aria-label="{}">', caption
            )
            yield Token("html_block", "", 0, content=label)
        if token.type in ("fence", "code_block"):
            box = format_html('<pre class="log" tabindex="0"><code>{}</code></pre>\n', token.content)
            yield Token("html_block", "", 0, content=box)
            continue
        yield token
        if token.type == "table_close":
            yield Token("html_block", "", 0, content="</div>\n")
