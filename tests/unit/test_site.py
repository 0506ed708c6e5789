"""The documentation as a site: all pages, links that lead somewhere, and nothing fetched from elsewhere."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from patience import HANG

ROOT = Path(__file__).resolve().parents[2]
HOOK: dict[str, Any] = runpy.run_path(str(ROOT / "docs/site_pages.py"))
#: Files that a browser fetches automatically: scripts, styles, pictures, fonts; links are not.
FETCHED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"|url\(([^)]+)\)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    sources = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    pages = [*sources, *HOOK["PLACES"]]
    missing = [page for page in pages if not (site / page).with_suffix(".html").exists()]
    assert len(sources) > 30
    assert not missing


def test_a_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = {
        (file.name, address)
        for file in site.rglob("*")
        if file.suffix in (".html", ".css")
        for found in FETCHED.findall(file.read_text())
        for address in found
        if address
    }
    assert any(address.endswith(".js") for _, address in fetched)
    assert not [item for item in fetched if re.match(r"""["']?(https?:)?//""", item[1])]


def test_items_of_several_paragraphs_are_items_on_the_site(site: Path) -> None:
    page = (site / "developers/interfaces.html").read_text()
    operations = page[page.index("<!-- operations -->") : page.index("<!-- end of operations -->")]
    declared = re.findall(r"^- `(\w+)\(", (ROOT / "docs/developers/interfaces.md").read_text(), re.MULTILINE)
    assert re.findall(r"<li>\s*<p><code>(\w+)\(", operations) == declared


@pytest.mark.parametrize(
    ("place", "text", "there"),
    [
        ("index.md", "[x](docs/users/api.md#errors)", "[x](users/api.md#errors)"),
        ("index.md", "![x](docs/pictures/training.png)", "![x](pictures/training.png)"),
        ("index.md", "[the `spawner/`](spawner) of it", "the `spawner/` of it"),
        ("users/images.md", "[x](../../containers/images/README.md#build)", "[x](../admins/images.md#build)"),
        ("admins/prometheus.md", "[x](../../../docs/admins/monitoring.md)", "[x](monitoring.md)"),
        ("users/api.md", "[x](files.md), [y](#errors), [z](https://example.org)", None),
        ("users/api.md", "`[x](nowhere.md)`\n\n```python\ny = z[0](nowhere)\n```\n", None),
    ],
)
def test_links_lead_to_places_on_the_site(place: str, text: str, there: str | None) -> None:
    assert HOOK["with_links"](text, place) == (there or text)


def test_a_link_to_no_file_is_refused() -> None:
    with pytest.raises(PluginError, match=r"users/api\.md: the link to no\.md leads to no file"):
        HOOK["with_links"]("[x](no.md)", "users/api.md")
