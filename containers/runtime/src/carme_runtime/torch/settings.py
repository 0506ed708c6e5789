"""Settings of layers and of the optimizer as text that is the same on all ranks if these are."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from typing import Any

import torch
from torch import fx, nn

from carme_runtime.torch.traced import SelfTraced, Traced

_PLAIN = (bool, int, float, type(None), torch.dtype)


def layer_settings(traced: Traced) -> str:
    """Numbers and words with which operators are called, and settings of PyTorch's layers left whole.

    No values of tensors, no devices and nothing of the user's own objects: ranks may differ in these.
    """
    if isinstance(traced.model, SelfTraced):  # who makes its graph itself compares its settings itself
        return ""
    return repr([_called_with(traced, node) for node in traced.nodes if node.op.startswith("call_")])


def optimizer_settings(optimizer: torch.optim.Optimizer) -> str:
    """The kind of the optimizer, and the plain values of each of its groups."""
    groups = [
        sorted((name, repr(_plain(value))) for name, value in group.items() if name != "params")
        for group in optimizer.param_groups
    ]
    return repr((type(optimizer).__qualname__, groups))


def _called_with(traced: Traced, node: fx.Node) -> Any:
    words = isinstance(node.target, torch._ops.OpOverload)  # elsewhere one may name a device
    arguments = [_plain(argument, words) for argument in node.args]
    named = sorted((name, _plain(value, words)) for name, value in node.kwargs.items() if name != "device")
    return arguments, named, _module_settings(traced, node)


def _module_settings(traced: Traced, node: fx.Node) -> Any:
    if node.op != "call_module":
        return None
    parts = traced.root.get_submodule(str(node.target)).named_modules()
    return [
        (name, _attributes(part)) for name, part in parts if type(part).__module__.startswith("torch.nn.")
    ]


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    public = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return sorted((name, repr(_plain(value))) for name, value in public)


def _plain(value: Any, words: bool = False) -> Any:
    """What is compared of a value; of what might differ between ranks of one model, its type alone."""
    if isinstance(value, list | tuple):
        return [_plain(each, words) for each in value]
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, _PLAIN) or (words and isinstance(value, str)):
        return str(value)
    return type(value).__name__
