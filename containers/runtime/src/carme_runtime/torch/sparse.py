"""Sums of sparse tensors: the elements that all members have, added up by each."""

# As in backend.py.
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import torch

from carme_runtime.collectives import forms
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.flat import name_of

Gather = Callable[[list[torch.Tensor], torch.Tensor], Any]
_DENSE_REMEDY = "Give it dense: tensor.to_dense()."


def check_operation(name: str) -> None:
    """Raise InvalidCall for what sparse tensors are not reduced with."""
    if name not in ("sum", "mean"):
        raise InvalidCall(
            f"Sparse tensors were to be reduced with {name}.", f"Use SUM or AVG. {_DENSE_REMEDY}"
        )


def begin(
    tensor: torch.Tensor, members: int, divisor: float, gather: Gather
) -> tuple[list[Any], Callable[[], torch.Tensor]]:
    """Begin to add up a sparse tensor over all members, whose numbers of elements may differ.

    Args:
        tensor: In coordinate format.
        members: How many there are.
        divisor: Of the sum.
        gather: Begins to collect a tensor of all members into a list, which it is given first.

    Returns:
        What is under way, and what makes the sum afterwards.
    """
    if tensor.layout != torch.sparse_coo:
        raise InvalidCall(f"A tensor of layout {tensor.layout} cannot be reduced.", _DENSE_REMEDY)
    coalesced = tensor.detach().coalesce()
    indices, values = coalesced.indices().t().contiguous(), coalesced.values().contiguous()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(members)]
    gather(counts, torch.tensor([len(indices)])).wait()
    numbers = [int(count) for count in counts]
    all_indices = [indices.new_empty((number, *indices.shape[1:])) for number in numbers]
    all_values = [values.new_empty((number, *values.shape[1:])) for number in numbers]
    works = [gather(all_indices, indices), gather(all_values, values)]

    def finish() -> torch.Tensor:
        whole = torch.sparse_coo_tensor(
            torch.cat(all_indices).t(), torch.cat(all_values), tensor.shape, is_coalesced=False
        ).coalesce()
        if divisor != 1:
            whole.values().div_(divisor, rounding_mode=None if values.is_floating_point() else "trunc")
        return whole

    return works, finish


def form_of(tensor: torch.Tensor) -> str:
    """What members compare of a sparse tensor: their numbers of elements may differ."""
    kind = name_of(tensor.dtype)
    return forms.short(f"sparse {kind} {list(tensor.shape)} {tensor.sparse_dim()}")
