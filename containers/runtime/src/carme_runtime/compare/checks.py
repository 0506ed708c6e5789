"""Which rows are void because they do other work, and which turns were disturbed."""

import math
import statistics
from collections.abc import Mapping, Sequence

from carme_runtime.compare.results import Distance, Row, Turn
from carme_runtime.compare.tasks import BATCHES

#: By which losses may differ; numbers of bf16 have 8 bits, so that rounding alone makes 0.4 %.
TOLERANCES = {"float32": 1e-4, "bf16": 2e-2}
#: By which the gradients of the first step may differ from the right ones, as a part of these.
GRADIENT_TOLERANCES = {"float32": 1e-4, "bf16": 0.8}
_SMALL = 0.01  # of all gradients
FOREIGN_LIMIT = 0.1  # of the time of a contestant's cores that others have
PROBE_LIMIT = 0.1  # that a probe may take longer than the usual one


def void_unequal(rows: Sequence[Row], first_loss: float, precision: str = "float32") -> None:
    """Mark the rows of one network and number of ranks whose losses or gradients are wrong.

    The first loss and the gradients of the first step are those of the weights, which are known. Later losses
    show whether the optimizers are alike, too: there most decide, of those whose gradients are right.
    """
    tolerance = TOLERANCES[precision]
    for row in rows:
        if not row.void and row.losses and not _close(row.losses[0], first_loss, tolerance):
            row.void = (
                f"unequal work: the loss of its first step is {row.losses[0]:.6f}, and with these weights it "
                f"is {first_loss:.6f}"
            )
    void_wrong_gradients(rows, GRADIENT_TOLERANCES[precision])
    able = [row for row in rows if not row.void and row.losses]
    for number in range(1, max((len(row.losses) for row in able), default=0)):
        usual = _of_most([row.losses[number] for row in able], tolerance)
        for row in able:
            if row.void or _close(row.losses[number], usual, tolerance):
                continue
            row.void = (
                f"unequal work: the loss of its step {number + 1} is {row.losses[number]:.6f}, and that of "
                f"most is {usual:.6f}"
            )


def void_wrong_gradients(rows: Sequence[Row], tolerance: float = GRADIENT_TOLERANCES["float32"]) -> None:
    """Mark the rows whose gradients of the first step are not those of the weights."""
    for row in rows:
        if row.void or not row.gradients:
            continue
        name, error = worst_gradient(row.gradients)
        if not error <= tolerance:  # which is also so where it is not a number
            row.void = (
                f"unequal work: the gradient of {name} in its first step is {100 * error:.3g} % from the one "
                "that these weights have"
            )


def worst_gradient(found: Mapping[str, Distance]) -> tuple[str, float]:
    """The weight whose gradient is the farthest from the right one, and how far: 0.01 for a hundredth of it.

    Small gradients count as a hundredth of all together: rounding alone changes those that are 0, as those of
    biases before a normalization, by as much as they are.
    """
    whole = math.hypot(*(each["expected"] for each in found.values()))
    errors = {
        name: max(error["distance"] - error["rounding"], 0.0) / max(error["expected"], _SMALL * whole, 1e-30)
        for name, error in found.items()
    }
    return max(errors.items(), key=lambda pair: or_infinite(pair[1]))


def or_infinite(error: float) -> float:
    """An error by which others are sorted: what is not a number is the worst."""
    return math.inf if math.isnan(error) else error


def _of_most(values: list[float], tolerance: float) -> float:
    """The value that most are close to; that of the first ones where there are as many of others."""
    return max(values, key=lambda value: sum(_close(each, value, tolerance) for each in values))


def _close(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * max(1.0, abs(expected))


def steps_to_half(losses: Sequence[float]) -> int | None:
    """After how many steps the loss is half of the first one, in the mean over all batches.

    Args:
        losses: Of all steps, which take the batches one after the other.

    Returns:
        None: these steps do not reach it.
    """
    ends = range(BATCHES, len(losses) + 1)
    reached = (end for end in ends if statistics.mean(losses[end - BATCHES : end]) <= losses[0] / 2)
    return next(reached, None)


def usual_probe(probes: Sequence[float]) -> float:
    """What the probe takes on the quiet machine: its fastest quarter ends there."""
    return statistics.quantiles(probes, n=4)[0] if len(probes) > 1 else probes[0]


def disturbances(
    foreign: float | None, probes: Sequence[float], usual: float, slowdowns: int = 0
) -> tuple[str, ...]:
    """Why a turn does not count.

    Args:
        foreign: The share of its cores' time that other processes had.
        probes: Milliseconds of the probes before and after it.
        usual: Milliseconds of the probe on the quiet machine.
        slowdowns: How often heat slowed a processor down meanwhile.
    """
    reasons = []
    if foreign is not None and foreign > FOREIGN_LIMIT:
        reasons.append(f"other processes had {100 * foreign:.0f} % of its cores")
    slow = max(probes) / usual - 1
    if slow > PROBE_LIMIT:
        reasons.append(f"the probe took {100 * slow:.0f} % longer than usual")
    if slowdowns:
        reasons.append("heat slowed a processor down")
    return tuple(reasons)


def marked(turns: Sequence[Turn]) -> int:
    """How many were disturbed."""
    return sum(bool(turn.reasons) for turn in turns)
