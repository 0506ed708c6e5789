"""The files that pages name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
FILES = re.compile(r"`((?:(?:carme|spawner|webui|monitoring)/src|containers|ansible|tests|docs)/[\w./-]*)`")
LINKS = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [
        path for path in FILES.findall(text) if not any(ROOT.glob(re.sub(r"\b[A-Z]+\b(?!\.)", "*", path)))
    ]
    missing += [link for link in LINKS.findall(text) if not ((ROOT / page).parent / link).exists()]
    assert not missing
