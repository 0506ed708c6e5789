"""Rank 0's parameters travel to all ranks while the first forward pass runs.

The method is that of S-Caffe (Awan et al., PPoPP 2017), which broadcasts the parameters of each layer by
themselves and begins to compute with the first ones.
"""

# As in backend.py.
# pyright: reportMissingImports=false

import torch.distributed as dist
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.arrivals import Arrivals
from carme_runtime.torch.core_group import CoreGroup
from carme_runtime.torch.flat import all_of, bytes_of

__all__ = ["check_streamable", "stream"]


def check_streamable(model: nn.Module, group: CoreGroup | None) -> CoreGroup:
    """The group that carries the model, or InvalidCall where the core cannot."""
    where = ""
    if group is None:
        where = "another backend than carme would carry it"
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu" and not where:
            where = f"{name} is not on the host"
    if group is None or where:
        raise InvalidCall(
            f"The model cannot be streamed: {where}.",
            "Stream models on the host, over the backend carme, or leave start out.",
        )
    return group


def stream(model: nn.Module, group: CoreGroup, arrivals: Arrivals) -> None:
    """Begin to give rank 0's parameters to all, in the order in which the model has them."""
    for parameter in model.parameters():
        data, bring_back = bytes_of(parameter.detach())
        sent = group.lane().broadcast(data, 0, timeout=group.limit, asynchronous=True)
        assert sent
        if dist.get_rank() == 0:
            arrivals.leave(sent.wait)
        else:
            arrivals.travel([parameter], all_of([sent.wait, bring_back]) or sent.wait)
