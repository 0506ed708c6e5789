"""Judges 80 % intervals by the rounds of a benchmark: too few of these to know a share of them exactly."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import row

COVERED = (75.0, 90.0)  # percent of the rounds that 80 % intervals are to hold
_SURE = 0.95


def judged_intervals(rounds: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """How many rounds are in their intervals, how wide these are, and how wide they would have to be."""
    covered = sum(figures["low"] <= figures["measured"] <= figures["high"] for figures in rounds)
    low, high = (100 * bound for bound in binomial_bounds(covered, len(rounds)))
    width = statistics.mean((figures["high"] - figures["low"]) / figures["predicted"] for figures in rounds)
    # By how much each interval would have to be stretched, on the side of what was measured.
    away = []
    for figures in rounds:
        side = figures["high"] if figures["measured"] > figures["predicted"] else figures["low"]
        away.append(
            math.log(figures["measured"] / figures["predicted"]) / math.log(side / figures["predicted"])
        )
    needed = sorted(away)[math.ceil(0.8 * len(away)) - 1] * width
    aim = f"{COVERED[0]:.0f} to {COVERED[1]:.0f} % of the runs, within the bounds of so many"
    holds = low <= COVERED[1] and high >= COVERED[0]
    return [
        row("coverage", "%", 100 * covered / len(rounds), aim=aim, holds=holds, low=low, high=high),
        row("interval_width", "%", 100 * width, peers={"needed": 100 * needed}),
    ]


def binomial_bounds(count: int, of: int) -> tuple[float, float]:
    """The bounds of Clopper and Pearson (1934) for a share, where so many were found.

    With a share below the lower one, so many or more are found in less than 2.5 % of all cases; with one
    above the upper one, so many or fewer.
    """

    def most(share: float, upto: int) -> float:
        """How probable at most so many are."""
        return sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(upto + 1))

    def where(upto: int, probability: float) -> float:
        """The share with which at most so many are just so probable: the more of it, the less they are."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if most(middle, upto) > probability else (low, middle)
        return low

    rest = (1 - _SURE) / 2
    return where(count - 1, 1 - rest) if count else 0.0, where(count, rest) if count < of else 1.0
