"""What the benchmark of the comparison concludes: who was slowed, what was disturbed, what moved."""

import dataclasses
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from carme_runtime.compare import worker
from carme_runtime.compare.checks import disturbances, usual_probe
from carme_runtime.compare.contestants import CONTESTANTS
from carme_runtime.compare.results import DISTURBED, Result, Row, Turn

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


@pytest.mark.parametrize(("disturbed", "holds"), [(40, True), (38, True), (37, False), (0, False)])
def test_all_turns_beside_a_neighbour_must_be_marked(benchmark: Any, disturbed: int, holds: bool) -> None:
    result = dataclasses.replace(comparison(1), noise={"turns": 40, "disturbed_turns": disturbed})
    (row,) = benchmark.marked(result)
    assert row["ours"] == 100 * disturbed / 40 and row["holds"] is holds


def test_without_a_turn_nothing_is_known_of_the_neighbour(benchmark: Any) -> None:
    (row,) = benchmark.marked(dataclasses.replace(comparison(1), noise={"turns": 0, "disturbed_turns": 0}))
    assert row["ours"] is None and not row["holds"]


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
