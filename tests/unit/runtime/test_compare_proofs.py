"""What the benchmark of the comparison concludes: who was slowed, what was disturbed, what moved."""

import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from carme_runtime.compare import worker
from carme_runtime.compare.checks import disturbances, usual_probe
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.results import DISTURBED, Result, Row, Turn
from patience import HANG

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROUNDS = 20
NAMES = ("torch-gloo", "horovod-face", "parallelize")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = {name: sys.modules.pop(name, None) for name in ("compare", "report")}
    import compare  # pyright: ignore[reportMissingImports]

    assert isinstance(compare, ModuleType) and str(compare.__file__).startswith(str(BENCHMARKS))
    yield compare
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module:
            sys.modules[name] = module


def comparison(seed: int, **slower: float) -> Result:
    """Rounds in which the machine's speed changes by half, for all alike, and each a little by itself."""
    generator, rows = random.Random(seed), []
    speeds = [generator.uniform(0.8, 1.3) for _ in range(ROUNDS)]
    for ranks in (1, 2):
        for name in NAMES:
            factor = slower.get(name.replace("-", "_"), 1.0)
            turns = [
                Turn(number, 100 * factor * speed * generator.gauss(1, 0.01))
                for number, speed in enumerate(speeds)
            ]
            rows.append(Row(name, CONTESTANTS[name].title, "mlp", ranks, batch=64, turns=turns))
    return Result("2026-01-02T03:04:05+00:00", seed, {}, {}, rows=rows)


def test_a_contestant_that_is_slowed_by_a_tenth_is_found(benchmark: Any) -> None:
    (slowed,) = benchmark.found(comparison(1), comparison(2, torch_gloo=1.1))
    assert slowed["holds"] and slowed["ours"] == pytest.approx(10, abs=2)
    (equal,) = benchmark.found(comparison(1), comparison(2))
    assert not equal["holds"] and equal["ours"] == pytest.approx(0, abs=2)
    (too_slow,) = benchmark.found(comparison(1), comparison(2, torch_gloo=1.3))
    assert not too_slow["holds"]
    lacking = dataclasses.replace(comparison(1), rows=[])
    (unknown,) = benchmark.found(lacking, comparison(2))
    assert unknown["ours"] is None and not unknown["holds"]


def test_repetitions_are_judged_without_the_one_that_was_slowed(benchmark: Any) -> None:
    first = comparison(1)
    (same,) = benchmark.repetitions(first, comparison(1, torch_gloo=1.1))
    assert same["holds"] and same["ours"] == 0
    (moved,) = benchmark.repetitions(first, comparison(1, horovod_face=1.05, parallelize=1.05))
    assert not moved["holds"] and moved["ours"] == pytest.approx(5)
    uncertain = comparison(1, horovod_face=1.05)
    for row in uncertain.rows:
        row.limit_percent = 1e-6 if row.contestant == "horovod-face" else 0.0
    (judged,) = benchmark.repetitions(first, uncertain)
    assert not judged["holds"] and (judged["ours"], judged["marked_rows"]) == (0, 2), (
        "two of four are too few"
    )


def beside_a_neighbour(unmarked: int = 0, slower: float = 2.0) -> Result:
    """Every fifth turn lies in a spell of the neighbour; so many of these are not marked."""
    result = comparison(1)
    for each in result.rows:
        each.turns = [
            dataclasses.replace(
                turn,
                ms=slower * turn.ms if is_beside(turn) else turn.ms,
                reasons=("a neighbour",) if is_beside(turn) and turn.round >= 5 * unmarked else (),
                began=10.0 * turn.round,
                lasted_s=1.0,
            )
            for turn in each.turns
        ]
    return result


def is_beside(turn: Turn) -> bool:
    return turn.round % 5 == 0


#: Each begins in the middle of a turn.
SPELLS = [(10.0 * number + 0.5, 10.0 * number + 3) for number in range(0, ROUNDS, 5)]


def test_turns_beside_a_neighbour_must_be_marked(benchmark: Any) -> None:
    row = benchmark.marked(beside_a_neighbour(), SPELLS)
    assert row["ours"] == 100 and row["holds"]
    assert (row["turns"], row["disturbed_turns"]) == (6 * ROUNDS, 6 * ROUNDS / 5)
    row = benchmark.marked(beside_a_neighbour(unmarked=1), SPELLS)
    assert row["ours"] == 75 and row["holds"] is False
    # Who marks all turns has marked these, but nobody knows anything where there were none.
    assert benchmark.marked(beside_a_neighbour(), [])["ours"] is None


