"""The pages of benchmarks: what is measured, one table of one run, one picture, conclusions."""

import re
from pathlib import Path

import pytest

from benchmarks import bars

FOLDER = Path(__file__).parents[2] / "docs/benchmarks"
PAGES = sorted(FOLDER.glob("*.md"))


def has_bars(page: Path) -> bool:
    return bars.read(page.read_text()) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_one_table_one_picture_a_date_a_command_and_conclusions(page: Path) -> None:
    text = page.read_text()
    assert len(bars.table(text)) > 2
    (name,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert (FOLDER / name).exists()
    assert re.search(r"\d November 2026", text)
    assert re.search(r"\./test |python |carme submit", text)
    assert "\n## Conclusions\n" in text


@pytest.mark.parametrize("page", list(filter(has_bars, PAGES)), ids=lambda page: page.stem)
def test_a_picture_shows_the_pages_table(page: Path) -> None:
    drawing = bars.read(page.read_text())
    assert drawing is not None
    assert drawing.rows
    assert page.with_suffix(".svg").read_text() == bars.picture(drawing), (
        f"Use: python {bars.__file__} {page}"
    )


def test_numbers_are_read_as_they_stand_in_tables() -> None:
    page = "| row | | ours | other |\n|---|---|---|---|\n| `a` | x | **1,200** | 3.5 ready |\n"
    page += "| | y | | 7 |\n| b | | | |\n"
    drawing = bars.read(page + "<!-- bars: ours, other; ms; log -->\n")
    assert drawing == bars.Drawing(
        ("ours", "other"), "ms", (("a x", (1200.0, 3.5)), ("a y", (None, 7.0))), True
    )
    assert drawing is not None and bars.picture(drawing).count("<rect") == 1 + 2 + 3


def test_a_page_with_two_tables_is_refused() -> None:
    table = "| a |\n|---|\n| 1 |\n"
    with pytest.raises(ValueError, match="The page has 2 tables; it should have one"):
        bars.table(f"{table}\n{table}")
