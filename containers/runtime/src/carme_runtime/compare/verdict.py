"""What a comparison comes to: three sentences, and the speed-ups behind them."""

import math
import statistics
from dataclasses import dataclass

from carme_runtime.compare.figures import Estimate, is_different, ratio
from carme_runtime.compare.results import DISTURBED, UNCERTAIN, VOID, Result, Row


@dataclass(frozen=True)
class Standing:
    """A contestant with a network on some ranks, and how it compares.

    Args:
        row: Its figures.
        behind: How many times as long a step takes as that of the fastest, round by round; None: that is it.
        speedup: Against one rank of the same contestant; None: that was not measured.
    """

    row: Row
    behind: Estimate | None
    speedup: Estimate | None


def standings(result: Result, network: str, ranks: int) -> list[Standing]:
    """The fastest first."""
    rows = result.of(network, ranks)
    return [
        Standing(row, ratio(row.rounds, rows[0].rounds) if row is not rows[0] else None, speedup(result, row))
        for row in rows
    ]


def speedup(result: Result, row: Row) -> Estimate | None:
    """How many times the samples per second of one rank."""
    alone = next((one for one in result.of(row.network, 1) if one.contestant == row.contestant), None)
    if alone is None:
        return None
    found = ratio(alone.rounds, row.rounds)
    return found and found.times(row.batch / alone.batch)


def overall(result: Result) -> list[tuple[str, float]]:
    """By how much each contestant is behind the fastest over all networks, on the most ranks.

    Only who has all networks that anybody has takes part; means are geometric.
    """
    most = max(result.ranks(), default=0)
    networks = [network for network in result.networks() if result.of(network, most)]
    factors: dict[str, list[float]] = {}
    titles: dict[str, str] = {}
    for network in networks:
        rows = result.of(network, most)
        for row in rows:
            titles[row.contestant] = row.title
            factors.setdefault(row.contestant, []).append(row.step.median / rows[0].step.median)
    means = [
        (titles[name], math.exp(sum(map(math.log, several)) / len(several)))
        for name, several in factors.items()
        if len(several) == len(networks)
    ]
    return sorted(means, key=lambda one: one[1])


def sentences(result: Result) -> list[str]:
    """The verdict: who is fastest, how it scales, how far to trust it."""
    return [_fastest(result), _scaling(result), _trust(result)]


def _fastest(result: Result) -> str:
    order, most = overall(result), max(result.ranks(), default=0)
    if not order:
        return "Nothing was measured for all networks, so there is no fastest."
    where = f"on {counted(most)}"
    if len(order) == 1:
        return f"{order[0][0]} alone was measured {where}, so there is nothing to compare it with."
    level = _level(result, order[0][0])
    others = f", level with {_listed(level)}" if level else ""
    rest = [
        f"{title} ({mean / order[0][1]:.2f} times as long)" for title, mean in order[1:] if title not in level
    ]
    ends = f"; a step takes longer with {_listed(rest)}" if rest else ""
    return f"Over all networks {where}, {order[0][0]} is fastest{others}{ends}."


def _level(result: Result, title: str) -> list[str]:
    """Who is not slower than this one in any network, as far as the intervals say."""
    most, found = max(result.ranks()), []
    for other, _ in overall(result)[1:]:
        ratios: list[Estimate] = []
        for network in result.networks():
            rows = {row.title: row for row in result.of(network, most)}
            if title in rows and other in rows:
                one = ratio(rows[other].rounds, rows[title].rounds)
                ratios += [one] if one else []
        if ratios and not any(is_different(one) for one in ratios):
            found.append(other)
    return found


def _scaling(result: Result) -> str:
    most = max(result.ranks(), default=0)
    found = [
        (one.median, row)
        for row in result.measured
        if row.ranks == most > 1 and (one := speedup(result, row)) is not None
    ]
    if not found:
        return "How it scales was not measured: that takes one rank and several."
    (best, row), (worst, last) = max(found, key=_first), min(found, key=_first)
    named = f"({row.title} with {row.network})"
    if len(found) == 1:
        return f"{counted(most).capitalize()} are {best:.2f} times as fast as one {named}; {most} is ideal."
    return (
        f"{counted(most).capitalize()} are at most {best:.2f} times as fast as one {named} and at least "
        f"{worst:.2f} times ({last.title} with {last.network}), where {most} is ideal."
    )


def _first(pair: tuple[float, Row]) -> float:
    return pair[0]


def _trust(result: Result) -> str:
    noise = result.noise
    void = sum(row.status == VOID for row in result.rows)
    disturbed = sum(row.status == DISTURBED for row in result.rows)
    uncertain = sum(row.status == UNCERTAIN for row in result.rows)
    steps = [row.step for row in result.measured]
    widths = [step.percent for step in steps if step.percent is not None]
    width = f", and a median is known to {statistics.median(widths):.1f} %" if widths else ""
    if steps and not widths:
        width = "; one round gives no spread, so no difference is certain (give more with --rounds)"
    turns, bad = noise.get("turns", 0), noise.get("disturbed_turns", 0)
    rough = ": the machine was not quiet, take figures as rough" if 2 * bad > turns else ""
    probe = 100 * noise.get("probe_spread", 0)
    return (
        f"Of {len(result.rows)} rows {void} are void, {disturbed} disturbed and {uncertain} uncertain; "
        f"{bad:.0f} of {turns:.0f} "
        f"turns were disturbed, a probe of known work varied by {probe:.1f} %{width}{rough}."
    )


def counted(ranks: int) -> str:
    """A number of ranks, in words."""
    return f"{ranks} rank{'s' * (ranks != 1)}"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
