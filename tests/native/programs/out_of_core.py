"""Trains a stack of linear layers, with a limit of memory or without, and prints what the tests compare.

    out_of_core.py [--save-on-cpu] [--fsdp-offload] [--checkpoint=FILE] [--no-clip] [--step-during-backward]
        [--beside=FOLDER --read=BYTES --written=BYTES] OPTIMIZER WIDTH LAYERS STEPS [LIMIT FOLDER]

Each line is a JSON object: a step's loss, bit by bit, and with a limit the bytes that it moved, how long it
waited for blocks and the disk had something to do, and whether it went as the recorded step; then the peak of
the memory and the plan. With a checkpoint the file is replaced
after each step; without a limit training goes on from it, if it is there.
With `--fsdp-offload` FSDP2 shards the model over one rank, with its parameters offloaded to the host.
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
    fsdp_offload: bool = False,
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
        if fsdp_offload:
            offload(model)
        trained: torch.optim.Optimizer = OPTIMIZERS[optimizer](model.parameters())
        if budget:
            model, trained = budget.adopt(model, trained, step_during_backward=during_backward)
        data, seen = torch.Generator().manual_seed(1), Seen(budget)
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
                line |= seen.step()
            print(json.dumps(line), flush=True)
        plan = budget.plan() if budget else None
        figures = plan.as_dict() | {"planned": planned_bytes(budget, plan.room)} if plan else None
        print(json.dumps({"peak": pages.peak(), "plan": figures}), flush=True)


class Seen:
    """What a budget has counted until now.

    Args:
        budget: None without a limit.
    """

    def __init__(self, budget: Any) -> None:
        self._budget = budget
        self._before = {"waited": 0.0, "disk": 0.0}

    def step(self) -> dict[str, Any]:
        """Of the step that has ended: bytes, seconds, and whether it went as the recorded one."""
        store, steps = self._budget._operations.store, self._budget._steps
        now = {"waited": store.waited, "disk": store.busy_seconds}
        seconds = {key: value - self._before[key] for key, value in now.items()}
        self._before = now
        return {"moved": sum(steps.moved), "followed": steps.followed, **seconds}


def offload(model: nn.Module) -> None:
    """Let FSDP2 shard a stack of layers over one rank, whose parameters wait in the memory of the host."""
    from torch import distributed
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    policy = CPUOffloadPolicy(pin_memory=False)  # pinned is what a GPU reads from
    options: Any = {"mesh": init_device_mesh("cpu", (1,)), "offload_policy": policy}
    for part in model.modules():
        if isinstance(part, nn.Linear):
            fully_shard(part, **options)
    fully_shard(model, **options)


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
        fsdp_offload="--fsdp-offload" in options,
        checkpoint=Path(values["checkpoint"]) if "checkpoint" in values else None,
        clips="--no-clip" not in options,
        during_backward="--step-during-backward" in options,
        beside=(Path(values["beside"]), int(values["read"]), int(values["written"]))
        if "beside" in values
        else None,
    )
