"""Rank 0's parameters travel to all ranks while the first forward pass runs.

The method is that of S-Caffe (Awan et al., PPoPP 2017), which broadcasts the parameters of each layer by
themselves and begins to compute with the first ones.
"""

# As in backend.py.
# pyright: reportMissingImports=false

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.arrivals import Arrivals
from carme_runtime.torch.core_group import CoreGroup
from carme_runtime.torch.device_group import DeviceGroup
from carme_runtime.torch.flat import Finisher, all_of, assign, flat

__all__ = ["check_streamable", "stream"]


def check_streamable(model: nn.Module, group: CoreGroup | None) -> CoreGroup:
    """The group that carries the model, or InvalidCall where the core cannot."""
    where = ""
    if group is None:
        where = "another backend than carme would carry it"
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "cuda") and not where:
            where = f"{name} is on {parameter.device}"
    if group is None or where:
        raise InvalidCall(
            f"The model cannot be streamed: {where}.",
            "Stream models on the host or on NVIDIA GPUs, over the backend carme, or leave start out.",
        )
    return group


def stream(parameters: Iterable[nn.Parameter], group: CoreGroup, arrivals: Arrivals) -> None:
    """Begin to give rank 0's parameters to all, in their order."""
    for parameter in parameters:
        data, bring_back = _bytes_of(parameter.detach())
        carrier = DeviceGroup(group.lane()) if parameter.is_cuda else group.lane()
        sent = carrier.broadcast(data, 0, timeout=group.limit, asynchronous=True)
        assert sent
        if dist.get_rank() == 0:
            arrivals.leave(sent.wait)
        else:
            arrivals.travel([parameter], all_of([sent.wait, bring_back]) or sent.wait)


def _bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Finisher | None]:
    """The bytes of a tensor, and what brings a changed copy of them back."""
    copy = flat(tensor)
    if tensor.is_contiguous():
        return copy, None
    return copy, lambda: assign(tensor, copy.view(tensor.dtype))
