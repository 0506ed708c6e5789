"""Rank 0's parameters travel to the stages that need them, at once or while the first forward pass runs.

The method is that of S-Caffe (Awan et al., PPoPP 2017); see `streaming`.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from carme_runtime.collectives import Group
from carme_runtime.torch.arrivals import Arrivals
from carme_runtime.torch.pipeline_run import Run
from carme_runtime.torch.traced import Traced


def send_parameters(
    traced: Traced, owners: Mapping[str, Sequence[int]], stages: int, run: Run
) -> tuple[Arrivals, list[Group]]:
    """Begin to give rank 0's parameters to the ranks that hold them, in the order of the model.

    Args:
        traced: The model, with all its parameters.
        owners: By name of a parameter: the stages that hold it.
        stages: Of one replica.
        run: The ranks, which call this together.

    Returns:
        What waits for them, and the groups that carry them, which must be kept until then.
    """
    arrivals = Arrivals(traced.model)
    parameters = dict(traced.model.named_parameters())
    groups: dict[tuple[int, ...], Group | None] = {}
    for holders in sorted({tuple(owners[name]) for name in parameters}):
        theirs = {first + stage for first in range(0, run.size, stages) for stage in holders}
        groups[holders] = run.group(sorted({0, *theirs}))
    for name, parameter in parameters.items():
        group = groups[tuple(owners[name])]
        if group is None or not parameter.numel():
            continue
        content = _contiguous(parameter.detach())
        sent = group.broadcast(content.view(-1).view(torch.uint8), 0, timeout=run.timeout, asynchronous=True)
        assert sent
        if run.rank == 0:
            arrivals.leave(sent.wait)
        else:
            arrivals.travel([parameter], _arrival(sent.wait, parameter, content))
    return arrivals, [group for group in groups.values() if group]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy in host memory with its elements in order."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _arrival(sent: Callable[[], Any], parameter: torch.Tensor, content: torch.Tensor) -> Callable[[], None]:
    def wait() -> None:
        sent()
        if content.data_ptr() != parameter.data_ptr():
            with torch.no_grad():
                parameter.copy_(content)

    return wait
