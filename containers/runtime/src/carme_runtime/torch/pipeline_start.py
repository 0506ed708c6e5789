"""Rank 0's buffers and parameters travel to the stages: at once, parameters also while the first step runs.

The method is that of S-Caffe (Awan et al., PPoPP 2017); see `streaming`.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.arrivals import Arrivals
from carme_runtime.torch.pipeline_run import Run
from carme_runtime.torch.traced import Traced


def send_buffers(model: nn.Module, run: Run) -> None:
    """Give rank 0's buffers to all ranks, which call this together."""
    for buffer in model.buffers():
        if run.world_group and buffer.numel():
            _give(run.world_group, buffer, run)


def send_parameters(
    traced: Traced, owners: Mapping[str, Sequence[int]], stages: int, run: Run, arrivals: Arrivals | None
) -> list[Group]:
    """Give rank 0's parameters to the ranks that hold them, in the order of the model.

    Args:
        traced: The model, with all its parameters.
        owners: By name of a parameter: the stages that hold it.
        stages: Of one replica.
        run: The ranks, which call this together.
        arrivals: What waits for them while they travel; None: all are there when this returns, and of one at
            a time there is a copy in host memory.

    Returns:
        The groups of what travels, which must be kept until then.
    """
    parameters = dict(traced.model.named_parameters())
    groups: dict[tuple[int, ...], Group | None] = {}
    for holders in sorted({tuple(owners[name]) for name in parameters}):
        members = {first + stage for first in range(0, run.size, stages) for stage in holders}
        groups[holders] = run.group(sorted({0, *members}))
    for name, parameter in parameters.items():
        group = groups[tuple(owners[name])]
        if group is None or not parameter.numel():
            continue
        if arrivals:
            _begin(group, parameter, run, arrivals)
        else:
            _give(group, parameter, run)
    return [group for group in groups.values() if group and arrivals]


def _begin(group: Group, parameter: nn.Parameter, run: Run, arrivals: Arrivals) -> None:
    """Begin to give rank 0's parameter to all of a group."""
    content = _content(parameter, run)
    sent = group.broadcast(bytes_of(content), 0, timeout=run.timeout, asynchronous=True)
    assert sent
    if run.rank == 0:
        arrivals.leave(sent.wait)
    else:
        arrivals.travel([parameter], _arrival(sent.wait, parameter, content))


def _give(group: Group, tensor: torch.Tensor, run: Run) -> None:
    """Give rank 0's tensor to all of a group."""
    content = _content(tensor, run)
    group.broadcast(bytes_of(content), 0, timeout=run.timeout)
    if run.rank:
        _bring_back(content, tensor)


def _content(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """The tensor itself, or room for it in host memory with its elements in order; rank 0's is filled."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    if run.rank:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def bytes_of(content: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor with its elements in order."""
    return content.view(-1).view(torch.uint8)


def _arrival(sent: Callable[[], Any], parameter: nn.Parameter, content: torch.Tensor) -> Callable[[], None]:
    def wait() -> None:
        sent()
        _bring_back(content, parameter)

    return wait


def _bring_back(content: torch.Tensor, tensor: torch.Tensor) -> None:
    if content.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(content)


def check_arguments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[torch.Tensor, ...],
    batch_norm: str | None,
) -> None:
    """Raise InvalidCall for arguments of `pipeline` that cannot be, before anything is traced."""
    if not isinstance(model, nn.Module):
        raise InvalidCall(f"The model is a {type(model).__name__}.", "Give pipeline() a torch.nn.Module.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidCall(
            f"The optimizer is a {type(optimizer).__name__}.", "Give pipeline() one of torch.optim."
        )
    devices = {tensor.device for tensor in [*inputs, *model.parameters(), *model.buffers()]}
    if len(devices) > 1 or devices.pop().type not in ("cpu", "cuda"):
        raise InvalidCall(
            "The model and the example are not on one device.",
            "Bring both to the host, or to this rank's NVIDIA GPU: model.to(device), example.to(device).",
        )
    if not model.training:
        raise InvalidCall(
            "The model is in evaluation, and pipeline() prepares it for training.",
            "Call model.train() before pipeline(), and model.eval() on what pipeline() returns.",
        )
    if batch_norm not in (None, "micro", "deferred", "exact"):
        raise InvalidCall(f"There is no batch_norm='{batch_norm}'.", "Choose from micro, deferred, exact.")
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise InvalidCall(
            "The optimizer has parameters that the model does not have.", "Make it of model.parameters()."
        )
