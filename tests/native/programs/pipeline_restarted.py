"""A pipeline over all ranks there are, which goes on from its last checkpoint, of whatever layout.

    pipeline_restarted.py FOLDER STEPS [LOST ...]

Trains up to STEPS, and sees then that a single process does the same. In its start number N the last rank
ends itself before the step that LOST names in place N.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from pipelined import alike
from torch import nn
from torch.nn import functional

from carme_runtime.torch import pipeline

torch.set_num_threads(1)
STEPS, LOST = int(sys.argv[2]), [int(step) for step in sys.argv[3:]]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make() -> tuple[Any, Any]:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 16, generator=generator), torch.randint(3, (12,), generator=generator)


def compare(state: Any, optimizer_state: Any) -> None:
    model, optimizer = make()
    for step in range(STEPS):
        inputs, targets = batch(step)
        torch.manual_seed(step)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        alike(state[name], tensor, name)
    for number, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            alike(optimizer_state["state"][number][key], value, f"{key} of parameter {number}")


def main() -> None:
    file = Path(sys.argv[1]) / "checkpoint.pt"
    model, optimizer = make()
    first = 0
    if file.exists():
        saved = torch.load(file)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    inputs, _ = batch(0)
    model, optimizer = pipeline(model, optimizer, example=inputs, micro_batches=4, strategy="pipeline")
    if rank == 0:
        print(f"BEGAN at step {first} with {model.plan().schedule.ranks} stages", flush=True)
    starts = int(os.environ.get("CARME_RESTARTS", "0"))
    for step in range(first, STEPS):
        if rank == size - 1 and LOST[starts : starts + 1] == [step]:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch(step)
        torch.manual_seed(step)
        model.step(inputs, targets, loss=functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        whole = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(), "step": step + 1}
        if rank == 0:
            torch.save(whole, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
    if rank == 0:
        compare(whole["model"], whole["optimizer"])
        print(f"ENDED with {size} ranks as one process does", flush=True)


main()
