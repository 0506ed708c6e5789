"""A pipeline over all ranks there are, which goes on from its last checkpoint, of whatever layout.

    pipeline_restarted.py file|streamed|stages FOLDER STEPS [LOST ...]

Trains up to STEPS, and sees then that a single process does the same. In its start number N the last rank
ends itself before the step that LOST names in place N. Its checkpoints are

    file: one of `torch.save`, by rank 0; all ranks load it before they cut the model.
    streamed: those of `Checkpoints`, which rank 0 alone reads before the cut; its parameters are streamed.
    stages: the same; each rank reads its own stage after the cut.
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

from carme_runtime.checkpoint import Checkpoints, checkpoints, files
from carme_runtime.checkpoint.stream import Filling
from carme_runtime.torch import pipeline

torch.set_num_threads(1)
CHECKPOINT, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS, LOST = int(sys.argv[3]), [int(step) for step in sys.argv[4:]]
START = "streamed" if CHECKPOINT == "streamed" else ""
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


def own() -> tuple[Any, Any]:
    """As `make`; other ranks than 0 have other parameters, where a checkpoint must bring them all."""
    model, optimizer = make()
    for parameter in model.parameters() if rank and CHECKPOINT != "file" else ():
        parameter.data.fill_(float("nan"))
    return model, optimizer


def cut(model: Any, optimizer: Any) -> tuple[Any, Any]:
    inputs, _ = batch(0)
    return pipeline(model, optimizer, example=inputs, micro_batches=4, strategy="pipeline", start=START)


def begun() -> tuple[Any, Any, Any, int]:
    """The pipeline and its optimizer, as the last checkpoint has them; where that is; and its step."""
    model, optimizer = own()
    file = FOLDER / "checkpoint.pt"
    if CHECKPOINT == "file":
        saved = torch.load(file) if file.exists() else {"step": 0}
        if file.exists():
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        return *cut(model, optimizer), file, saved["step"]
    if CHECKPOINT == "streamed":
        read_on_rank_0_only()
        folder = Checkpoints(FOLDER, start="streamed")
        values = folder.resume(model=model, optimizer=optimizer) or {"step": 0}
        return *cut(model, optimizer), folder, values["step"]
    model, optimizer = cut(model, optimizer)
    folder = Checkpoints(FOLDER)
    needed = note_needed()
    values = folder.resume(model=model, optimizer=optimizer) or {"step": 0}
    if needed and size > 1:
        held, whole = needed[0]
        assert held < 0.8 * whole, f"a rank of {size} has read {held} of {whole} bytes"
    return model, optimizer, folder, values["step"]


def read_on_rank_0_only() -> None:
    read: Any = files.read

    def on_rank_0(*arguments: Any) -> Any:
        assert rank == 0, "another rank than 0 reads the checkpoint"
        return read(*arguments)

    files.read = on_rank_0


def note_needed() -> list[tuple[int, int]]:
    """Bytes that this rank keeps of the next checkpoint that it reads, and all of them."""
    needed: list[tuple[int, int]] = []

    class Noting(Filling):
        def __init__(self, packed: Any, layout: Any, *more: Any, **options: Any) -> None:
            super().__init__(packed, layout, *more, **options)
            needed.append((sum(len(flat) for flat in self._flat if flat is not None), layout.size))

    checkpoints.Filling = Noting  # pyright: ignore[reportPrivateImportUsage]
    return needed


def save(model: Any, optimizer: Any, where: Any, step: int) -> None:
    if CHECKPOINT != "file":
        where.save(step, model=model, optimizer=optimizer).wait()
        return
    whole = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(), "step": step}
    if rank == 0:
        torch.save(whole, where.with_suffix(".new"))
        where.with_suffix(".new").replace(where)


def main() -> None:
    model, optimizer, where, first = begun()
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
        save(model, optimizer, where, step + 1)
    whole = model.state_dict(), model.optimizer_state_dict()
    if rank == 0:
        compare(*whole)
        print(f"ENDED with {size} ranks as one process does", flush=True)


main()
