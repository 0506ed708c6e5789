"""The images that all contestants train with: one entry of `DATA` each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carme_runtime.compare.errors import CompareError

if TYPE_CHECKING:
    import numpy as np

_SYNTHETIC = 64  # images of ImageNet's shape: more would not train otherwise, and fill the memory
_NOISE = 0.3


@dataclass(frozen=True)
class Images:
    """Some images.

    Args:
        values: (images, side, side, channels), from 0 to 1.
        classes: (images,).
        title: Where they are from.
    """

    values: np.ndarray
    classes: np.ndarray
    title: str


@dataclass(frozen=True)
class Data:
    """A set of images.

    Args:
        name: What options and results call it.
        draw: Makes the images, of a side in pixels, with NumPy's generator.
        channels: Of an image.
        classes: Of images.
        side: Of an image, in pixels; None: what the network likes.
    """

    name: str
    draw: Callable[[Any, int], Images]
    channels: int
    classes: int
    side: int | None = None


def _digits(random: Any, side: int) -> Images:
    """Those of scikit-learn where that is installed, else synthetic ones."""
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        images, classes = _patterns(random, 1797, 8, 1, 10)
        return Images(_resized(images, side), classes, "synthetic images of 8x8")
    digits: Any = load_digits()
    return Images(_resized(digits.images[..., None] / 16, side), digits.target, "the digits of scikit-learn")


def _faces(random: Any, side: int) -> Images:
    """Those that scikit-learn has fetched to this machine before: no package has them inside."""
    try:
        from sklearn.datasets import fetch_olivetti_faces  # pyright: ignore[reportMissingImports]

        faces: Any = fetch_olivetti_faces(download_if_missing=False)
    except (ImportError, OSError):
        raise CompareError(
            "The faces of scikit-learn are not on this machine.",
            "Fetch them once with sklearn.datasets.fetch_olivetti_faces(), or use --data digits.",
        ) from None
    return Images(_resized(faces.images[..., None], side), faces.target, "the Olivetti faces of scikit-learn")


def _imagenet(random: Any, side: int) -> Images:
    """Synthetic ones of ImageNet's shape."""
    images, classes = _patterns(random, _SYNTHETIC, side, 3, 1000)
    return Images(images, classes, "synthetic images of ImageNet's shape")


def _patterns(random: Any, count: int, side: int, channels: int, classes: int) -> tuple[Any, Any]:
    """A pattern for each class, under noise."""
    patterns = random.random((classes, 8, 8, channels))
    chosen = random.integers(classes, size=count)
    clean = _resized(patterns[chosen], side)
    return (clean + _NOISE * random.standard_normal(clean.shape)).clip(0, 1), chosen


def _resized(images: Any, side: int) -> Any:
    """By repeating pixels, or leaving some out."""
    import numpy as np

    chosen = np.arange(side) * images.shape[1] // side
    return images[:, chosen][:, :, chosen]


DATA = {
    each.name: each
    for each in (
        Data("digits", _digits, channels=1, classes=10),
        Data("faces", _faces, channels=1, classes=40, side=64),
        Data("imagenet", _imagenet, channels=3, classes=1000, side=224),
    )
}
