"""Trains a stack of linear layers, with a limit of memory or without, and prints what the tests compare.

    out_of_core.py [--save-on-cpu] OPTIMIZER WIDTH LAYERS STEPS [LIMIT FOLDER]

Each line is a JSON object: a step's loss, bit by bit; then the peak of the memory and the plan.
"""

import contextlib
import json
import sys
import time

import torch
from torch import nn

import carme_runtime
from carme_runtime.out_of_core import pages

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


def main(
    optimizer: str,
    width: str,
    layers: str,
    steps: str,
    limit: str = "",
    folder: str = "",
    *,
    save_on_cpu: bool = False,
) -> None:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if save_on_cpu:
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        budget = stack.enter_context(carme_runtime.memory(limit, folder)) if limit else None
        torch.manual_seed(0)
        size = int(width)
        parts = [
            part for _ in range(int(layers)) for part in (nn.Linear(size, size), nn.ReLU(), nn.Dropout(0.1))
        ]
        model: nn.Module = nn.Sequential(*parts, nn.Linear(size, 10))
        trained: torch.optim.Optimizer = OPTIMIZERS[optimizer](model.parameters())
        if budget:
            model, trained = budget.adopt(model, trained)
        data = torch.Generator().manual_seed(1)
        for _ in range(int(steps)):
            begin = time.perf_counter()
            x, y = torch.randn(64, size, generator=data), torch.randint(0, 10, (64,), generator=data)
            trained.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            trained.step()
            print(
                json.dumps({"loss": float(loss.item()).hex(), "seconds": time.perf_counter() - begin}),
                flush=True,
            )
        plan = budget.plan().as_dict() if budget else None
        print(json.dumps({"peak": pages.peak(), "plan": plan}), flush=True)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--save-on-cpu"]
    main(*arguments, save_on_cpu=len(arguments) < len(sys.argv) - 1)
