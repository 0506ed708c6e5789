"""Rows whose medians are not known well enough get further rounds, and are marked if that does not help."""

import itertools
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carme_runtime.compare import command, entries, figures, machine, report, rounds, tasks, verdict
from carme_runtime.compare.results import DISTURBED, MEASURED, UNCERTAIN, Result, Row, Turn, load, save

ROUNDS = 5
Times = Callable[[int], float]


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Compares contestants; of each a function has the milliseconds of a step in each of its turns."""

    def hold(
        contestants: dict[str, Times],
        progress: Callable[[str], None] = lambda _: None,
        compare_gradients: Callable[[entries.Entry, Path], None] = lambda *_: None,
        **plan: Any,
    ) -> Result:
        turns = {name: itertools.count() for name in contestants}
        losses: dict[str, float] = {}

        def start(entry: entries.Entry, _: object, task: Path, __: object) -> None:
            entry.cores = [0]
            losses[entry.row.contestant] = tasks.read(task).first_loss(entry.row.ranks)

        def make(entry: entries.Entry, steps: int) -> list[dict[str, Any]]:
            name = entry.row.contestant
            ms = contestants[name](next(turns[name]))
            return [{"ms": [ms] * steps, "losses": [losses[name]] * steps, "foreign": 0.0, "parts": {}}]

        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        monkeypatch.setattr(entries.Entry, "start", start)
        monkeypatch.setattr(entries.Entry, "make", make)
        monkeypatch.setattr(entries.Entry, "compare_gradients", compare_gradients)
        monkeypatch.setattr(entries.Entry, "end", lambda _: None)
        monkeypatch.setattr(machine, "probe", lambda _: 10.0)
        options: dict[str, Any] = {"rounds": ROUNDS} | plan
        comparison = rounds.Plan(tuple(contestants), ("tiny",), (1,), **options)
        return rounds.compare(comparison, {}, tmp_path, progress)

    return hold


def steady(_: int) -> float:
    return 4.0


def jumping(number: int) -> float:
    """Never known well: each turn takes half as long as the one before, or twice."""
    return 4.0 if number % 2 else 8.0


def settling(number: int) -> float:
    """One turn of the first rounds takes longer than all others; two more turns come before the rounds."""
    return 8.0 if number == 3 else 4.0 + number / 1000


def test_a_row_that_is_known_well_gets_no_further_rounds(held: Callable[..., Result]) -> None:
    (row,) = held({"parallelize": steady}).rows
    assert (row.status, len(row.turns)) == (MEASURED, ROUNDS)


def test_a_row_with_wrong_gradients_has_no_turns(held: Callable[..., Result]) -> None:
    """The comparison asks for them after the first step, and gives the file of those that they must be."""

    def compare_gradients(entry: entries.Entry, reference: Path) -> None:
        with np.load(reference) as expected:
            norms = {name: float(np.linalg.norm(expected[name])) for name in expected.files if "." in name}
        part = 0.01 if entry.row.contestant == "torch-gloo" else 0.0
        entry.row.gradients = {
            name: {"norm": norm, "expected": norm, "distance": part * norm, "rounding": 0.0}
            for name, norm in norms.items()
        }

    result = held({"parallelize": steady, "torch-gloo": steady}, compare_gradients=compare_gradients)
    right, wrong = result.rows
    assert (right.status, right.void, len(right.turns)) == (MEASURED, "", ROUNDS)
    assert wrong.void.startswith("unequal work: the gradient of ") and not wrong.turns
    assert wrong.void in report.page(result)


def test_a_row_that_stays_uncertain_is_repeated_and_then_marked(held: Callable[..., Result]) -> None:
    lines: list[str] = []
    result = held({"parallelize": steady, "torch-gloo": jumping}, lines.append)
    certain, uncertain = result.rows
    assert (certain.status, len(certain.turns)) == (MEASURED, ROUNDS)
    assert (uncertain.status, len(uncertain.turns)) == (UNCERTAIN, 2 * ROUNDS)
    assert f"tiny: further round 1 of at most {ROUNDS}, as 1 row cannot be known to 3 % yet" in lines
    assert "1 are measured, 0 disturbed, 1 uncertain and 0 void" in verdict.sentences(result)[2]
    assert "<td>uncertain</td>" in report.page(result) and "uncertain" in report.text(result)


def test_further_rounds_end_as_soon_as_the_row_is_known(held: Callable[..., Result]) -> None:
    (row,) = held({"parallelize": settling}).rows
    assert row.status == MEASURED and ROUNDS < len(row.turns) < 2 * ROUNDS


def varying(number: int) -> float:
    """By 8 %: about fifty turns are needed."""
    return 4.0 * random.Random(number).gauss(1, 0.08)


def test_rows_that_time_can_make_certain_get_more_rounds(held: Callable[..., Result]) -> None:
    """A turn takes 10 ms here, those of the probe."""
    (short,) = held({"parallelize": varying}).rows
    assert (short.status, len(short.turns)) == (UNCERTAIN, 2 * ROUNDS)
    lines: list[str] = []
    certain, hopeless = held({"parallelize": varying, "torch-gloo": jumping}, lines.append, more_s=5.0).rows
    assert certain.status == MEASURED and len(certain.turns) > 2 * ROUNDS
    # 120 times as many turns as it has would not fit into this time.
    assert (hopeless.status, len(hopeless.turns)) == (UNCERTAIN, 2 * ROUNDS)
    assert any(line.startswith("tiny: more rounds for 1 of 2 uncertain rows, for at most ") for line in lines)


def test_the_time_goes_to_as_many_rows_as_it_makes_certain() -> None:
    assert figures.affordable({1: 10.0, 2: 5.0, 3: 100.0}, 20.0) == [2, 1]
    assert figures.affordable({1: 10.0, 2: 5.0}, 4.0) == []


@pytest.mark.parametrize("plan", [{"limit": 0.0, "more_s": 5.0}, {"rounds": 1, "more_s": 5.0}])
def test_no_row_is_repeated_without_a_limit_or_for_a_single_round(
    held: Callable[..., Result], plan: dict[str, Any]
) -> None:
    (row,) = held({"torch-gloo": jumping}, **plan).rows
    assert (row.status, len(row.turns)) == (MEASURED, plan.get("rounds", ROUNDS))


def test_a_row_of_disturbed_turns_is_called_disturbed() -> None:
    turns = [Turn(number, jumping(number), ("a neighbour",)) for number in range(ROUNDS)]
    assert Row("jax", "JAX", "tiny", 1, turns=turns, limit_percent=3.0).status == DISTURBED


def test_the_limit_is_in_the_file_and_files_without_one_can_be_read(
    held: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "compare.json"
    save(held({"torch-gloo": jumping}), file)
    assert load(file).rows[0].status == UNCERTAIN
    file.write_text(file.read_text().replace('"limit_percent": 3.0', '"limit_percent": 0.0'))
    assert load(file).rows[0].status == MEASURED
    text = file.read_text().replace('"limit_percent": 0.0,', "")
    assert "limit_percent" not in text
    file.write_text(text)
    assert load(file).rows[0].status == MEASURED


@pytest.mark.parametrize("limit", ["-1", "101", "nan"])
def test_a_limit_that_is_no_share_is_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--limit", limit]) == 1
    assert f"--limit {limit} is not possible. Give 0 to 100 percent." in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["-1", "1441", "nan"])
def test_an_invalid_time_for_more_rounds_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--minutes", minutes]) == 1
    assert f"--minutes {minutes} is not possible. Give 0 to 1440 minutes." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ([], 180),
        (["--quick"], 0),
        (["--minutes", "0"], 0),
        (["--minutes", "0.5"], 30),
        (["--quick", "--minutes", "2"], 120),
    ],
)
def test_a_quick_comparison_has_no_time_for_more_rounds_by_default(
    options: list[str], seconds: float
) -> None:
    assert command.plan_of(command.parser().parse_args(options)).more_s == seconds


def test_the_file_is_json_also_where_a_loss_or_a_gradient_is_not_a_number(
    held: Callable[..., Result], tmp_path: Path
) -> None:
    result = held({"parallelize": steady})
    (row,) = result.rows
    row.losses[1] = math.nan
    row.gradients = {"a.weight": {"norm": math.inf, "expected": 1.0, "distance": math.nan, "rounding": 0.0}}
    file = tmp_path / "compare.json"
    save(result, file)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(file.read_text(), parse_constant=refuse)["rows"][0]
    assert found["losses"][1] is None and found["gradients"]["a.weight"]["distance"] is None
    (again,) = load(file).rows
    assert math.isnan(again.losses[1]) and again.losses[0] == row.losses[0]
    assert math.isnan(again.gradients["a.weight"]["distance"])
    assert again.gradients["a.weight"]["expected"] == 1.0
    assert report.page(load(file))
