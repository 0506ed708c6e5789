"""Which steps of a script count, which batches are measured, and what a profile has of them."""

import itertools
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.graph import Links, Timing
from carme_runtime.scaling.curves import save
from carme_runtime.scaling.ending import end
from carme_runtime.scaling.errors import ScalingError
from carme_runtime.scaling.network import Machine, parse_network
from carme_runtime.scaling.prediction import predict
from carme_runtime.scaling.profiles import DRIFT_PARTS, Profile
from carme_runtime.scaling.show import table

WARM, LEAST, MOST = 3, 4, 40  # steps that do not count, that do, and that are enough
LONGEST, FEWEST = 50.0, 2  # seconds of watching, with so few steps
# Of the seconds to measure: watching as a rule, making steps again, and loading.
WATCHING, REPLAYING, LOADING = 0.2, 0.6, 0.15
_FEW = 3  # times the seconds of loading, which a few slow batches may take
_SAME_BATCH = 0.5  # of the steps, at least
_SIZES = 7
_SLOWER = 0.5**0.5  # the middle of the slower one of two is this quantile of each of them
_LEAST_FACTOR, MOST_FACTOR = 0.5, 4.0  # see `factor`
_FEWEST_SLOWER = 4  # values: the largest of fewer is that quantile
_OF_MIDDLE = 1.25  # standard error of a middle, in those of a mean, of normal variables


@dataclass
class Step:
    """One step of the script, in seconds."""

    whole: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    batch: int = 0


def shortage(steps: int, seconds: float, together: int = 1) -> str:
    """What is missing for a result.

    Args:
        steps: Of the script until it ended.
        seconds: About how long the probe measures.
        together: Steps that are seen as one.
    """
    ended, least = f"The script ended after {steps} step{'s' * (steps != 1)}", together * (WARM + LEAST)
    if steps < least:
        return f"{ended}, and the probe needs {least}. Let it train longer."
    return (
        f"{ended}, before the probe could measure: it watches {together * (WARM + MOST)} steps, or about "
        f"{WATCHING * seconds:.2g} s, and then needs a few batches more. Let it train longer, or give a "
        "smaller --scale-seconds."
    )


def usual_size(sizes: Sequence[int]) -> int:
    """The most common one. Of two that are equally common the smaller one is what an epoch ends with."""
    return max(sizes, key=lambda size: (sizes.count(size), size))


def common_batch(sizes: Sequence[int], last: int | None = None) -> int:
    """The batch that most steps have.

    Args:
        sizes: Of the steps.
        last: Of the step that is made again, if it must have the same.

    Raises:
        ScalingError: Too few have the same.
    """
    batch = usual_size(sizes)
    if sizes.count(batch) < _SAME_BATCH * len(sizes) or last not in (None, batch):
        raise ScalingError(
            f"The script draws batches of different sizes ({min(sizes)} to {max(sizes)}).",
            "Let most steps have the same size.",
        )
    return batch


def draws_another(count: int, fewest: int, spent: float, last: float, seconds: float) -> bool:
    """Whether to draw another batch, to see how fast they come.

    Args:
        count: Of those that were drawn.
        fewest: Of those that are wanted in any case, unless they come so slowly that they take too long.
        spent: Seconds so far,
        last: and for the last one.
        seconds: That drawing is to take.
    """
    if count < fewest:
        return spent + last <= _FEW * seconds
    return spent < seconds


def batches(batch: int) -> list[int]:
    """The batches to measure: the whole one, and halves of halves."""
    sizes = [batch]
    while len(sizes) < _SIZES and sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sorted(set(sizes))


def timings(runs: Mapping[int, Sequence[tuple[float, float]]]) -> tuple[Timing, ...]:
    """The middle of forward and backward passes, in milliseconds, by samples."""
    found: list[Timing] = []
    for size in sorted(runs, reverse=True):
        forward = statistics.median(forward for forward, _ in runs[size])
        backward = statistics.median(backward for _, backward in runs[size])
        if found:  # less work does not take longer: what says so is noise
            forward, backward = min(forward, found[-1].forward_ms), min(backward, found[-1].backward_ms)
        found.append(Timing(size, forward, backward))
    return tuple(reversed(found))


