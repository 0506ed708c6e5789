"""What every contestant gets: a network's weights and the batches of its steps, drawn once."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carme_runtime.compare import designs
from carme_runtime.compare.images import DATA
from carme_runtime.compare.networks import NETWORKS, Network, draw
from carme_runtime.compare.reference import gradients, loss

if TYPE_CHECKING:
    import numpy as np

BATCHES = 8  # steps take one after the other
MOMENTUM = 0.9  # of SGD
#: Noise of all pixels, whose values are from 0 to 1. Equal pixels make equal values, at which a maximum or a
#: ReLU has no gradient: it would depend on how a framework rounds.
_DITHER = 0.01
_BRIGHT = 0.5  # from which on a pixel is of an object


@dataclass(frozen=True)
class Task:
    """Args:
    network: What is trained.
    weights: At the beginning, by name.
    inputs: (batches, samples of a batch over all ranks, ...).
    targets: (batches, samples), or (batches, samples, height, width) where each pixel has one.
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

    def first_gradients(self, ranks: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """What the first step's gradients must be: the means of the ranks'.

        Returns:
            The gradients by the weights' names, and how far from them (Euclidean norm) others may be because
            rounding decides on which side of a ReLU's or a maximum's kink a value is.
        """
        import numpy as np

        total = {name: np.zeros(value.shape) for name, value in self.weights.items()}
        apart = {name: np.zeros(value.shape) for name, value in self.weights.items()}
        for rank in range(ranks):
            x, y = self.share(rank, ranks)
            first, second = gradients(self.network, self.weights, x[0], y[0])
            for name, value in first.items():
                total[name] += value / ranks
                apart[name] += (value - second[name]) / ranks
        # Some of the values on kinks are on one side and some on the other. What these change may be more
        # than what all change together.
        return total, {name: 2 * float(np.linalg.norm(value)) for name, value in apart.items()}


def network_for(
    name: str, data: str = "digits", side: int | None = None, width: float | None = None
) -> Network:
    """A network as it takes the images of a set.

    Args:
        name: Of the network.
        data: Name of the set.
        side: Of the images in pixels; None: the set's own, or the network's.
        width: By which its channels are multiplied; None: its own.

    Raises:
        CompareError: It cannot take images of this side.
    """
    images = DATA[data]
    return NETWORKS[name].sized(side or images.side, images.channels, images.classes, width)


def make(network: Network, batch: int, seed: int, data: str = "digits") -> Task:
    """Draw weights and batches.

    Args:
        network: As `network_for` returns it for these images.
        batch: Samples of a step over all ranks.
        seed: Of all that is drawn.
        data: Name of the set of images.

    Raises:
        CompareError: The images are not on this machine.
    """
    import numpy as np

    random = np.random.default_rng([seed, zlib.crc32(network.name.encode())])
    weights = draw(network, random)
    images = DATA[data].draw(random, network.side)
    chosen = random.integers(len(images.values), size=(BATCHES, batch))
    batches = images.values[chosen]
    batches += _DITHER * random.standard_normal(batches.shape)
    batches = batches.astype(np.float32)
    targets = batches.mean(axis=-1) > _BRIGHT if network.judges_pixels else images.classes[chosen]
    return Task(network, weights, _shaped(batches, network), targets.astype(np.int64), images.title)


def _shaped(images: np.ndarray, network: Network) -> np.ndarray:
    """Images as a network takes samples."""
    import numpy as np

    head, side, channels = images.shape[:2], images.shape[2], images.shape[-1]
    if network.sample == "image":
        return images
    if network.sample == "flat":
        return images.reshape(*head, -1)
    # Pieces, and where they are.
    count = designs.pieces_of(side)
    size = side // count
    pieces = images.reshape(*head, count, size, count, size, channels).swapaxes(3, 4)
    pieces = pieces.reshape(*head, count * count, -1)
    places = np.arange(count * count)[:, None] * np.array([1.0, 1.0, 0.25, 0.25])
    where = np.sin(places + np.array([0, np.pi / 2, 0, np.pi / 2]))
    where = np.broadcast_to(where.astype(np.float32), (*head, *where.shape))
    return np.concatenate([pieces, where], axis=-1)


def write(task: Task, file: Path) -> None:
    """For the ranks."""
    import numpy as np

    named: dict[str, Any] = {f"weight {name}": value for name, value in task.weights.items()}
    network = task.network
    header = {"name": network.name, "data": task.data, "side": network.side, "width": network.width}
    header |= {"channels": network.channels, "classes": network.classes}
    np.savez(file, about=np.array(json.dumps(header)), inputs=task.inputs, targets=task.targets, **named)


def read(file: Path) -> Task:
    """What `write` wrote."""
    import numpy as np

    with np.load(file) as found:
        header: dict[str, Any] = json.loads(str(found["about"]))
        name, data = header.pop("name"), header.pop("data")
        weights = {key[7:]: found[key] for key in found.files if key.startswith("weight ")}
        return Task(NETWORKS[name].sized(**header), weights, found["inputs"], found["targets"], data)


def write_gradients(gradients: dict[str, np.ndarray], kinks: dict[str, float], file: Path) -> None:
    """For the ranks, which compare theirs: what `first_gradients` returned, in the precision of theirs."""
    import numpy as np

    named: dict[str, Any] = {name: value.astype(np.float32) for name, value in gradients.items()}
    np.savez(file, kinks=np.array(json.dumps(kinks)), **named)
