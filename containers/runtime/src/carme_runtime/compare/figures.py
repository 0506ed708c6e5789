"""Medians with their confidence intervals, and which of two contestants is faster."""

import functools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A median, and the interval that holds the true one with a confidence of 95 %.

    Args:
        has_interval: Whether there is one: a single value does not say how much others would differ.
    """

    median: float
    low: float
    high: float
    has_interval: bool = True

    def times(self, factor: float) -> "Estimate":
        """The same in another unit."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.median * factor, low, high, self.has_interval)

    @property
    def percent(self) -> float | None:
        """How far the interval reaches from the median to either side, in percent of it; None: unknown."""
        return 50 * (self.high - self.low) / self.median if self.has_interval and self.median else None

    def interval(self, digits: int) -> str:
        """The interval, in words; `unknown` after one round."""
        return f"{self.low:.{digits}f} to {self.high:.{digits}f}" if self.has_interval else "unknown"


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """By bootstrap; one value alone has no interval."""
    return _estimate(tuple(values), seed)


@functools.cache
def _estimate(values: tuple[float, ...], seed: int) -> Estimate:
    generator = random.Random(seed)
    draws = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Estimate(statistics.median(values), *_interval(draws), len(values) > 1)


def ratio(slower: dict[int, float], faster: dict[int, float], seed: int = 0) -> Estimate | None:
    """How many times as long the one takes as the other, by the rounds that both have.

    What disturbs a round hits both, so their ratio in the round varies less than their times do.
    """
    rounds = sorted(slower.keys() & faster.keys())
    return estimate([slower[each] / faster[each] for each in rounds], seed) if rounds else None


def change(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Estimate:
    """How many times as long `after` takes as `before`, which were measured apart."""
    generator = random.Random(seed)
    draws = sorted(
        statistics.median(generator.choices(after, k=len(after)))
        / statistics.median(generator.choices(before, k=len(before)))
        for _ in range(_RESAMPLES)
    )
    several = min(len(before), len(after)) > 1
    return Estimate(statistics.median(after) / statistics.median(before), *_interval(draws), several)


def is_different(found: Estimate) -> bool:
    """Whether a ratio is not 1, as far as its interval says; without one nothing does."""
    return found.has_interval and not found.low <= 1 <= found.high


def spread(values: Sequence[float]) -> float:
    """How far apart the values are, as a share of their median: half of them are within it."""
    if len(values) < 2:
        return 0.0
    quarter, _, three = statistics.quantiles(values, n=4, method="inclusive")
    return (three - quarter) / statistics.median(values)


def _interval(draws: list[float]) -> tuple[float, float]:
    outside = (1 - CONFIDENCE) / 2
    return draws[int(outside * len(draws))], draws[int((1 - outside) * len(draws)) - 1]
