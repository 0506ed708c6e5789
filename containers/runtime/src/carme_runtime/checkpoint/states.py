"""What a checkpoint takes from models and optimizers, and how they get it back.

Where tensors lie in parts on several ranks, as with FSDP, a checkpoint has the whole ones, and nothing of how
they were divided: any number of ranks can take its parts of them.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import sys
from collections.abc import Iterable
from typing import Any

from carme_runtime.collectives.errors import InvalidCall


def take(name: str, part: Any, all_parts: Iterable[Any]) -> Any:
    """The state of a part of a checkpoint, or the part itself where it is a value.

    Args:
        name: Of the part.
        part: Something with `take_state` or `state_dict`, or a value.
        all_parts: Some optimizers need their model.
    """
    if hasattr(part, "take_state"):
        return part.take_state()
    if not hasattr(part, "state_dict"):
        return part
    if "torch" in sys.modules:
        import torch

        if isinstance(part, torch.nn.Module) and _is_divided(part):
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            # The older FSDP puts its tensors together itself; with today's the stream does, one by one.
            return get_model_state_dict(part, options=_whole() if _is_wrapped(part.parameters()) else None)
        if stages := _stages_of(part):
            return stages.take_optimizer()
        if isinstance(part, torch.optim.Optimizer) and (model := _wrapped_model(name, part, all_parts)):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return get_optimizer_state_dict(model, part, options=_whole())
    return part.state_dict()


def own(part: Any, structure: Any) -> Any:
    """Of a state, or of its structure without tensors: what `give` needs for this part on this rank.

    Raises:
        InvalidCall: It is the state of something else.
    """
    if hasattr(part, "own_state"):
        return part.own_state(structure)
    stages = _stages_of(part)
    return stages.own_of_optimizer(structure) if stages else structure


def give(name: str, part: Any, state: Any, all_parts: Iterable[Any]) -> None:
    """Let a part have this state, as `own` gives it; see `take`."""
    if hasattr(part, "give_state"):
        part.give_state(state)
        return
    if stages := _stages_of(part):
        stages.give_optimizer(state)
        return
    if "torch" in sys.modules:
        import torch

        if isinstance(part, torch.nn.Module) and _is_divided(part):
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(part, state, options=_whole())
            return
        if isinstance(part, torch.optim.Optimizer):
            if model := _wrapped_model(name, part, all_parts):
                from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

                # Not strict: a parameter that never had a gradient has no state.
                set_optimizer_state_dict(model, part, state, options=_whole(strict=False))
                return
            state = _divided(part, state)
    part.load_state_dict(state)


def _whole(strict: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, strict=strict)


def _is_divided(model: Any) -> bool:
    parameters = list(model.parameters())
    return _is_wrapped(parameters) or any(is_divided(parameter) for parameter in parameters)


def is_divided(tensor: Any) -> bool:
    """Whether it is a DTensor: a tensor in parts on several ranks."""
    return hasattr(tensor, "full_tensor")


def is_spread(optimizer: Any) -> bool:
    """Whether parameters of an optimizer lie on several ranks, in parts or in stages."""
    parameters = _parameters(optimizer)
    return (
        _stages_of(optimizer) is not None
        or _is_wrapped(parameters)
        or any(is_divided(parameter) for parameter in parameters)
    )


def _stages_of(part: Any) -> Any:
    """The stages of a pipeline whose parameters an optimizer has; None: it is no such optimizer."""
    known = sys.modules.get("carme_runtime.torch.stage_states")
    if known is None or not isinstance(part, sys.modules["torch"].optim.Optimizer):
        return None
    return known.stages_of(part)


def _is_wrapped(parameters: Iterable[Any]) -> bool:
    """Whether these belong to the older FullyShardedDataParallel, whose parts are ordinary tensors."""
    return any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters)


def _wrapped_model(name: str, optimizer: Any, all_parts: Iterable[Any]) -> Any:
    """The model that the older FSDP wraps and this optimizer trains; None where it trains another."""
    parameters = _parameters(optimizer)
    if not _is_wrapped(parameters):
        return None
    known = {id(parameter) for parameter in parameters}
    for candidate in all_parts:
        if hasattr(candidate, "parameters") and any(id(p) in known for p in candidate.parameters()):
            return candidate
    raise InvalidCall(
        f"The parameters of the optimizer '{name}' belong to a FullyShardedDataParallel that was not given.",
        "Give the model to save and resume as well: model=model.",
    )


def _divided(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with each tensor divided as the parameter is to which it belongs."""
    parameters = _parameters(optimizer)
    if not any(is_divided(parameter) for parameter in parameters):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    entries = {
        number: {key: _alike(value, by_number.get(number)) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return state | {"state": entries}


def _alike(value: Any, parameter: Any) -> Any:
    if not is_divided(parameter) or not getattr(value, "ndim", 0) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
