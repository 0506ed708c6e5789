"""What was predicted, beside what came."""

from carme.scaling.predictions import Prediction
from carme.translation import message as _
from carme.wording import percent

__all__ = ["outcome_text", "prediction_text"]

#: What differs less from a prediction is as predicted.
SAME = 0.005


def prediction_text(prediction: Prediction) -> str:
    """A prediction in one line, for `translated`."""
    text = _(
        "{step:.3g} ms for a step ({low:.3g} to {high:.3g}), {speedup:.1f} times as fast as one rank, "
        "efficiency {efficiency}",
        step=prediction.step_ms,
        low=prediction.low_ms,
        high=prediction.high_ms,
        speedup=prediction.speedup,
        efficiency=percent(prediction.efficiency),
    )
    if prediction.extrapolated:
        return _("{prediction}, extrapolated beyond what was measured", prediction=text)
    return text


def outcome_text(prediction: Prediction, step_seconds: float | None) -> str:
    """What was measured, against what was predicted, for `translated`.

    Args:
        step_seconds: The mean time of a step of the job, in seconds; None: nobody measured it.
    """
    if step_seconds is None or step_seconds <= 0:
        return _("not measured: no rank reported its steps")
    measured = step_seconds * 1000
    apart = measured / prediction.step_ms - 1
    if abs(apart) < SAME:
        words = _("as predicted")
    elif apart > 0:
        words = _("{share} more", share=percent(apart))
    else:
        words = _("{share} less", share=percent(-apart))
    if prediction.low_ms <= measured <= prediction.high_ms:
        return _("{ms:.3g} ms for a step, {words}, inside the 80 % interval", ms=measured, words=words)
    return _("{ms:.3g} ms for a step, {words}, outside the 80 % interval", ms=measured, words=words)
