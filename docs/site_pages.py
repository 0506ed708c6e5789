"""A hook of MkDocs: adds the pages that lie outside `docs`, and adapts what GitHub's Markdown does otherwise.

GitHub shows every file where it lies, so pages link each other by their places in the source tree. On the
site a link to a page leads to that page, and a link to source code is plain text.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Pages outside `docs`, each with its place on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "developers/contributing.md",
    "CHANGELOG.md": "developers/changelog.md",
    "ansible/roles/prometheus/README.md": "admins/prometheus.md",
    "containers/images/README.md": "admins/images.md",
}
PLACES = {place: source for source, place in ELSEWHERE.items()}
_FENCE = r"^(?P<fence>`{3,})[^`\n]*\n.*?^(?P=fence)$"
#: Code, in which nothing is a link; or a link or picture: its text, its path, its anchor.
CODE_OR_LINK = re.compile(
    _FENCE
    + r"|`[^`\n]+`(?!\])|(?P<picture>!?)\[(?P<text>[^\]]+)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
#: Code, or the last line of an item's further paragraph, which the next item follows without an empty line.
CODE_OR_END_OF_ITEM = re.compile(_FENCE + r"|^(?P<end> {4}\S[^\n]*\n)(?=- )", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside `docs`."""
    for source, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt a page to the site. Raises PluginError where a link leads to no file."""
    return with_separate_items(with_links(markdown, page.file.src_uri))


def with_links(markdown: str, place: str) -> str:
    """The text of a page with its links as the site has them.

    Args:
        markdown: The text, with links relative to its file in the source tree.
        place: The page's place on the site, such as `users/images.md`.

    Raises:
        PluginError: A link leads to no file of the source tree.
    """
    folder = dirname(PLACES.get(place, f"docs/{place}"))

    def replace(match: re.Match[str]) -> str:
        if match["path"] is None:
            return match[0]
        source = normpath(join(folder, match["path"]))
        if not (ROOT / source).exists():
            raise PluginError(f"{place}: the link to {match['path']} leads to no file. Correct it.")
        if source in ELSEWHERE:
            target = ELSEWHERE[source]
        elif source.startswith("docs/"):
            target = source.removeprefix("docs/")
        else:
            return match["text"]
        target = relpath(target, dirname(place) or ".")
        return f"{match['picture']}[{match['text']}]({target}{match['anchor'] or ''})"

    return CODE_OR_LINK.sub(replace, markdown)


def with_separate_items(markdown: str) -> str:
    """Put an empty line between items of several paragraphs, without which MkDocs takes them for one item."""
    return CODE_OR_END_OF_ITEM.sub(lambda match: f"{match[0]}\n" if match["end"] else match[0], markdown)
