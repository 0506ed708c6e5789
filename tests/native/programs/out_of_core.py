"""Trains a stack of linear layers, with a limit of memory or without, and prints what the tests compare.

    out_of_core.py [--save-on-cpu] [--checkpoint=FILE] [--no-clip] [--step-during-backward]
        [--beside=FOLDER --read=BYTES --written=BYTES] OPTIMIZER WIDTH LAYERS STEPS [LIMIT FOLDER]

Each line is a JSON object: a step's loss, bit by bit, and with a limit the bytes that it moved, and whether
it went as the recorded step; then the peak of the memory and the plan. With a checkpoint the file is replaced
after each step; without a limit training goes on from it, if it is there.
With `--beside` each step reads and writes so many bytes of that folder's disk beside its computing. Neither
waits for the other, and the step ends when both have.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from disk_beside import DiskBeside
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
    checkpoint: Path | None = None,
    clips: bool = True,
    during_backward: bool = False,
    beside: tuple[Path, int, int] | None = None,
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
            model, trained = budget.adopt(model, trained, step_during_backward=during_backward)
        data = torch.Generator().manual_seed(1)
        begun = 0 if budget else resumed(checkpoint, model, trained, data)
        disk = DiskBeside(beside[0], 4 * size * size, *beside[1:]) if beside else None
        for number in range(begun, int(steps)):
            begin = time.perf_counter()
            if disk:
                disk.start()
            x, y = torch.randn(64, size, generator=data), torch.randint(0, 10, (64,), generator=data)
            trained.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            trained.step()
            if disk:
                disk.wait()
            if checkpoint:
                save(checkpoint, model, trained, data, number + 1)
            line = {"loss": float(loss.item()).hex(), "seconds": time.perf_counter() - begin}
            if budget:
                line |= {"moved": sum(budget._steps.moved), "followed": budget._steps.followed}
            print(json.dumps(line), flush=True)
        plan = budget.plan() if budget else None
        figures = plan.as_dict() | {"planned": planned_bytes(budget, plan.room)} if plan else None
        print(json.dumps({"peak": pages.peak(), "plan": figures}), flush=True)


def planned_bytes(budget: Any, room: int) -> int:
    """What a step moves by Belady's rule in the room that is not for what comes before its time."""
    steps = budget._steps
    order = steps.order_of(steps.trace)
    return steps.trace.traffic(order.room if order else room, 1.0, 1.0).moved


def save(
    file: Path, model: nn.Module, trained: torch.optim.Optimizer, data: torch.Generator, step: int
) -> None:
    """Replace the checkpoint when the new one is whole."""
    state = {"model": model.state_dict(), "optimizer": trained.state_dict(), "step": step}
    state |= {"data": data.get_state(), "masks": torch.get_rng_state()}
    torch.save(state, fresh := file.with_suffix(".new"))
    fresh.replace(file)


def resumed(
    file: Path | None, model: nn.Module, trained: torch.optim.Optimizer, data: torch.Generator
) -> int:
    """Go on from the checkpoint; the step that it was made after."""
    if file is None or not file.exists():
        return 0
    state = torch.load(file)
    model.load_state_dict(state["model"])
    trained.load_state_dict(state["optimizer"])
    data.set_state(state["data"].clone())
    torch.set_rng_state(state["masks"].clone())
    return state["step"]


if __name__ == "__main__":
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    values = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    arguments = [argument for argument in sys.argv[1:] if argument not in options]
    main(
        *arguments,
        save_on_cpu="--save-on-cpu" in options,
        checkpoint=Path(values["checkpoint"]) if "checkpoint" in values else None,
        clips="--no-clip" not in options,
        during_backward="--step-during-backward" in options,
        beside=(Path(values["beside"]), int(values["read"]), int(values["written"]))
        if "beside" in values
        else None,
    )
