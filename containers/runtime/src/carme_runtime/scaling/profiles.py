"""What a probe measured of one rank's training step, as a file with a version.

Times by batch, and those of layers, are the rows of the cost table of `carme_runtime.graph`; so are links.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from carme_runtime import fusion
from carme_runtime.graph import Links, Operator, Timing
from carme_runtime.graph.files import typed
from carme_runtime.graph.model import on_line
from carme_runtime.scaling.errors import ScalingError

#: Of files that are read. The second is written where gradients have `filled`, and the third where there is
#: a `drift`: earlier ones lack them.
VERSIONS = (2, 3, 4)
#: The filled part of a gradient above which the core sends all of it, as `zeros.hpp` has it.
MOST_FILLED = 0.75
#: Of a probe, whose middles show by how much the machine drifts.
DRIFT_PARTS = 4
_FORMAT = "carme scaling"
_AGAIN = "Measure again: carme-run -n 1 --scale-probe train.py"


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Args:
        name: Of the parameter.
        bytes: Of the gradient.
        ready: The share of the backward pass after which it is complete, for each of the profile's timings.
        filled: The part of it that travels between nodes, for each of them, as blocks that are zero do not:
            in a batch there are a few rows of an embedding. Empty: all of it.
    """

    name: str
    bytes: int
    ready: tuple[float, ...]
    filled: tuple[float, ...] = ()


@dataclass(frozen=True)
class Input:
    """The input pipeline of one rank.

    Args:
        samples_per_s: How fast it delivers while nothing else runs; 0: nobody measured it.
        workers: Its processes. With none the training waits for each batch.
    """

    samples_per_s: float = 0.0
    workers: int = 0


@dataclass(frozen=True)
class Memory:
    """The memory of one rank.

    Args:
        fixed_bytes: Parameters, gradients, and the optimizer's state.
        bytes_per_sample: What the backward pass needs of each sample.
        limit_bytes: What the rank may take; 0: unknown.
    """

    fixed_bytes: int = 0
    bytes_per_sample: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True)
