"""What was predicted, beside what came."""

from carme.scaling.predictions import Prediction

__all__ = ["outcome_text", "prediction_text"]


def prediction_text(prediction: Prediction) -> str:
    """A prediction in one line."""
    return (
        f"{prediction.step_ms:.3g} ms for a step ({prediction.low_ms:.3g} to {prediction.high_ms:.3g}), "
        f"{prediction.speedup:.1f} times as fast as one rank, efficiency {prediction.efficiency:.0%}"
    )


def outcome_text(prediction: Prediction, step_seconds: float | None) -> str:
    """What was measured, against what was predicted.

    Args:
        step_seconds: The mean time of a step of the job, in seconds; None: nobody measured it.
    """
    if step_seconds is None or step_seconds <= 0:
        return "not measured: no rank reported its steps"
    measured = step_seconds * 1000
    apart = measured / prediction.step_ms - 1
    words = "as predicted" if abs(apart) < 0.005 else f"{abs(apart):.0%} {'more' if apart > 0 else 'less'}"
    inside = "inside" if prediction.low_ms <= measured <= prediction.high_ms else "outside"
    return f"{measured:.3g} ms for a step, {words}, {inside} the 80 % interval"
