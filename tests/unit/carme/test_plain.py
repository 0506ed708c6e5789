"""Plain command lines of `carme data` mean what argparse says they mean; all others are left to it."""

from __future__ import annotations

import pytest

from carme.cli import data
from carme.cli.parsing import parser
from carme.cli.plain import Plain


def understood(words: list[str]) -> dict[str, object] | None:
    plain = Plain()
    data.add(plain, only=words[1])  # pyright: ignore[reportArgumentType]
    found = plain.parse(words)
    return vars(found) if found else None


@pytest.mark.parametrize(
    "line",
    [
        "copy a b",
        "copy --quiet a b",
        "copy a --json b --verify none",
        "copy --hash xxh3 --hash blake3 a b --workers 4",
        "copy a b --bandwidth 500M --operations 7 --no-attributes --durable --contents",
        "copy --nodes 2 --dsync --partition short --time 2h a b",
        "sync --dry-run --engine python a b",
        "pack a b --compression lz4",
        "work plan",
    ],
)
def test_plain_lines_mean_what_argparse_says(line: str) -> None:
    words = ["data", *line.split()]
    assert understood(words) == vars(parser("data").parse_args(words))


@pytest.mark.parametrize(
    "line",
    [
        "copy",
        "copy a",
        "copy a b c",
        "copy --help",
        "copy --qui a b",
        "copy --verify=none a b",
        "copy --verify never a b",
        "copy --workers many a b",
        "copy a b --hash",
        "copy a b --workers --quiet",
        "copy -- a b",
        "copy - b",
        "copy --dry-run a b",
        "verify a b",
        "verify image",
        "erase a b",
    ],
)
def test_others_are_left_to_it(line: str) -> None:
    assert understood(["data", *line.split()]) is None