class Profile:
    """A training step of one rank.

    Args:
        model: The class of the model.
        device: On which it was measured.
        batch: Samples of a step of the script.
        timings: Forward and backward pass, by samples, growing.
        fixed_ms: What a step takes besides and whatever the batch: the optimizer above all.
        gradients: In the order of the parameters.
        spread: The relative standard deviation of the step.
        input: Of this rank.
        memory: Of this rank.
        layers: Of the model, with the time of their forward pass by samples, where these differ.
        links: Between nodes.
        drift: The relative standard deviation of the middle step between parts of the probe; 0: unknown.
    """

    model: str
    device: str
    batch: int
    timings: tuple[Timing, ...]
    fixed_ms: float
    gradients: tuple[Gradient, ...]
    spread: float = 0.0
    input: Input = field(default_factory=Input)
    memory: Memory = field(default_factory=Memory)
    layers: tuple[Operator, ...] = ()
    links: Links = field(default_factory=Links)
    drift: float = 0.0

    def __post_init__(self) -> None:
        sizes = [timing.samples for timing in self.timings]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or self.batch < 1:
            raise ValueError("its batches are none, or do not grow")
        times = [self.fixed_ms, *(t for each in self.timings for t in (each.forward_ms, each.backward_ms))]
        if not all(0 <= time < float("inf") for time in times) or not self.forward_ms(self.batch) > 0:
            raise ValueError("its times are not above 0")
        if not all(0 <= deviation < float("inf") for deviation in (self.spread, self.drift)):
            raise ValueError("its deviations are not 0 or more")
        if any(
            len(gradient.ready) != len(sizes)
            or len(gradient.filled) not in (0, len(sizes))
            or not all(0 <= part <= 1 for part in gradient.filled)
            or gradient.bytes < 0
            for gradient in self.gradients
        ):
            raise ValueError("its gradients do not belong to its batches")

    def forward_ms(self, samples: float) -> float:
        """The forward pass, between measured batches on a straight line."""
        return on_line([(t.samples, t.forward_ms) for t in self.timings], samples)

    def backward_ms(self, samples: float) -> float:
        """The backward pass."""
        return on_line([(t.samples, t.backward_ms) for t in self.timings], samples)

    def ready(self, gradient: Gradient, samples: float) -> float:
        """The share of the backward pass after which a gradient is complete."""
        return self._between(gradient.ready, samples)

    def filled(self, gradient: Gradient, samples: float) -> float:
        """The part of a gradient that travels between nodes."""
        return self._between(gradient.filled, samples) if gradient.filled else 1.0

    def _between(self, shares: tuple[float, ...], samples: float) -> float:
        points = list(zip((t.samples for t in self.timings), shares, strict=True))
        first, last = points[0][0], points[-1][0]
        if len(points) == 1:
            return shares[0]
        return min(on_line(points, min(max(samples, first), last)), 1.0)

    @cached_property
    def near_buckets(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Bytes and numbers of gradients that ranks of one node reduce together, as `parallelize` has it."""
        return self._buckets(fusion.threshold(fusion.BUCKET_BYTES), None)

    @cached_property
    def far_buckets(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same for ranks of several nodes."""
        return self._buckets(fusion.threshold(fusion.SMALL_BUCKET_BYTES), fusion.LEAST_BUCKET_BYTES)

    @cached_property
    def full_buckets(self) -> dict[tuple[float, bool], list[tuple[int, float]]]:
        """What `simulation.buckets` has found, by the batch and whether all ranks are of one node."""
        return {}

    @cached_property
    def filled_buckets(self) -> dict[tuple[float, int], list[float]]:
        """The parts of buckets that travel between nodes, by batch and ranks that are summed."""
        return {}

    def _buckets(self, limit: int, least: int | None) -> tuple[tuple[int, tuple[int, ...]], ...]:
        sizes = [gradient.bytes for gradient in reversed(self.gradients)]
        last = len(sizes) - 1
        buckets = fusion.fill(sizes, [""] * len(sizes), limit, limit if least is None else least)
        return tuple((sum(sizes[n] for n in each), tuple(last - n for n in each)) for each in buckets)

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def has_late_gradients(self) -> bool:
        """Whether all are taken to be complete at the end of the backward pass."""
        moments = [moment for gradient in self.gradients for moment in gradient.ready]
        return len(self.gradients) > 1 and min(moments) >= 1

    @property
    def skinny_layers(self) -> list[tuple[str, float]]:
        """Layers, and how much more a sample costs in the smallest measured batch than in the largest."""
        found = []
        for layer in self.layers:
            low, high = layer.timings[0], layer.timings[-1]
            if high.forward_ms > 0 and low.samples < high.samples:
                factor = (low.forward_ms / low.samples) / (high.forward_ms / high.samples)
                found.append((layer.name, factor))
        return sorted(found, key=lambda each: -each[1])


def to_dict(profile: Profile) -> dict[str, Any]:
    """A profile as a file holds it, of the earlier version where that can: older runtimes read no other."""
    content, version = dataclasses.asdict(profile), VERSIONS[0]
    for gradient in content["gradients"]:
        if min(gradient["filled"], default=1.0) < 1:
            version = VERSIONS[1]
        else:
            del gradient["filled"]
    if profile.drift:
        version = VERSIONS[2]
    else:
        del content["drift"]
    for layer in content["layers"]:
        for each in dataclasses.fields(Operator):
            if layer[each.name] == each.default:
                del layer[each.name]
    return {"format": _FORMAT, "version": version, **content}


def load(file: Path | str) -> Profile:
    """Read a profile from a file. Raises ScalingError."""
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not JSON"
        raise ScalingError(f"{file} cannot be read ({reason}).", "Name a file that a probe wrote.") from None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT or "version" not in content:
        raise ScalingError(f"{file} holds no result of a probe.", "Name a file that a probe wrote.")
    version = content.pop("version")
    if version not in VERSIONS:
        raise ScalingError(
            f"{file} holds a result of version {version}, and this carme_runtime reads versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}.",
            _AGAIN,
        )
    content.pop("curve", None)  # is made from the rest
    try:
        return typed(Profile, content)
    except (TypeError, ValueError, KeyError) as error:
        raise ScalingError(f"{file} holds a damaged result ({error}).", _AGAIN) from None
