"""The state of a model and its optimizer on several ranks, as one process has it."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from carme_runtime.torch.pipeline_run import Run


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, in order."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def named_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
    """The names of the parameters in an optimizer's groups, in their order."""
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def whole_optimizer_state(
    optimizer: torch.optim.Optimizer,
    groups: list[list[str]],
    owners: dict[str, list[int]],
    own: dict[str, torch.nn.Parameter],
    run: Run,
    stage: int,
) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be in one process; on rank 0, empty on the others.

    Args:
        optimizer: With this rank's parameters only.
        groups: See `named_groups`, of the whole model.
        owners: The stages that hold each parameter.
        own: This rank's parameters by name.
        run: The ranks; those of the first pipeline have the numbers of their stages.
        stage: This rank's.
    """
    numbers = {name: number for number, name in enumerate(n for names in groups for n in names)}
    state: dict[int, Any] = {}
    for root in sorted({owners[name][0] for name in numbers}):
        whole = {}
        if run.rank == root and stage == root:
            whole = {
                numbers[name]: optimizer.state[own[name]]
                for name in numbers
                if owners[name][0] == root and own[name] in optimizer.state
            }
        file = io.BytesIO()
        torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, whole), file)
        text = run.broadcast(file.getvalue() if run.rank == root else b"", root)
        if run.rank == 0:
            state |= torch.load(io.BytesIO(text), weights_only=True)
    if run.rank:
        return {}
    described = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        rest = {key: value for key, value in group.items() if key != "params"}
        described.append({**rest, "params": [numbers[name] for name in names]})
    return {"state": dict(sorted(state.items())), "param_groups": described}


def mismatch(
    state: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    described: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> str:
    """How a state differs from the model's; empty: it does not."""
    if missing := [name for name in names if name not in state]:
        return f"The state lacks {missing[0]}."
    if unknown := [name for name in state if name not in names]:
        return f"The model has no {unknown[0]}, which is in the state."
    for name, first in names.items():
        if state[name].shape != described[first][0]:
            return (
                f"{name} has the shape {list(described[first][0])} in the model, and "
                f"{list(state[name].shape)} in the state."
            )
    return ""
