"""Forward passes that are computed again in the backward pass, so that their activations need no memory.

The second time everything is as it was the first time: autocast, random numbers, and the buffers that the
piece changes, such as BatchNorm's running statistics. What it changes then is given up.
"""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from carme_runtime.torch.traced import Traced
from carme_runtime.torch.views import viewed

# Arguments that operators change although their schema does not say so.
_CHANGED_IN_SECRET = {"running_mean", "running_var"}


def can_recompute(traced: Traced) -> bool:
    """Whether all that runs is known, and no parameter changes: its gradient would be that of a copy.

    Layers that were not traced into may change what nobody sees.
    """
    trained = {parameter.name for parameter in traced.graph.parameters if parameter.trainable}
    return all(node.op != "call_module" for node in traced.nodes) and not trained & changed_tensors(traced)


def changed_tensors(traced: Traced) -> frozenset[str]:
    """Names of the buffers and parameters that the model's own operators change."""
    found = set()
    for node in traced.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None else ()):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if place < len(node.args) and (writes or argument.name in _CHANGED_IN_SECRET):
                changed: Any = node.args[place]
                while isinstance(changed, fx.Node) and (source := viewed(changed)) is not None:
                    changed = source
                found.add(traced.tensors.get(getattr(changed, "name", ""), ""))
    return frozenset(found - {""})


@contextlib.contextmanager
def first_time(device: torch.device) -> Iterator[None]:
    """A forward pass that keeps nothing for the backward pass.

    Autocast must not keep its copies of weights from it: they lead to no gradients.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.no_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
        yield


class Before:
    """What a forward pass found.

    Args:
        device: Of the model.
        tensors: Of the model, by name.
        changed: Those that the pass will change.
        draws: Whether it draws random numbers.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Mapping[str, torch.Tensor],
        changed: Iterable[str],
        draws: bool,
    ) -> None:
        self._device, self._draws = device, draws
        self._autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.tensors = {name: tensors[name].detach().clone() for name in changed}
        if draws:
            self._state = torch.get_rng_state()
            self._gpu_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Everything but the tensors is as it was."""
        enabled, dtype = self._autocast
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            torch.enable_grad(),
            torch.random.fork_rng(devices, enabled=self._draws),
            torch.autocast(self._device.type, dtype, enabled),
        ):
            if self._draws:
                torch.set_rng_state(self._state)
                if self._gpu_state is not None:
                    torch.cuda.set_rng_state(self._gpu_state, self._device)
            yield
