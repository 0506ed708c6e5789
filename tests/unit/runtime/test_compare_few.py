"""A comparison of few rounds: its pictures stay readable, and it says how many rounds would do."""

import random
import re
import statistics

import pytest

from carme_runtime.compare import drawings, verdict
from carme_runtime.compare.figures import Estimate, estimate, values_needed
from carme_runtime.compare.results import Result, Row, Turn

WIDE = estimate([10.0, 15.0])
NARROW = estimate([5.0, 5.01, 5.02, 5.03, 5.04])


def test_a_row_with_two_distant_turns_leaves_the_bars_readable() -> None:
    assert WIDE.high > 10 * WIDE.median, "this is about an interval that is much longer than the bars"
    picture = drawings.bars([("wide", "red", WIDE), ("narrow", "blue", NARROW)], "ms", "time")
    wide, narrow = (float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', picture))
    assert wide > 200 and narrow / wide == pytest.approx(NARROW.median / WIDE.median, abs=0.01)
    open_one, closed = re.findall(r'<path d="M[\d.]+ \d+ H([\d.]+) ([^"]*)"', picture)
    assert float(open_one[0]) == 380 and "l6 5 l-6 5" in open_one[1], "its end is marked as open"
    assert float(closed[0]) < 200 and closed[1].count("v10") == 2
    edge = re.search(r'viewBox="0 0 (\d+) ', picture)
    assert edge and all(float(x) < float(edge[1]) for x in re.findall(r'<text x="([\d.]+)"', picture))


def test_a_row_with_two_distant_turns_leaves_the_curves_readable() -> None:
    lines = [("wide", "red", [(1, Estimate(1, 1, 1)), (2, Estimate(1.8, 0.1, 40.0))])]
    picture = drawings.curves(lines, "speed-up")
    heights = [float(y) for y in re.findall(r'cy="([\d.-]+)"', picture)]
    assert heights[0] - heights[1] > 60
    near, wide = re.findall(
        r'<path d="M[\d.]+ [\d.]+ V([\d.-]+)( M[^"]*)?" stroke="red" fill="none"', picture
    )
    assert float(wide[0]) == 14 and wide[1], "it ends at the edge, and is marked as open"
    assert not near[1]


def test_intervals_that_are_not_long_are_drawn_whole() -> None:
    picture = drawings.bars([("narrow", "blue", NARROW)], "ms", "time")
    assert "l6 5" not in picture
    end = re.search(r" H([\d.]+) ", picture)
    assert end and float(end[1]) == 380


@pytest.mark.parametrize("count", [2, 3, 4, 5, 10])
def test_as_many_values_suffice_as_are_predicted(count: int) -> None:
    """However few they are counted from: turns that differ by 5 % take about 17 for 3 %."""
    generator = random.Random(7)
    needed = []
    for _ in range(600):
        values = [generator.lognormvariate(2, 0.05) for _ in range(count)]
        needed.append(values_needed(count, estimate(values).percent or 0, 3.0))
    assert 8 <= statistics.median(needed) <= 26


def uncertain(rounds: int, *milliseconds: float) -> Result:
    turns = [Turn(number, ms) for number, ms in enumerate(milliseconds, 1)]
    row = Row("parallelize", "PyTorch", "mlp", 1, batch=64, turns=turns, limit_percent=3.0)
    return Result("2026-01-02T03:04:05+00:00", 1, {}, {"rounds": rounds}, rows=[row])


def test_few_rounds_ask_for_a_number_that_helps() -> None:
    """Two turns that differ by 3 % have an interval of 19 %; its root would ask for 80 rounds and more."""
    assert verdict.rounds_needed(uncertain(1, 10.0, 10.3)) == 3
    assert verdict.rounds_needed(uncertain(4, 10.0, 10.3)) == 5, "more than those that did not do"
