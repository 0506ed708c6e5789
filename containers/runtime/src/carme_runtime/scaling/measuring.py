"""What a probe measures when it has a step's calls: times by batch, gradients, layers, memory, and input."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from carme_runtime.graph import Operator, Timing
from carme_runtime.pipeline.memory import memory_of_rank
from carme_runtime.scaling.ending import lacks_memory
from carme_runtime.scaling.errors import ScalingError
from carme_runtime.scaling.profiles import MOST_FILLED, Gradient, Input, Memory
from carme_runtime.scaling.replay import Repeated, Replay, mapped
from carme_runtime.scaling.sampling import batches, draws_another, timings

_ROUNDS, _LEAST_ROUNDS = 25, 3
_LAYERS, _LAYER_ROUNDS = 40, 3
_FEWEST_BATCHES = 2  # that a loader delivers, where they do not take too long
_ZERO_BLOCK = 256  # bytes: as zeros.hpp of the core

Passes = Mapping[int, Sequence[tuple[float, float]]]  # milliseconds of forward and backward, by samples


def measured(
    repeated: Repeated, batch: int, seconds: float
) -> tuple[tuple[Timing, ...], tuple[Gradient, ...], Passes]:
    """Passes by batch, the gradients, and each pass. Sizes take turns in an order drawn anew for each round.

    Raises:
        ScalingError: The calls cannot be made again, or there is too little memory for it.
    """
    if not repeated.parameters or batch < 1:
        raise ScalingError(
            "No call of a model with parameters and a batch of tensors was seen.",
            "Let the script call a torch.nn.Module, or a Keras model, in each step.",
        )
    first_run(repeated, batch)
    end = time.monotonic() + seconds
    sizes = [batch]
    for size in reversed(batches(batch)[:-1]):
        # A compiled model may be compiled anew for each, which may take longer than all of the measuring.
        if time.monotonic() > end:
            break
        if _takes(repeated, size):
            sizes.insert(0, size)
    runs: dict[int, list[Replay]] = {size: [] for size in sizes}
    order = list(sizes)
    for turn in range(_ROUNDS):
        random.Random(turn).shuffle(order)
        for size in order:
            runs[size].append(repeated.run(size))
        if turn + 1 >= _LEAST_ROUNDS and time.monotonic() >= end:
            break
    passes = {size: [(run.forward, run.backward) for run in replays] for size, replays in runs.items()}
    return timings(passes), _gradients(repeated, runs, _filled(repeated, sizes)), passes


def _takes(repeated: Repeated, samples: int) -> bool:
    """Whether the model takes so small a batch. BatchNorm, for one, does not train with a single sample."""
    try:
        repeated.run(samples)
    except Exception:  # whatever a model makes of a batch that it does not expect
        return False
    return True


def first_run(repeated: Repeated, batch: int) -> None:
    """Make the step again, as a test. Raises ScalingError where that cannot be done."""
    try:
        repeated.run(batch)
        repeated.run(batch)
    except Exception as error:
        if lacks_memory(error):
            raise ScalingError(
                "There is too little memory to measure beside the script.", "Use a smaller batch."
            ) from None
        raise ScalingError(
            f"A step of the model cannot be made again ({str(error).splitlines()[0][:200]}).",
            "Let the model take the same arguments twice.",
        ) from None


def _filled(repeated: Repeated, sizes: Sequence[int]) -> dict[int, list[float]]:
    """The part of each gradient that travels between nodes, by the parameter's identity, for each size.

    All of it where too little memory is left to look at it.
    """
    found: dict[int, list[float]] = {}
    for size in sorted(sizes):
        try:
            repeated.run(size)
            parts = [filled_part(parameter.grad) for parameter in repeated.parameters]
        except Exception as error:
            if not lacks_memory(error):
                raise
            parts = [1.0] * len(repeated.parameters)
        for parameter, part in zip(repeated.parameters, parts, strict=True):
            found.setdefault(id(parameter), []).append(part)
    return found


def filled_part(gradient: torch.Tensor | None) -> float:
    """The part of a gradient that the core sends: without blocks of zeros, if these are a quarter or more."""
    if gradient is None or gradient.layout != torch.strided:
        return 1.0
    flat = gradient.detach().reshape(-1)
    each = max(_ZERO_BLOCK // gradient.element_size(), 1)
    blocks = len(flat) // each
    if not blocks:
        return 1.0
    part = float(flat[: blocks * each].view(blocks, each).ne(0).any(1).float().mean())
    return part if part <= MOST_FILLED else 1.0


def _gradients(
    repeated: Repeated, runs: dict[int, list[Replay]], filled: dict[int, list[float]]
) -> tuple[Gradient, ...]:
    names, gradients = repeated.names(), []
    for parameter in repeated.parameters:
        key = id(parameter)
        if not any(key in run.ready for replays in runs.values() for run in replays):
            continue  # no gradient comes to it
        ready = tuple(
            min(
                statistics.median(
                    run.ready.get(key, run.backward) / max(run.backward, 1e-9) for run in runs[s]
                ),
                1.0,
            )
            for s in sorted(runs)
        )
        size = parameter.numel() * parameter.element_size()
        parts = tuple(filled[key]) if min(filled[key]) < 1 else ()
        gradients.append(Gradient(names.get(key, "parameter"), size, ready, parts))
    return tuple(gradients)


def layers(repeated: Repeated, sizes: Sequence[int]) -> tuple[Operator, ...]:
    """The layers that take the longest, with their forward pass by batch; none where they cannot be seen."""
    found: dict[str, dict[int, list[float]]] = {}
    kinds: dict[str, str] = {}
    for _ in range(_LAYER_ROUNDS):
        for size in (sizes[0], sizes[-1]):
            for name, (kind, took) in repeated.layer_times(size).items():
                kinds[name] = kind
                found.setdefault(name, {}).setdefault(size, []).append(took)
    operators = []
    for name, by_size in found.items():
        rows = tuple(Timing(size, statistics.median(by_size[size]), 0.0) for size in sorted(by_size))
        if len(rows) == 2:
            operators.append(Operator(name, kinds[name], name, (), (), timings=rows))
    operators.sort(key=lambda operator: -operator.timings[-1].forward_ms)
    return tuple(operators[:_LAYERS])


def memory(repeated: Repeated, sizes: Sequence[int], state: Iterable[Any]) -> Memory:
    """What one rank needs. `state`: tensors of the optimizer."""
    parameters = sum(p.numel() * p.element_size() for p in repeated.parameters)
    saved = sum(t.numel() * t.element_size() for t in state if isinstance(t, torch.Tensor))
    low, high = repeated.held_bytes(sizes[0]), repeated.held_bytes(sizes[-1])
    each = (high - low) // (sizes[-1] - sizes[0]) if len(sizes) > 1 else high // sizes[0]
    if repeated.device.type == "cuda":
        limit = torch.cuda.get_device_properties(repeated.device).total_memory
    else:
        limit = memory_of_rank() or 0
    return Memory(2 * parameters + saved, max(each, 0), limit)


def input_of(loader: Any, seconds: float) -> Input:
    """How fast a loader delivers by itself."""
    workers = int(getattr(loader, "num_workers", 0) or 0)
    ahead = workers * int(getattr(loader, "prefetch_factor", None) or 2)
    counts: list[tuple[float, int]] = [(time.perf_counter(), 0)]
    for batch in loader:
        counts.append((time.perf_counter(), length(batch)))
        spent, last = counts[-1][0] - counts[0][0], counts[-1][0] - counts[-2][0]
        if not draws_another(len(counts) - 1, _FEWEST_BATCHES, spent, last, seconds):
            break
    # What was loaded while workers started says nothing of their rate.
    begin = min(1 + ahead, len(counts) - 2) if workers else 0
    if begin < 0 or len(counts) < 2:
        return Input()
    took = counts[-1][0] - counts[begin][0]
    samples = sum(count for _, count in counts[begin + 1 :])
    return Input(samples / took if took > 0 else 0.0, workers)


def length(data: Any) -> int:
    """The first dimension of the first tensor of a batch."""
    found: list[int] = []
    mapped(data, lambda tensor: found.append(len(tensor) if tensor.ndim else 1))
    return found[0] if found else 0


def device_name(device: torch.device) -> str:
    """For people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads > 1)}"
