"""Losses that are not plain means over samples, made to add up over ranks."""

from collections.abc import Callable
from typing import Any

from carme_runtime.keras.library import keras

SAMPLES, UNDIVIDED, WEIGHTS = range(3)


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
        kind, weight = denominator(self.loss, y_true, y_pred, sample_weight)
        return value if kind == SAMPLES else value * self._factor(kind, weight, value)


class CountedLoss(GlobalLoss):
    """A loss on a micro-batch, whose part of the whole batch's denominator is counted before.

    Args:
        loss: Keras' own, or a function.
        part: What a micro-batch is of the whole batch, by samples; 0: it does not count.
    """

    def __init__(self, loss: Any, part: Callable[[], float]) -> None:
        super().__init__(loss, self._scale)
        self._part = part
        self.counting = False
        self.counted = 0.0  # the last time
        self.whole: float | None = None  # None: a micro-batch is the whole batch

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not self.counting:
            return super().__call__(y_true, y_pred, sample_weight)
        kind, weight = denominator(self.loss, y_true, y_pred, sample_weight)
        self.counted = float(weight) if kind == WEIGHTS else 0.0
        return keras.ops.zeros(())

    def _scale(self, kind: int, weight: Any, value: Any) -> float:
        """See `GlobalLoss`."""
        part = self._part()
        if not part or kind == UNDIVIDED:
            return 1 / part if part else 0.0
        own = float(weight)
        return own / (own if self.whole is None else self.whole) / part if own else 0.0


def ignored_class(loss: Any) -> Any:
    """The class of targets that a loss does not count; None: there is none."""
    return getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))


def denominator(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[int, Any]:
    """By what a loss is divided: SAMPLES, UNDIVIDED, or WEIGHTS, whose sum is given too."""
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction == "sum":
        return UNDIVIDED, None
    mask = _with_classes(getattr(y_pred, "_keras_mask", None), ignored_class(loss), y_true)
    weights = sample_weight if reduction == "mean_with_sample_weight" else None
    if reduction in (None, "none") or (mask is None and weights is None):
        return SAMPLES, None
    return WEIGHTS, _selected(mask, weights)


def _with_classes(mask: Any, ignored: Any, y_true: Any) -> Any:
    """The mask of the outputs without targets that do not count."""
    if ignored is None:
        return mask
    counts = keras.ops.not_equal(y_true, ignored)
    if mask is None:
        return counts
    if len(counts.shape) > len(mask.shape):
        counts = keras.ops.squeeze(counts, -1)
    return keras.ops.logical_and(counts, mask)


def _selected(mask: Any, weights: Any) -> Any:
    """The sum of the weights that the mask lets through."""
    if mask is None or weights is None:
        return keras.ops.sum(keras.ops.cast(weights if mask is None else mask, "float32"))
    mask, weights = keras.ops.cast(mask, "float32"), keras.ops.cast(weights, "float32")
    while len(weights.shape) < len(mask.shape):
        weights = keras.ops.expand_dims(weights, -1)
    return keras.ops.sum(mask * weights)
