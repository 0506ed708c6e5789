"""Losses that are not plain means over samples, made to add up over ranks."""

from collections.abc import Callable
from typing import Any

from carme_runtime.keras.library import keras

SAMPLES, NOTHING, WEIGHTS = range(3)


class GlobalLoss:
    """A loss on a share, such that the ranks' mean, weighted by samples, is the whole batch's loss.

    For the mean over samples that holds anyway. A sum grows with the share, and means over what a mask or
    weights select have their own denominators, which the ranks add up.

    Args:
        loss: Keras' own, or a function.
        factor: What makes it so, from its denominator, the sum of its weights, and itself.
    """

    def __init__(self, loss: Any, factor: Callable[[Any, Any, Any], Any]) -> None:
        self.loss, self._factor = loss, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self.loss(y_true, y_pred, sample_weight)
        kind, weight = denominator(self.loss, y_pred, sample_weight)
        return value if kind == SAMPLES else value * self._factor(kind, weight, value)


def denominator(loss: Any, y_pred: Any, sample_weight: Any) -> tuple[int, Any]:
    """By what a loss is divided: SAMPLES, NOTHING, or WEIGHTS, whose sum is given too."""
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction == "sum":
        return NOTHING, None
    mask = getattr(y_pred, "_keras_mask", None)
    weights = sample_weight if reduction == "mean_with_sample_weight" else None
    if reduction in (None, "none") or (mask is None and weights is None):
        return SAMPLES, None
    return WEIGHTS, _selected(mask, weights)


def _selected(mask: Any, weights: Any) -> Any:
    """The sum of the weights that the mask lets through."""
    if mask is None or weights is None:
        return keras.ops.sum(keras.ops.cast(weights if mask is None else mask, "float32"))
    mask, weights = keras.ops.cast(mask, "float32"), keras.ops.cast(weights, "float32")
    while len(weights.shape) < len(mask.shape):
        weights = keras.ops.expand_dims(weights, -1)
    return keras.ops.sum(mask * weights)
