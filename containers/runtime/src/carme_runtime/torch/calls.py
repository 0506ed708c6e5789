"""Calls of a pipeline in an ordinary loop: outputs on all ranks, and a backward pass through all stages."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from carme_runtime.collectives.errors import InvalidCall


@dataclasses.dataclass
class Called:
    """What a call leaves until its backward pass.

    Args:
        outputs: Of the model, for the whole batch.
        held: Of the passes, by piece and micro-batch; empty after the backward pass, or where there is none.
        sizes: Samples of the micro-batches.
        share: Of this replica in the samples of all.
    """

    outputs: list[torch.Tensor]
    held: dict[tuple[int, int], Any]
    sizes: list[int]
    share: float


def connected(called: Called, backward: Callable[[Called, Sequence[Any]], None]) -> tuple[torch.Tensor, ...]:
    """The outputs, such that gradients that come to them start the backward pass of all stages."""
    anchor = torch.zeros((), requires_grad=True)
    return _Connected.apply(anchor, called, backward)  # pyright: ignore


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Any, called: Called, backward: Any) -> tuple[torch.Tensor, ...]:
        ctx.called, ctx.begin = called, backward
        ctx.mark_non_differentiable(*(t for t in called.outputs if not t.is_floating_point()))
        outputs, called.outputs = called.outputs, []
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        if not ctx.called.held:
            raise InvalidCall(
                "A second backward pass through the same outputs of a pipeline is not possible.",
                "Call the model again, or add the losses and call backward() once.",
            )
        ctx.begin(ctx.called, gradients)
        ctx.called.held = {}
        return None, None, None
