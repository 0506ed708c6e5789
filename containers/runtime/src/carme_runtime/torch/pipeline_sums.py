"""Sums of the gradients of stages over replicas, and over the stages that share parameters."""

# As in backend.py.
# pyright: reportMissingImports=false

import numpy
import torch
from torch import nn

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.pipeline_run import Run


def refuse_sparse(run: Run, parameters: list[nn.Parameter]) -> None:
    """Raise InvalidCall on all ranks of the run where any has a sparse gradient that is to be summed.

    Args:
        run: The ranks, which call this together.
        parameters: Those of this rank whose gradients are to be summed.
    """
    sparse = any(p.grad is not None and p.grad.is_sparse for p in parameters)
    if run.minimum(int(not sparse)) == 0:
        raise InvalidCall(
            "A gradient is sparse, and it is to be summed over ranks.", "Make the layer with sparse=False."
        )


def sum_gradients(group: Group, parameters: list[nn.Parameter], timeout: int) -> None:
    """Sum gradients over a group, none of them sparse; where none of it has one, there is none."""
    known = numpy.array([p.grad is not None for p in parameters], numpy.int64)
    if not len(known):
        return
    group.allreduce(known, "max", timeout=timeout)
    present = [p for p, is_known in zip(parameters, known, strict=True) if is_known]
    for dtype in dict.fromkeys(p.dtype for p in present):
        chosen = [p for p in present if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in chosen])
        allreduce(group, flat, timeout)
        for p, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            p.grad = part.view(p.shape)


def allreduce(group: Group, flat: torch.Tensor, timeout: int) -> None:
    """Sum over the ranks of a group, which takes host memory."""
    host = flat.cpu()
    group.allreduce(host, timeout=timeout)
    if host is not flat:
        flat.copy_(host)
