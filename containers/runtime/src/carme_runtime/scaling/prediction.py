"""Predictions for many ranks: a step's time, how sure it is, which limit binds, what would move it."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from carme_runtime.scaling.network import Machine
from carme_runtime.scaling.profiles import DRIFT_PARTS, Profile
from carme_runtime.scaling.simulation import AS_MEASURED, Change, Step, simulate

STRONG, WEAK = "strong", "weak"
COMMUNICATION, SKINNY, INPUT, MEMORY, FIXED, NONE = (
    "communication",
    "skinny matrices",
    "input",
    "memory",
    "fixed work",
    "none",
)
_BINDS_FROM = 0.05  # of the step's time
_STALLS_BELOW = 1.25  # times as fast with twice the ranks
# Standard deviations beyond which one of ten is: where they are known, and where it is only known how four
# values differ, by Student's distribution with 3 degrees of freedom.
_TENTH, _TENTH_OF_FOUR = NormalDist().inv_cdf(0.9), 1.638
# Relative standard deviations, where the probe does not say more: of a run between two of the same hour, of
# links by how they are known, of the model as soon as ranks communicate, and of it for each doubling of the
# ranks. How that of the model was found: docs/benchmarks/scaling.md.
_BETWEEN_RUNS, _SIMULATED, _DOUBLED = 0.03, 0.04, 0.02
_MEASURED_LINKS, _GIVEN_LINKS, _ASSUMED_LINKS = 0.05, 0.2, 0.35
_BEYOND_BATCH = 0.1  # of computing, for each halving below the smallest measured batch


@dataclass(frozen=True)
class Point:
    """The prediction for a number of ranks.

    Args:
        ranks: How many.
        batch: Samples of each.
        step: The expected one.
        low: Milliseconds below which one run of ten is expected,
        high: and above which one is.
        speedup: Times as many samples per second as one rank.
        efficiency: Of the ideal speed-up.
        limit: What binds: the one without which the step would gain the most.
        extrapolated: Why this is beyond what was measured; empty: it is not.
    """

    ranks: int
    batch: float
    step: Step
    low: float
    high: float
    speedup: float
    efficiency: float
    limit: str
    extrapolated: tuple[str, ...]

    @property
    def cost(self) -> float:
        """Rank-hours, as a multiple of those with one rank."""
        return self.ranks / self.speedup


@dataclass(frozen=True)
class Remedy:
    """What would move the limit, and how many times as fast training would then be; 1: it can run at all."""

    change: str
    faster: float = 1.0

    @property
    def what(self) -> str:
        """The earlier name of `change`."""
        warnings.warn("Remedy.what is now called change.", DeprecationWarning, stacklevel=2)
        return self.change


@dataclass(frozen=True)
class Prediction:
    """All of it.

    Args:
        profile: What was measured.
        machine: Where the ranks are to run.
        batch: Samples of a step: of all ranks with strong scaling, of each with weak scaling.
        strong: Points that share one batch.
        weak: Points with a batch for each rank.
        remedies: For the largest number of ranks of strong scaling that still is of use.
    """

    profile: Profile
    machine: Machine
    batch: int
    strong: tuple[Point, ...]
    weak: tuple[Point, ...]
    remedies: tuple[Remedy, ...]

    @property
    def knee(self) -> int:
        """The most ranks for which the last doubling still makes strong scaling 1.25 times as fast."""
        return knee_of({point.ranks: point.speedup for point in self.strong})

    def most_ranks(self, efficiency: float) -> int:
        """The most ranks of strong scaling with at least this efficiency, among those that were simulated."""
        return most_of({point.ranks: point.speedup for point in self.strong}, efficiency)

    @property
    def fastest(self) -> Point:
        """Of strong scaling."""
        return max(self.strong, key=lambda point: point.speedup)


def knee_of(speedups: Mapping[int, float]) -> int:
    """The most ranks for which the last doubling still makes it 1.25 times as fast.

    Args:
        speedups: By ranks, growing, over one rank.
    """
    ranks = list(speedups)
    reached = ranks[0]
    for count in ranks[1:]:
        if speedups[count] < speedups[reached] * _STALLS_BELOW ** math.log2(count / reached):
            break
        reached = count
    return reached


def most_of(speedups: Mapping[int, float], efficiency: float) -> int:
    """The most ranks with at least this efficiency, by the speed-ups over one rank."""
    return max((ranks for ranks, speedup in speedups.items() if speedup / ranks >= efficiency), default=1)


def predict(
    profile: Profile, machine: Machine | None = None, upto: int = 64, batch: int | None = None
) -> Prediction:
    """What strong and weak scaling up to a number of ranks would bring.

    Args:
        profile: Of a probe.
        machine: Where the ranks are to run. None: one rank a node, over the links that the probe knows.
        upto: The most ranks.
        batch: Samples of a step with one rank. None: as the script has it.
    """
    machine = machine or Machine(profile.links)
    batch = batch or profile.batch
    strong = _points(profile, machine, [n for n in _counts(upto) if n <= batch], batch, STRONG)
    weak = _points(profile, machine, _counts(upto), batch, WEAK)
    prediction = Prediction(profile, machine, batch, strong, weak, ())
    at = next((point for point in strong if point.ranks > prediction.knee), strong[-1])
    return replace(prediction, remedies=_remedies(profile, machine, at, batch))


def strong_points(profile: Profile, machine: Machine, counts: Sequence[int]) -> tuple[Point, ...]:
    """Strong scaling on these numbers of ranks, with the batch of the profile."""
    return _points(profile, machine, counts, profile.batch, STRONG)


def _counts(upto: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 <= upto:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == upto else [*counts, upto]


def _points(
    profile: Profile, machine: Machine, counts: Sequence[int], batch: int, kind: str
) -> tuple[Point, ...]:
    alone = simulate(profile, 1, batch, machine).ms / batch  # of a sample
    points = []
    for ranks in counts:
        each = batch if kind == WEAK else -(-batch // ranks)
        step = simulate(profile, ranks, each, machine)
        speedup = alone * (batch * ranks if kind == WEAK else batch) / step.ms
        reasons = _extrapolated(profile, machine, ranks, each)
        low, high = _interval(profile, machine, ranks, each)
        limit = binding(profile, machine, ranks, each)
        points.append(Point(ranks, each, step, low, high, speedup, speedup / ranks, limit, reasons))
    return tuple(points)


def binding(profile: Profile, machine: Machine, ranks: int, batch: float) -> str:
    """The limit without which the step would gain the most; `none`: computing, which more ranks share."""
    if not _fits(profile, batch):
        return MEMORY
    step = simulate(profile, ranks, batch, machine).ms
    without = {
        COMMUNICATION: Change(links=0),
        SKINNY: Change(full_matrices=True),
        INPUT: Change(input=0),
        FIXED: Change(fixed=0),
    }
    gains = {name: 1 - simulate(profile, ranks, batch, machine, c).ms / step for name, c in without.items()}
    name = max(gains, key=lambda limit: gains[limit])
    return name if gains[name] >= _BINDS_FROM else NONE


def _fits(profile: Profile, batch: float) -> bool:
    """Whether a rank has the memory for so many samples, as far as that is known."""
    memory = profile.memory
    needed = memory.fixed_bytes + batch * memory.bytes_per_sample
    return not memory.limit_bytes or needed <= memory.limit_bytes


def _extrapolated(profile: Profile, machine: Machine, ranks: int, batch: float) -> tuple[str, ...]:
    reasons = []
    smallest, largest = profile.timings[0].samples, profile.timings[-1].samples
    if batch < smallest:
        reasons.append(f"batches below {smallest} were not measured")
    if batch > largest:
        reasons.append(f"batches above {largest} were not measured")
    nodes = -(-ranks // machine.ranks_per_node)
    if min(ranks, machine.ranks_per_node) > 1 and machine.near.source.startswith("assumed"):
        reasons.append("copies within a node are assumed, not measured")
    if nodes > 1 and machine.links.source.startswith(("assumed", "given")):
        reasons.append(f"links are {machine.links.source.partition(':')[0]}, not measured")
    if nodes > 2:
        reasons.append("links of more than two nodes were not measured")
    return tuple(reasons)


def _interval(profile: Profile, machine: Machine, ranks: int, batch: float) -> tuple[float, float]:
    """Between which milliseconds eight runs of ten are expected.

    What is unsure changes the step by factors whose logarithms are normal. Each is moved to where one of ten
    is beyond it, and what that makes of the step is added up in squares, for each side by itself: more
    communication than fits behind the backward pass costs more than less of it saves.
    """
    expected = simulate(profile, ranks, batch, machine).ms
    # Of the step as a whole: what else a machine does delays messages of processors as it does computing.
    whole = _between_runs(profile)
    if ranks > 1:
        whole = math.hypot(whole, _TENTH * _SIMULATED, _TENTH * _DOUBLED * math.log2(ranks))
    source = machine.links.source
    of_source = _GIVEN_LINKS if source.startswith("given") else _MEASURED_LINKS
    links = _TENTH * (_ASSUMED_LINKS if source.startswith("assumed") else of_source)
    computing = _TENTH * _BEYOND_BATCH * max(math.log2(profile.timings[0].samples / batch), 0.0)

    def bound(side: int) -> float:
        changes = Change(compute=math.exp(side * computing)), Change(links=math.exp(side * links))
        changed = (simulate(profile, ranks, batch, machine, change).ms for change in changes)
        return expected * math.exp(side * math.hypot(whole, *(math.log(ms / expected) for ms in changed)))

    return bound(-1), bound(1)


def _between_runs(profile: Profile) -> float:
    """By how much the middle step of one run of ten is above what the probe saw, on a scale of logarithms.

    Parts of the probe are as many runs. Their middle is unsure, too. How much they differ is known by a few;
    what is usual counts as one more.
    """
    if not profile.drift:  # a result of an earlier version, or of few steps
        return _TENTH * math.hypot(_BETWEEN_RUNS, profile.spread / 2)
    deviation = math.hypot(profile.drift, _BETWEEN_RUNS / math.sqrt(DRIFT_PARTS - 1))
    return _TENTH_OF_FOUR * deviation * math.sqrt(1 + 1 / DRIFT_PARTS)


def _remedies(profile: Profile, machine: Machine, point: Point, batch: int) -> tuple[Remedy, ...]:
    """What would make training faster with as many ranks, the most useful first."""
    ranks, each = point.ranks, point.batch
    if point.limit == MEMORY:
        return (Remedy("a smaller batch for each rank, or less memory (carme-run --memory-per-rank)"),)

    def faster(ms: float, samples: float = 1.0) -> float:
        return samples * point.step.ms / ms

    def with_machine(changed: Machine) -> float:
        return simulate(profile, ranks, each, changed).ms

    links = machine.links
    quicker = replace(links, times=tuple((size, time / 4) for size, time in links.times))
    larger = Remedy(
        f"a batch of {2 * batch} instead of {batch}",
        faster(simulate(profile, ranks, 2 * each, machine).ms, 2),
    )
    options = [
        *([larger] if _fits(profile, 2 * each) else []),
        Remedy("bf16 on the wire", faster(with_machine(replace(machine, wire=machine.wire / 2)))),
        Remedy("a network four times as fast", faster(with_machine(replace(machine, links=quicker)))),
        Remedy(
            "staged data, or more workers that load it",
            faster(simulate(profile, ranks, each, machine, replace(AS_MEASURED, input=0)).ms),
        ),
    ]
    useful = [remedy for remedy in options if remedy.faster >= 1 + _BINDS_FROM]
    return tuple(sorted(useful, key=lambda remedy: -remedy.faster))
