"""What every contestant gets: a network's weights and the batches of its steps, drawn once."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carme_runtime.compare.networks import CLASSES, NETWORKS, Network, draw, loss

if TYPE_CHECKING:
    import numpy as np

BATCHES = 8  # of which steps take one after the other
MOMENTUM = 0.9  # of SGD


@dataclass(frozen=True)
class Task:
    """Args:
    network: What is trained.
    weights: At the beginning, by name.
    inputs: (batches, samples of a batch over all ranks, ...).
    targets: (batches, samples).
    data: Where the samples are from.
    """

    network: Network
    weights: dict[str, np.ndarray]
    inputs: np.ndarray
    targets: np.ndarray
    data: str

    @property
    def batch(self) -> int:
        """Samples of a step over all ranks."""
        return self.inputs.shape[1]

    def share(self, rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """What a rank has of all batches."""
        each = self.batch // ranks
        part = slice(rank * each, (rank + 1) * each)
        return self.inputs[:, part], self.targets[:, part]

    def first_loss(self, ranks: int) -> float:
        """What the first step's loss must be: the mean of the ranks' losses."""
        shares = [self.share(rank, ranks) for rank in range(ranks)]
        return sum(loss(self.network, self.weights, x[0], y[0]) for x, y in shares) / ranks


def make(network: Network, batch: int, seed: int) -> Task:
    """Draw weights and batches: digits of scikit-learn where that is installed, else synthetic images."""
    import numpy as np

    random = np.random.default_rng([seed, zlib.crc32(network.name.encode())])
    weights = draw(network, random)
    images, classes, data = _digits() or _synthetic(random)
    chosen = random.integers(len(images), size=(BATCHES, batch))
    inputs = _shaped(images[chosen], network.shape)
    return Task(network, weights, inputs.astype(np.float32), classes[chosen].astype(np.int64), data)


def _digits() -> tuple[Any, Any, str] | None:
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    digits: Any = load_digits()
    return digits.images / 16, digits.target, "the digits of scikit-learn"


def _synthetic(random: Any) -> tuple[Any, Any, str]:
    """A pattern for each class, under noise."""
    patterns = random.random((CLASSES, 8, 8))
    classes = random.integers(CLASSES, size=1797)
    noise = 0.3 * random.standard_normal((len(classes), 8, 8))
    return (patterns[classes] + noise).clip(0, 1), classes, "synthetic images of 8x8"


def _shaped(images: Any, shape: tuple[int, ...]) -> Any:
    """Images of 8x8 as a network takes samples."""
    import numpy as np

    head = images.shape[:2]
    if len(shape) == 3:  # larger ones
        factor = shape[0] // 8
        return images.repeat(factor, axis=2).repeat(factor, axis=3)[..., None]
    if len(shape) == 1:
        return images.reshape(*head, *shape)
    # Pieces of 2x2, and where they are.
    pieces = images.reshape(*head, 4, 2, 4, 2).swapaxes(3, 4).reshape(*head, 16, 4)
    places = np.arange(16)[:, None] * np.array([1.0, 1.0, 0.25, 0.25])
    where = np.sin(places + np.array([0, np.pi / 2, 0, np.pi / 2]))
    return np.concatenate([pieces, np.broadcast_to(where, (*head, 16, 4))], axis=-1)


def write(task: Task, file: Path) -> None:
    """For the ranks."""
    import numpy as np

    named: dict[str, Any] = {f"weight {name}": value for name, value in task.weights.items()}
    about = np.array([task.network.name, task.data])
    np.savez(file, about=about, inputs=task.inputs, targets=task.targets, **named)


def read(file: Path) -> Task:
    """What `write` wrote."""
    import numpy as np

    with np.load(file) as found:
        name, data = found["about"]
        weights = {key[7:]: found[key] for key in found.files if key.startswith("weight ")}
        return Task(NETWORKS[str(name)], weights, found["inputs"], found["targets"], str(data))
