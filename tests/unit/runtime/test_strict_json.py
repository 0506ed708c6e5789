"""JSON that every program reads: what is not a number becomes null."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from carme_runtime import strict_json

VALUE = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": True, "d": None, "e": 3, "f": "NaN"}
EXPECTED = {"a": [1.5, None, [None, {"b": None}]], "c": True, "d": None, "e": 3, "f": "NaN"}


def refuse(word: str) -> None:
    raise AssertionError(word)


def test_what_is_not_a_number_becomes_null() -> None:
    assert json.loads(strict_json.dumps(VALUE, indent=1), parse_constant=refuse) == EXPECTED
    created = strict_json.dumps([{1}], default=lambda values: [math.nan, *values])
    assert json.loads(created, parse_constant=refuse) == [[None, 1]]
    with pytest.raises(TypeError):
        strict_json.dumps([{1}])


def test_reports_of_benchmarks_are_such_json(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    rows: list[dict[str, Any]] = [report.row("a", "ms", math.nan, peers={"b": math.inf})]
    report.write_json(file, rows, rounds=VALUE)
    found = json.loads(file.read_text(), parse_constant=refuse)
    assert found["rounds"] == EXPECTED
    assert found["aims"][0]["ours"] is None and found["aims"][0]["peers"] == {"b": None}
