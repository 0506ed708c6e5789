"""What was predicted, beside what came."""

from carme.scaling.predictions import Prediction
from carme.translation import joined
from carme.translation import message as _

__all__ = ["outcome_text", "prediction_text"]

#: What differs less from a prediction is as predicted.
SAME = 0.005


def prediction_text(prediction: Prediction) -> str:
    """A prediction in one line, for `translated`."""
    return _(
        "{step} ms for a step ({low} to {high}), {times} times as fast as one rank, efficiency {share}",
        step=f"{prediction.step_ms:.3g}",
        low=f"{prediction.low_ms:.3g}",
        high=f"{prediction.high_ms:.3g}",
        times=f"{prediction.speedup:.1f}",
        share=f"{prediction.efficiency:.0%}",
    )


def outcome_text(prediction: Prediction, step_seconds: float | None) -> str:
    """What was measured, against what was predicted, for `translated`.

    Args:
        step_seconds: The mean time of a step of the job, in seconds; None: nobody measured it.
    """
    if step_seconds is None or step_seconds <= 0:
        return _("not measured: no rank reported its steps")
    measured = step_seconds * 1000
    apart = measured / prediction.step_ms - 1
    share = f"{abs(apart):.0%}"
    if abs(apart) < SAME:
        words = _("as predicted")
    else:
        words = _("{share} more", share=share) if apart > 0 else _("{share} less", share=share)
    inside = prediction.low_ms <= measured <= prediction.high_ms
    parts = [
        _("{step} ms for a step", step=f"{measured:.3g}"),
        words,
        _("inside the 80 % interval") if inside else _("outside the 80 % interval"),
    ]
    return joined(parts, ", ")
