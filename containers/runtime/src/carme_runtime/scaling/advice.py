"""Advice in a notebook: measure a model there, and draw its curve."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from carme_runtime.scaling.errors import ScalingError
from carme_runtime.scaling.measuring import first_run
from carme_runtime.scaling.profiles import Profile
from carme_runtime.scaling.replay import Call, Repeated, Result, tensors
from carme_runtime.scaling.sampling import MOST, WATCHING, Step, links_of
from carme_runtime.scaling.shown import Advice
from carme_runtime.scaling.watching import profile_of

_FEWEST = 5  # steps, however long they take


def advise(
    model: nn.Module,
    loader: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    network: str | None = None,
    ranks_per_node: int = 1,
    upto: int = 64,
    seconds: float = 30.0,
) -> Advice:
    """Measure a model with the batches of a loader, and predict how fast it trains on more ranks.

        scaling.advise(model, loader, loss=torch.nn.functional.cross_entropy, network="100 Gbit/s, 2 us")

    The model stays as it is. The step of the optimizer is not measured; `carme-run --scale-probe` does that.

    Args:
        model: In training, on its device.
        loader: A DataLoader, or other batches such as (inputs, targets); the model is called with the first
            element of each.
        loss: Called with the model's result and the rest of a batch. Default: a sum over the result.
        network: The links between nodes. Default: those of the file that CARME_LINKS names, else 10 Gbit/s.
        ranks_per_node: How many ranks share a node, as a rule one for each GPU.
        upto: The largest number of ranks to predict for.
        seconds: About how long to measure.

    Returns:
        The prediction: a notebook shows its curve and its table, a terminal the table.

    Raises:
        ScalingError: No batch comes, the model cannot be run with it, or the network cannot be read.
    """
    batch = next(iter(loader), None)
    if batch is None:
        raise ScalingError("The loader has no batch.", "Give one with at least one batch.")
    profile = measure(model, batch, loss, loader=loader, network=network, seconds=seconds)
    return Advice.of(profile, ranks_per_node, upto)


def measure(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    loader: Any = None,
    network: str | None = None,
    seconds: float = 30.0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Profile:
    """The profile of a model with one batch. Raises what `advise` does.

    With an optimizer, its steps are measured, too, and the model is trained by some of them.
    """
    links = links_of(network)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    moved = [tensor.to(device) for tensor in tensors(batch)]
    if not moved or not moved[0].ndim:
        raise ScalingError("A batch of the loader holds no tensor.", "Let it hold the model's inputs first.")
    calls = [Call(model, model, (moved[0],), {})]
    if loss is not None:
        calls.append(Call(_Loss(), loss, (Result(0, 0), *moved[1:]), {}))
    repeated = Repeated(calls, len(moved[0]))
    with repeated.preserved():
        first_run(repeated, len(moved[0]))
        steps = _steps(repeated, len(moved[0]), optimizer, WATCHING * seconds)
        state = [value for saved in optimizer.state.values() for value in saved.values()] if optimizer else []
        return profile_of(repeated, steps, links=links, loader=loader, state=state, seconds=seconds)


class _Loss(nn.Module):
    """Stands for a loss, which has no parameters."""


def _steps(
    repeated: Repeated, batch: int, optimizer: torch.optim.Optimizer | None, seconds: float
) -> list[Step]:
    """As many as the time is for: how much they differ is known by several alone."""
    steps: list[Step] = []
    end = time.monotonic() + seconds
    while len(steps) < _FEWEST or (len(steps) < MOST and time.monotonic() < end):
        steps.append(_step(repeated, batch, optimizer))
    return steps


def _step(repeated: Repeated, batch: int, optimizer: torch.optim.Optimizer | None) -> Step:
    run = repeated.run(batch)
    if optimizer is None:
        return Step((run.forward + run.backward) / 1000, 0.0, run.forward / 1000, run.backward / 1000, batch)
    repeated.clock.finish()
    stepping = time.perf_counter()
    optimizer.step()
    repeated.clock.finish()
    whole = (run.forward + run.backward) / 1000 + time.perf_counter() - stepping
    return Step(whole, 0.0, run.forward / 1000, run.backward / 1000, batch)
