"""What a comparison comes to: three sentences, and the speed-ups behind them."""

import math
import statistics
from dataclasses import dataclass

from carme_runtime.compare.figures import Estimate, is_different, ratio, values_needed
from carme_runtime.compare.machine import SHARED
from carme_runtime.compare.networks import NETWORKS
from carme_runtime.compare.results import DISTURBED, MEASURED, MOST_ROUNDS, UNCERTAIN, VOID, Result, Row


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
    alone = next((each for each in result.of(row.network, 1) if each.contestant == row.contestant), None)
    if alone is None:
        return None
    found = ratio(alone.rounds, row.rounds)
    return found and found.times(row.batch / alone.batch)


@dataclass(frozen=True)
class Place:
    """A contestant over all networks, on the most ranks.

    Args:
        title: Its name.
        behind: How many times as long a step takes as that of the fastest, in the geometric mean.
    """

    title: str
    behind: float


def overall(result: Result) -> list[Place]:
    """The fastest first; only who has all networks that anybody has takes part."""
    most = max(result.ranks(), default=0)
    networks = [network for network in result.networks() if result.of(network, most)]
    factors: dict[str, list[float]] = {}
    titles: dict[str, str] = {}
    for network in networks:
        rows = result.of(network, most)
        for row in rows:
            titles[row.contestant] = row.title
            paired = ratio(row.rounds, rows[0].rounds)  # none: no round of both was quiet
            quotient = paired.median if paired else row.step.median / rows[0].step.median
            factors.setdefault(row.contestant, []).append(quotient)
    means = {
        name: math.exp(statistics.fmean(map(math.log, quotients))) for name, quotients in factors.items()
    }
    whole = sorted((means[name], name) for name in means if len(factors[name]) == len(networks))
    return [Place(titles[name], mean / whole[0][0]) for mean, name in whole]


def sentences(result: Result) -> list[str]:
    """The verdict: who is fastest, how it scales, how far to trust it."""
    return [_fastest(result), _scaling(result), _trust(result)]


def _fastest(result: Result) -> str:
    order, most = overall(result), max(result.ranks(), default=0)
    if not order:
        return "Nothing was measured for all networks, so there is no fastest."
    first = order[0].title
    if len(order) == 1:
        return f"{first} alone was measured on {counted(most)}, so there is nothing to compare it with."
    level = _level(result, first)
    equal = f"; {_listed(level)} {'are' if len(level) > 1 else 'is'} not measurably slower" if level else ""
    behind = [place for place in order[1:] if place.title not in level]
    ends = ""
    if behind:
        last = behind[-1]
        rest = (
            f"the others need {behind[0].behind:.2f} to {last.behind:.2f} times its time, {last.title} most"
        )
        ends = f"; {rest if len(behind) > 1 else f'{last.title} needs {last.behind:.2f} times its time'}"
    return f"{_over(result, most)} on {counted(most)}, {first} is fastest{equal}{ends}."


def _over(result: Result, ranks: int) -> str:
    networks = [network for network in result.networks() if result.of(network, ranks)]
    return "Over all networks" if len(networks) > 1 else f"With {titled(networks[0])}"


def titled(network: str) -> str:
    """A network's title; its name, where another version has it."""
    return NETWORKS[network].title if network in NETWORKS else network


def _level(result: Result, title: str) -> list[str]:
    """Who is not slower than this one in any network, as far as the intervals say."""
    most, found = max(result.ranks()), []
    for candidate in (place.title for place in overall(result)[1:]):
        ratios: list[Estimate] = []
        for network in result.networks():
            rows = {row.title: row for row in result.of(network, most)}
            if title in rows and candidate in rows:
                slower = ratio(rows[candidate].rounds, rows[title].rounds)
                ratios += [slower] if slower else []
        if ratios and not any(is_different(each) for each in ratios):
            found.append(candidate)
    return found


def _scaling(result: Result) -> str:
    most = max(result.ranks(), default=0)
    found = [
        (gain.median, row)
        for row in result.measured
        if row.ranks == most > 1 and (gain := speedup(result, row)) is not None
    ]
    if not found:
        return "How it scales was not measured: that takes one rank and several."
    (best, row), (worst, last) = max(found, key=_first), min(found, key=_first)
    where, ideal = f"On {counted(most)}", f"{most} times would be ideal"
    top = f"{row.title} with {titled(row.network)}"
    if len(found) == 1:
        return f"{where}, {top} has {best:.2f} times the speed of one rank; {ideal}."
    least = f"{last.title} with {titled(last.network)}"
    gains = f"{top} gains most, {best:.2f} times the speed of one rank"
    return f"{where}, {gains}, and {least} least, {worst:.2f} times; {ideal}."


def _first(pair: tuple[float, Row]) -> float:
    return pair[0]


def _trust(result: Result) -> str:
    states = [row.status for row in result.rows]
    measured, *marked = (states.count(each) for each in (MEASURED, DISTURBED, UNCERTAIN, VOID))
    steps = [row.step for row in result.measured]
    widths = [step.percent for step in steps if step.percent is not None]
    width = f", and medians are known to {statistics.median(widths):.1f} % as a rule" if widths else ""
    if needed := rounds_needed(result):
        helps = f"about --rounds {needed} would make most certain"
        none = f"not even --rounds {MOST_ROUNDS} would make most certain: find a quieter machine"
        width += f" ({helps if needed <= MOST_ROUNDS else none})"
    if steps and not widths:
        width = "; one round gives no spread, so no difference is certain (give more with --rounds)"
    turns, bad = result.noise.get("turns", 0), result.noise.get("disturbed_turns", 0)
    noisy = 2 * bad > turns or marked[0] + marked[1] > measured
    rough = ": the machine was not quiet, take figures as rough" if noisy else ""
    if result.environment.get("allocation", "").startswith(SHARED):
        rough += "; others may work on its nodes at the same time"
    probe = 100 * result.noise.get("probe_spread", 0)
    return (
        f"Of {len(states)} rows {measured} are measured, {marked[0]} disturbed, {marked[1]} uncertain and "
        f"{marked[2]} void; {bad:.0f} of {turns:.0f} turns were disturbed, a probe of known work varied by "
        f"{probe:.1f} %{width}{rough}."
    )


def rounds_needed(result: Result) -> int | None:
    """With how many `--rounds` half of the uncertain rows would be certain; None: none is uncertain.

    It may be more than `--rounds` takes. Rows that need them get up to as many again, which are counted here;
    those that `--minutes` brings are not, as nobody knows how many these would be.
    """
    rows = [row for row in result.rows if row.status == UNCERTAIN]
    if not rows:
        return None
    turns = [values_needed(len(row.used), row.step.percent or 0, row.limit_percent) for row in rows]
    rounds = int(result.options.get("rounds", 0))  # with which they are uncertain
    return max(math.ceil(statistics.median(turns) / 2), rounds + 1)


def counted(ranks: int) -> str:
    """A number of ranks, in words."""
    return f"{ranks} rank{'s' * (ranks != 1)}"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
