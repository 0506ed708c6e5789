"""PyTorch's fused kernels for optimizers on the host: a step reads and writes its memory once."""

# As in backend.py.
# pyright: reportMissingImports=false

import torch

__all__ = ["fuse"]

# Optimizers with fused kernels in PyTorch for the host, and types that these compute as the others do.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FUSIBLE = (torch.float32, torch.float64)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` use its fused kernel on the host, unless it was made with a choice."""
    if type(optimizer) not in _FUSED:
        return
    for group in optimizer.param_groups:
        reported = any(group.get(name) for name in ("differentiable", "capturable"))
        reported = reported or any(group.get(name) is not None for name in ("fused", "foreach"))
        if reported or not all(p.device.type == "cpu" and p.dtype in _FUSIBLE for p in group["params"]):
            continue
        if type(optimizer) is torch.optim.SGD:
            if not group["momentum"] or group["dampening"]:
                continue  # without momentum it reads and writes its memory once anyhow
            # The fused kernel fails where a parameter gets its first gradient after others. A momentum of
            # zero becomes the gradient, as none does.
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    )
        group["fused"] = True
