"""The pages of benchmarks: what is measured, one table of one run, one picture, conclusions."""

import re
from pathlib import Path

import pytest

from benchmarks import bars, compare_page

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


def test_the_page_of_the_comparison_is_of_the_run_beside_it() -> None:
    """Its table, figures and picture; a person writes the conclusions alone."""
    result = compare_page.load(FOLDER / "compare-demo.json")
    text = (FOLDER / "compare.md").read_text()
    block = compare_page.block_of(text)
    named = [
        compare_page.current_line(block, name, quote) for name, quote in (("command", "`"), ("machine", ""))
    ]
    assert block == compare_page.run(result, *named), f"Use: python {compare_page.__file__} RESULT"
    picture = (FOLDER.parent / compare_page.PICTURE).read_text()
    assert picture == compare_page.picture(result) and "currentColor" not in picture


def test_a_new_run_replaces_all_of_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command and machine, too, where they are given; they stay where they are not."""
    for name in ("benchmarks", "pictures"):
        (tmp_path / name).mkdir()
    page = tmp_path / compare_page.PAGE
    page.write_text("# Title\n<!-- run -->\n<!-- end of the run -->\n\n## Conclusions\n")
    given = FOLDER / "compare-demo.json"
    arguments = ["compare_page", str(given), "--docs", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match=r"names no command yet\. Give --command\."):
        compare_page.main()
    monkeypatch.setattr("sys.argv", [*arguments, "--command", "carme compare", "--machine", "two nodes"])
    compare_page.main()
    text = page.read_text()
    assert "\n- command: `carme compare`\n- machine: two nodes\n" in text
    assert text.startswith("# Title\n<!-- run -->\n- date: ") and text.endswith("\n\n## Conclusions\n")
    assert (tmp_path / "benchmarks/compare-demo.json").read_bytes() == given.read_bytes()
    assert (tmp_path / compare_page.PICTURE).exists()
    monkeypatch.setattr("sys.argv", arguments)
    compare_page.main()
    assert page.read_text() == text


def test_a_page_that_cannot_get_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"lacks <!-- run --> or <!-- end of the run --> after it"):
        compare_page.block_of("<!-- end of the run -->\n<!-- run -->\n")
    monkeypatch.setattr("sys.argv", ["compare_page", str(tmp_path / "gone.json")])
    with pytest.raises(SystemExit, match=r"compare_page: .*gone\.json"):
        compare_page.main()
