"""Sizes on pages: one kind of units, and the reader's decimal mark."""

import re
from pathlib import Path

import pytest
from django.utils import translation

import carme_webui
from carme_webui.sizes import memory_words, size_words

PAGES = Path(carme_webui.__file__).parent
ROOT = Path(__file__).parents[3]
PARTS = ("carme/src", "spawner/src", "monitoring/src")


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["0 B", "976.6 KiB", "1.5 GiB", "512 MiB", "62.5 GiB", "1 MiB"]),
        ("de", ["0 B", "976,6 KiB", "1,5 GiB", "512 MiB", "62,5 GiB", "1 MiB"]),
    ],
)
def test_sizes_have_units_of_1024_and_the_readers_decimal_mark(language: str, words: list[str]) -> None:
    with translation.override(language):
        found = [size_words(0), size_words(1_000_000), size_words(1.5 * 2**30), memory_words(512)]
        found += [memory_words(64_000), size_words((1 << 20) - 1)]
    assert [text.replace("\xa0", " ") for text in found] == words


def test_nothing_counts_in_units_of_1000() -> None:
    """Slurm's MB and GB are MiB and GiB; beside those no other units may stand."""
    texts = [
        *PAGES.glob("**/*.py"), *PAGES.glob("templates/**/*.html"), *PAGES.glob("static/carme/*.js"),
        *PAGES.glob("locale/*/LC_MESSAGES/django.po"),
        *(text for part in PARTS for kind in ("py", "po") for text in (ROOT / part).rglob(f"*.{kind}")),
    ]  # fmt: skip
    unit = re.compile(r"(?<!en-)\b[kKMGT]B\b|filesizeformat")
    factor = re.compile(r"\b1e(6|9|12)\b|\b10 ?\*\* ?(6|9|12)\b")
    size = re.compile(r"_[kmgt]b\b|bytes|memory|disk", re.IGNORECASE)
    wrong = [
        f"{text.relative_to(ROOT)}:{number}: {line.strip()}"
        for text in texts
        for number, line in enumerate(text.read_text(encoding="utf-8").splitlines(), 1)
        if unit.search(line) or (factor.search(line) and size.search(line))
    ]
    assert len({text.relative_to(ROOT).parts[0] for text in texts}) == 1 + len(PARTS) and not wrong