def test_the_share_of_a_turn_that_a_neighbour_disturbed_is_computed(benchmark: Any) -> None:
    turn = Turn(1, 5.0, (), began=100.0, lasted_s=2.0)
    assert benchmark.disturbed_share(turn, [(90.0, 99.0), (102.0, 103.0)]) == 0
    assert benchmark.disturbed_share(turn, [(99.0, 100.5), (101.0, 101.5)]) == 0.5
    assert benchmark.disturbed_share(turn, [(0.0, 1000.0)]) == 1
    assert benchmark.disturbed_share(dataclasses.replace(turn, lasted_s=0.0), [(0.0, 1000.0)]) == 0


def test_a_neighbour_moves_medians_unless_its_turns_are_marked(benchmark: Any) -> None:
    (row,) = benchmark.moved(beside_a_neighbour(), SPELLS)
    assert row["ours"] == 0 and row["holds"] and row["disturbed_rows"] == 0
    (row,) = benchmark.moved(beside_a_neighbour(unmarked=4, slower=10.0), SPELLS)
    assert row["ours"] > 3 and row["holds"] is False
    disturbed = beside_a_neighbour()
    for each in disturbed.rows:
        each.turns = [turn for turn in each.turns if turn.reasons]
    (row,) = benchmark.moved(disturbed, SPELLS)
    assert row["ours"] is None and not row["holds"] and row["disturbed_rows"] == 6


def test_medians_beside_a_neighbour_are_near_those_before_and_after(benchmark: Any) -> None:
    (row,) = benchmark.apart(comparison(1), beside_a_neighbour(), comparison(1))
    assert row["ours"] == pytest.approx(0, abs=3) and row["holds"]
    slower = {name.replace("-", "_"): 1.1 for name in NAMES}
    (row,) = benchmark.apart(comparison(1), beside_a_neighbour(), comparison(1, **slower))
    assert row["ours"] > 3 and row["holds"] is False
    (row,) = benchmark.apart(comparison(1), beside_a_neighbour(), dataclasses.replace(comparison(1), rows=[]))
    assert row["ours"] is None and not row["holds"]


def test_a_comparison_of_few_contestants_is_not_judged_by_its_minutes(benchmark: Any) -> None:
    few, many = comparison(1), comparison(1)
    many.rows = [
        dataclasses.replace(each, contestant=f"{each.contestant} {number}")
        for each in many.rows
        for number in (1, 2)
    ]
    assert benchmark.duration(few, 5.0)["holds"] is None
    assert benchmark.duration(many, 5.0)["holds"] and benchmark.duration(many, 25.0)["holds"] is False


def test_the_neighbour_computes_now_and_then(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it did is known, and nothing of it stays behind."""
    monkeypatch.setattr(benchmark, "SPELL_SECONDS", (0.02, 0.04))
    monkeypatch.setattr(benchmark, "BREAK_SECONDS", (0.02, 0.04))
    started: list[subprocess.Popen[Any]] = []

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[Any]":
        started.append(subprocess_popen(*arguments, **options))
        return started[-1]

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    with benchmark.neighbour() as spells:
        end = time.monotonic() + HANG
        while len(spells) < 3:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert len(started) == len(os.sched_getaffinity(0))
        assert all(process.poll() is None for process in started)
    assert all(first < last for first, last in spells)
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(spells))
    assert all(process.poll() is not None for process in started)


def test_turns_beside_a_neighbour_are_marked_and_move_no_median() -> None:
    """As long as enough others are left."""
    quiet = comparison(1).rows[0]
    usual = usual_probe([10.0, 10.1, 10.0, 10.1, 10.0, 19.0])
    beside = [
        Turn(turn.round, 2 * turn.ms, disturbances(0.5, (10.0, 19.0), usual)) for turn in quiet.turns[:8]
    ]
    assert all(turn.reasons for turn in beside)
    busy = dataclasses.replace(quiet, turns=[*beside, *quiet.turns[8:]])
    assert busy.status != DISTURBED and busy.used == quiet.turns[8:]
    assert busy.step.median == pytest.approx(dataclasses.replace(quiet, turns=quiet.turns[8:]).step.median)


def test_a_slowed_step_lasts_that_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, which goes on by a thousandth of a step with every look at it."""
    now = 0.0

    def perf_counter() -> float:
        nonlocal now
        now += 1e-5
        return now

    def step(_number: int, _mark: Any) -> float:
        nonlocal now
        now += 0.01
        return 1.0

    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=perf_counter, process_time=lambda: now))
    usual = worker.Steps(step, 0.0, set()).make(5)
    slowed = worker.Steps(step, 10.0, set()).make(5)
    for before, after in zip(usual["ms"], slowed["ms"], strict=True):
        assert after / before == pytest.approx(1.1, abs=0.01)
    assert slowed["losses"] == [1.0] * 5
