"""Sums of the gradients of stages over replicas, and over the stages that share parameters."""

# As in backend.py.
# pyright: reportMissingImports=false

import numpy
import torch
from torch import nn

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall

_NONE, _DENSE, _SPARSE = range(3)  # kinds of gradients


def sum_gradients(group: Group, parameters: list[nn.Parameter], timeout: int) -> None:
    """Sum gradients over a group; where none of it has one, there is none.

    Raises:
        InvalidCall: One is sparse, on any rank of the group.
    """
    kinds = numpy.array([_kind_of(p.grad) for p in parameters], numpy.int64)
    if not len(kinds):
        return
    group.allreduce(kinds, "max", timeout=timeout)
    if kinds.max() == _SPARSE:
        raise InvalidCall(
            "A gradient is sparse, and it is to be summed over ranks.", "Make the layer with sparse=False."
        )
    there = [p for p, kind in zip(parameters, kinds, strict=True) if kind]
    for dtype in dict.fromkeys(p.dtype for p in there):
        chosen = [p for p in there if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in chosen])
        allreduce(group, flat, timeout)
        for p, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            p.grad = part.view(p.shape)


def _kind_of(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _SPARSE if gradient.is_sparse else _DENSE


def allreduce(group: Group, flat: torch.Tensor, timeout: int) -> None:
    """Sum over the ranks of a group, which takes host memory."""
    host = flat.cpu()
    group.allreduce(host, timeout=timeout)
    if host is not flat:
        flat.copy_(host)
