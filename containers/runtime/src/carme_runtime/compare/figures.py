"""Medians with their confidence intervals, and which of two contestants is faster."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_LEAST_VALUES = 5  # from which on the smallest and the largest hold the median often enough
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182}  # by the number of values, for 95 %
#: How far a median's interval reaches, in standard deviations of normal values by the root of their number.
_MEDIAN_REACH = 1.96 * math.sqrt(math.pi / 2)


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


def estimate(values: Sequence[float]) -> Estimate:
    """The median of positive values with its interval; one value alone has no interval."""
    return Estimate(statistics.median(values), *_interval(sorted(values)), len(values) > 1)


def ratio(slower: dict[int, float], faster: dict[int, float]) -> Estimate | None:
    """How many times as long the one takes as the other, by the rounds that both have.

    What disturbs a round hits both, so their ratio in the round varies less than their times do.
    """
    rounds = sorted(slower.keys() & faster.keys())
    return estimate([slower[each] / faster[each] for each in rounds]) if rounds else None


def change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """How many times as long `after` takes as `before`, which were measured apart.

    The distances of both medians to the ends of their own intervals add up as those of independent figures
    do (MOVER, Donner and Zou 2012), in logarithms as this is a ratio. It errs to the safe side: it holds the
    true ratio 97 times of 100.
    """
    first, second = estimate(before), estimate(after)
    middle = second.median / first.median
    below = math.hypot(math.log(second.median / second.low), math.log(first.high / first.median))
    above = math.hypot(math.log(second.high / second.median), math.log(first.median / first.low))
    has_interval = first.has_interval and second.has_interval
    return Estimate(middle, middle * math.exp(-below), middle * math.exp(above), has_interval)


def is_different(found: Estimate) -> bool:
    """Whether a ratio is not 1, as far as its interval says; without one nothing does."""
    return found.has_interval and not found.low <= 1 <= found.high


def spread(values: Sequence[float]) -> float:
    """How far apart the values are, as a share of their median: half of them are within it."""
    if len(values) < 2:
        return 0.0
    quarter, _, three = statistics.quantiles(values, n=4, method="inclusive")
    return (three - quarter) / statistics.median(values)


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Which holds the median of what the values are drawn from, whatever that looks like.

    It is of the values' order: how many of them lie below the median is as with tossed coins. Between the two
    pairs of values whose confidences are next to 95 % it is interpolated (Hettmansperger and Sheather 1986).
    A bootstrap of so few values would hold the median less often than it says: with three, 3 of 4 times.
    """
    count = len(ordered)
    if count < _LEAST_VALUES:
        return _interval_of_few(ordered)
    outer = 1
    while outer + 1 <= count // 2 and _confidence(count, outer + 1) >= CONFIDENCE:
        outer += 1
    more, less = _confidence(count, outer), _confidence(count, outer + 1)
    low, high = ordered[outer - 1], ordered[-outer]
    if more <= CONFIDENCE:  # all values; 94 % with five
        return low, high
    part = (more - CONFIDENCE) / (more - less)
    inward = (count - outer) * part / (outer + (count - 2 * outer) * part)
    return low + inward * (ordered[outer] - low), high - inward * (high - ordered[-outer - 1])


def values_needed(count: int, percent: float, limit: float) -> int:
    """How many values an interval within `limit` percent of the median takes as a rule.

    Five and more have intervals that become narrower with the root of their number. With fewer, Student's t
    makes them narrow faster, and they are of logarithms.

    Args:
        count: Values that there are, at least two.
        percent: How far their interval reaches to either side.
        limit: How far it may reach, above 0.
    """
    if count >= _LEAST_VALUES:
        return math.ceil(count * (percent / limit) ** 2)
    # In standard deviations, from normal values: this median's and the one of many.
    spread_percent = math.asinh(percent / 100) * math.sqrt(count) / _STUDENT[count]
    return max(_LEAST_VALUES, math.ceil((_MEDIAN_REACH * spread_percent / (limit / 100)) ** 2))


def affordable(seconds: Mapping[int, float], left: float) -> list[int]:
    """Who can get what it needs in the time that is left: as many as can be.

    Args:
        seconds: What each needs.
        left: Seconds for all of them.
    """
    found: list[int] = []
    for number in sorted(seconds, key=lambda each: seconds[each]):
        left -= seconds[number]
        if left < 0:
            break
        found.append(number)
    return found


def _confidence(count: int, place: int) -> float:
    """With which the median is between the value at this place from below and the one from above."""
    return 1 - 2 * sum(math.comb(count, fewer) for fewer in range(place)) / 2**count


def _interval_of_few(ordered: Sequence[float]) -> tuple[float, float]:
    """Of so few values that all of them hold the median too seldom: as if their logarithms were normal."""
    if len(ordered) < 2:
        return ordered[0], ordered[0]
    logarithms = [math.log(value) for value in ordered]
    reach = _STUDENT[len(ordered)] * statistics.stdev(logarithms) / math.sqrt(len(ordered))
    middle = statistics.mean(logarithms)
    return min(ordered[0], math.exp(middle - reach)), max(ordered[-1], math.exp(middle + reach))
