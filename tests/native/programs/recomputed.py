"""Trains layers whose activations do not fit into a limit of memory, with a disk of a given speed.

    recomputed.py [--recompute] MIB_PER_SECOND [LIMIT FOLDER]

Each line is a JSON object: a step's loss and the norm of its gradients, bit by bit; then the plan.
"""

import copy
import json
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

import carme_runtime
from carme_runtime.out_of_core.spill import SpillFile

torch.set_num_threads(1)
BLOCKS, WIDTH, SAMPLES, STEPS = 6, 128, 4096, 6


class Network(nn.Module):
    """Blocks in a row with Dropout, one of which has an own way to keep statistics; then a row of layers."""

    def __init__(self) -> None:
        super().__init__()
        wide = 4 * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, WIDTH))
            for _ in range(BLOCKS)
        )
        self.counting = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))])
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.blocks, *self.counting]:
            x = x + block(x)
        return self.head(x)


def slow_down(bytes_per_second: float) -> None:
    """Let the disk of the spill folder move no more."""
    known, one_at_a_time = SpillFile._move, threading.Lock()

    def move(self: Any, call: Any, address: int, length: int, offset: int, problem: str) -> None:
        known(self, call, address, length, offset, problem)
        with one_at_a_time:
            time.sleep(length / bytes_per_second)

    SpillFile._move = move


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        y = torch.randint(0, 10, (SAMPLES,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        print(json.dumps({"loss": loss.item().hex() + norm.item().hex()}), flush=True)


def main(rate: str, limit: str = "", folder: str = "", *, recompute: bool = False) -> None:
    torch.manual_seed(0)
    if not limit:
        train(model := Network(), torch.optim.AdamW(model.parameters()))
        return
    slow_down(float(rate) * (1 << 20))
    with carme_runtime.memory(limit, folder) as budget:
        model = Network()
        model, optimizer = budget.adopt(model, torch.optim.AdamW(model.parameters()), recompute=recompute)
        train(model, optimizer)
        print(json.dumps({"plan": budget.plan().as_dict(), "text": str(budget.plan())}), flush=True)
        twin = copy.deepcopy(model)
    for each in (model, twin):  # both have their own forward passes again
        assert all("forward" not in vars(m) or m.forward.__self__ is m for m in each.modules())  # pyright: ignore


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--recompute"]
    main(*words, recompute="--recompute" in sys.argv)
