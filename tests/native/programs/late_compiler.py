"""Trains under a limit of memory, uses PyTorch's compiler in one of several modes, and trains on.

    late_compiler.py MODE LIMIT FOLDER

Prints a JSON object: whether the compiler was loaded before and after, whether it is whole, the losses of all
steps bit by bit, and the peak of the memory. Without a limit (0) the losses and the peak alone.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import carme_runtime
from carme_runtime.out_of_core import pages

STEPS = 4
LOADED = "torch._dynamo.eval_frame"


def import_a_module_of_it() -> None:
    import torch._dynamo.config as config

    assert config is sys.modules["torch._dynamo.config"]


def import_from_it() -> None:
    from torch._dynamo import eval_frame

    assert eval_frame is sys.modules[LOADED]


def set_one_of_its_options() -> None:
    torch._dynamo.config.verbose = True
    assert sys.modules["torch._dynamo.config"].verbose


def compile_a_function() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))


def use_it_in_a_child() -> None:
    """A process that is forked has no blocks to move for it."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    torch._dynamo.reset()
    os._exit(LOADED not in sys.modules)


def compute_a_layer_again() -> None:
    """What a checkpoint names to the compiler."""
    layer: Any = nn.Linear(256, 256)
    result: Any = checkpoint(layer, torch.ones(2, 256), use_reentrant=False)
    result.sum().backward()
    assert layer.weight.grad is not None


MODES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "checkpoint": compute_a_layer_again,
    "child": use_it_in_a_child,
    "module": import_a_module_of_it,
    "name": import_from_it,
    "option": set_one_of_its_options,
    "compile": compile_a_function,
}


def is_whole() -> bool:
    """Whether the package is loaded, and each of its modules is there once, as an import leaves it."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("torch._dynamo.")}
    package: Any = sys.modules["torch._dynamo"]
    named = all(module.__spec__ and module.__spec__.name == name for name, module in modules.items())
    children = {name.rpartition(".")[2]: module for name, module in modules.items() if name.count(".") == 2}
    # The package gives some names to what it imports from the module of that name.
    attached = all(
        vars(package).get(name) in (module, vars(module).get(name, module))
        for name, module in children.items()
    )
    return named and attached and package is torch._dynamo and hasattr(package, "reset")


def main(mode: str, limit: str, folder: str) -> None:
    torch.set_num_threads(1)
    losses: list[str] = []

    def train(model: Any, optimizer: Any) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(16, 1024)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()).hex())

    if limit == "0":
        trained = new_model()
        train(*trained)
        train(*trained)
        print(json.dumps({"losses": losses, "peak": pages.peak()}))
        return
    with carme_runtime.memory(limit, folder) as budget:
        trained = budget.adopt(*new_model())  # an optimizer that exists before loads the compiler
        train(*trained)
        before = LOADED in sys.modules
        MODES[mode]()
        after = LOADED in sys.modules
        train(*trained)
        found = {"before": before, "after": after, "whole": after and is_whole(), "losses": losses}
        print(json.dumps(found | {"peak": pages.peak()}))


def new_model() -> tuple[Any, Any]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