def spread(seconds: Sequence[float]) -> float:
    """The relative standard deviation, by quantiles, which single delays do not move.

    What others do on a machine delays a third of the steps, say, and the rest not at all. The deviations from
    the middle hide that, but two ranks wait for each other in more than half of the steps then. So it is at
    least that of the normal distribution in which the slower one of two takes as long in the middle as here.
    Of two or three values that would be the slowest one, a single delay perhaps: they are too few to see it.
    """
    middle = statistics.median(seconds) if seconds else 0.0
    if not middle > 0:
        return 0.0
    away = statistics.median(abs(value - middle) for value in seconds)
    deviation = 1.4826 * away
    if len(seconds) >= _FEWEST_SLOWER:
        slower = sorted(seconds)[math.ceil(_SLOWER * len(seconds)) - 1] - middle
        deviation = max(deviation, slower / NormalDist().inv_cdf(_SLOWER))
    return deviation / middle


def drift(turns: Sequence[float]) -> float:
    """By how much the middle of a run differs from that of another one of the same minutes.

    The same work was done in turns. Their middles in a few parts of the probe, one after the other, differ by
    what the machine did meanwhile, which the middle of a longer run does not even out either: noise of
    neighbours comes in spells. `spread` cannot show that, as it is of single steps.

    Args:
        turns: How long each took, in their order; in any unit.

    Returns:
        The relative standard deviation of the parts. 0: there are fewer turns than parts.
    """
    if len(turns) < DRIFT_PARTS or not min(turns) > 0:
        return 0.0
    edges = [number * len(turns) // DRIFT_PARTS for number in range(DRIFT_PARTS + 1)]
    return statistics.stdev(math.log(statistics.median(turns[a:b])) for a, b in itertools.pairwise(edges))


def relative(seconds: Sequence[float]) -> list[float]:
    """In parts of their middle, so that those of different batches can be put together."""
    middle = statistics.median(seconds)
    return [value / middle for value in seconds] if middle > 0 else []


def factor(watched: Sequence[float], repeated: Sequence[float]) -> float:
    """By how much a part of the script's step takes longer than the same made again.

    Both are the middles of few steps of a machine that is never quite alike, and this multiplies what is
    predicted for every batch. So it is taken the nearer to 1 the less it differs from it in standard errors:
    the part of a difference that is no noise is estimated as d^2 / (d^2 + e^2), as in empirical Bayes. What
    is left out, d e^2 / (d^2 + e^2), is at most half of the standard error.
    """
    first, second = statistics.median(watched), statistics.median(repeated)
    if not (first > 0 and second > 0):
        return 1.0
    found = min(max(first / second, _LEAST_FACTOR), MOST_FACTOR)
    errors = (_OF_MIDDLE * spread(each) / math.sqrt(len(each)) for each in (watched, repeated))
    away, error = found - 1, found * math.hypot(*errors)
    return 1 + away**3 / (away**2 + error**2) if away else 1.0


def is_loaded_ahead(whole: float, computed: float, load: float) -> bool:
    """Whether a script loads its next batch while it computes, by the milliseconds of its step.

    Args:
        whole: Of the script's step, with what it waits for its batch.
        computed: Of forward and backward pass alone.
        load: Of loading a batch alone.
    """
    return whole < computed + load / 2


def split_whole(milliseconds: float, forward: float | None = None) -> tuple[float, float]:
    """Forward and backward pass of a step that is measured whole.

    A layer's backward pass computes two products of matrices for one of its forward pass: the gradients of
    its input and of its weights. That counts where nothing better is known.

    Args:
        milliseconds: Of both.
        forward: Of the forward pass by itself, which is not believed where it takes as long as both. None:
            unknown.
    """
    if forward is None or forward >= milliseconds:
        forward = milliseconds / 3
    return forward, milliseconds - forward


def shares(moments: Sequence[float], begin: float) -> tuple[float, ...]:
    """When gradients were complete, as shares of the backward pass: it ends with the last of them.

    Args:
        moments: Seconds by any clock, for each gradient.
        begin: When the backward pass began, by the same clock.
    """
    length = max(moments, default=begin) - begin
    if not (length > 0 and math.isfinite(length)):
        return tuple(1.0 for _ in moments)
    return tuple(min(max((moment - begin) / length, 0.0), 1.0) for moment in moments)


def links_of(network: str | None) -> Links:
    """Links as they are given, or as the file has them that CARME_LINKS names, else assumed."""
    if network:
        return parse_network(network)
    file = os.environ.get("CARME_LINKS", "")
    if file and file != "measure":
        from carme_runtime.collectives import links

        return Links(tuple(links.read(Path(file))), f"measured, from {file}")
    return Links()


def finish(profile: Profile, file: Path) -> None:
    """Write the result, show what it predicts, and end the script."""
    try:
        save(profile, file)
    except CarmeRuntimeError as error:
        end(str(error))
    print(table(predict(profile, Machine(profile.links))), end="")
    print(f"The result is in {file}. For other networks and ranks: carme scale {file.name}")
    sys.exit(0)
