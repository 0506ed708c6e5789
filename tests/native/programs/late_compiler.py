"""Trains under a limit of memory, uses PyTorch's compiler in one of several ways, and trains on.

    late_compiler.py WAY LIMIT FOLDER

Prints a JSON object: whether the compiler was loaded before and after, whether it is whole, what it compiled,
the losses of all steps bit by bit, and the peak of the memory.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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


WAYS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "module": import_a_module_of_it,
    "name": import_from_it,
    "option": set_one_of_its_options,
    "compile": compile_a_function,
}


def is_whole() -> bool:
    """Whether the package is loaded, and each of its modules is there once, as an import leaves it."""
    parts = {name: part for name, part in sys.modules.items() if name.startswith("torch._dynamo.")}
    package: Any = sys.modules["torch._dynamo"]
    found = all(part.__spec__ is not None and part.__spec__.name == name for name, part in parts.items())
    return found and package is torch._dynamo and hasattr(package, "reset")


def main(way: str, limit: str, folder: str) -> None:
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
        made = make()
        train(*made)
        train(*made)
        print(json.dumps({"losses": losses, "peak": pages.peak()}))
        return
    with carme_runtime.memory(limit, folder) as budget:
        made = budget.adopt(*make())  # an optimizer that is made before loads it
        train(*made)
        before = LOADED in sys.modules
        WAYS[way]()
        after = LOADED in sys.modules
        train(*made)
        found = {"before": before, "after": after, "whole": after and is_whole(), "losses": losses}
        print(json.dumps(found | {"peak": pages.peak()}))


def make() -> tuple[Any, Any]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
