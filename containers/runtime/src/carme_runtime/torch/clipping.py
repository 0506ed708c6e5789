"""The norm of all gradients of a model whose stages are on several ranks.

`torch.nn.utils.clip_grad_norm_` sees the gradients of one stage only. While there are pipelines, it gets the
norm of the whole model, as without it each stage would be scaled by another number.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from carme_runtime.collectives import Group
from carme_runtime.logs import log

_NORM = "_get_total_norm"


class Staged(Protocol):
    """A pipeline, as is needed here."""

    def owns_gradients(self, gradients: list[torch.Tensor]) -> bool:
        """Whether these are gradients of its stage."""
        ...

    def gradient_norm(self, gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of these, and of those that the other stages give meanwhile."""
        ...


_known: "weakref.WeakSet[Any]" = weakref.WeakSet()


def norm_of_stages(
    gradients: Iterable[torch.Tensor], norm_type: float, group: Group | None, timeout: int
) -> torch.Tensor:
    """The norm over all stages; each gives gradients that no other one has."""
    each = [float(torch.linalg.vector_norm(g.detach().double(), norm_type)) for g in gradients]
    largest = math.isinf(norm_type)
    own = max(each, default=0.0) if largest else sum(norm**norm_type for norm in each)
    total = torch.tensor([own], dtype=torch.float64)
    if group:
        group.allreduce(total, "max" if largest else "sum", timeout=timeout)
    return total[0] if largest else total[0] ** (1 / norm_type)


def watch_clipping(pipeline: Staged) -> None:
    """Let PyTorch's clip_grad_norm_ count the gradients of all stages of this pipeline."""
    original: Callable[..., torch.Tensor] | None = getattr(clip_grad, _NORM, None)
    if original is None:
        log.warning(
            "With this version of PyTorch, torch.nn.utils.clip_grad_norm_ sees one stage of a pipeline only. "
            "Use model.clip_grad_norm_()."
        )
        return
    _known.add(pipeline)
    if getattr(original, "of_pipelines", False):
        return

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for each in list(_known):
            if each.owns_gradients(gradients):
                norm = each.gradient_norm(gradients, float(norm_type))
                if error_if_nonfinite and not bool(norm.isfinite()):
                    raise RuntimeError(f"The norm of all gradients of the pipeline is {float(norm)}.")
                return norm.to(gradients[0].dtype if gradients else torch.get_default_dtype())
        return original(gradients, norm_type, error_if_nonfinite, foreach)

    total_norm.of_pipelines = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(clip_grad, _NORM, total_norm)


def forget_clipping(pipeline: Staged) -> None:
    """The pipeline is closed."""
    _known.discard(pipeline)
