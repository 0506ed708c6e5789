"""Rank 0 measures a model until the other ranks have computed beside it; they end as soon as it has measured.

    measured_beside.py FOLDER [graph | large]

In the folder each of the others leaves a file when it has computed. Nobody computes where there is a graph,
or where measuring takes more memory than there is.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from carme_runtime.torch import measuring, pipeline, trace
from patience import HANG

MICRO_BATCHES, SAMPLES = 4, 16
folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kind = sys.argv[2] if len(sys.argv) > 2 else ""
timings, run_until = measuring._Measurement.timings, measuring._Measurement.run_until


def waiting(*arguments: Any) -> Any:
    until = time.monotonic() + HANG
    while not kind and len(list(folder.iterdir())) < ranks - 1:
        assert time.monotonic() < until, "The others compute nothing."
        time.sleep(0.01)
    return timings(*arguments)


def noted(measurement: Any, is_over: Any) -> None:
    run_until(measurement, is_over)
    assert len(measurement._example[0]) == SAMPLES // MICRO_BATCHES
    (folder / str(rank)).touch()


measuring._Measurement.timings = waiting  # pyright: ignore[reportAttributeAccessIssue] - names differ
measuring._Measurement.run_until = noted  # pyright: ignore[reportAttributeAccessIssue] - names differ
if kind == "large":
    measuring._Measurement._needed = lambda *_: measuring.UNKNOWN - 1  # pyright: ignore[reportAttributeAccessIssue]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
before = {name: value.clone() for name, value in model.state_dict().items()}
inputs, targets = torch.ones(SAMPLES, 4), torch.zeros(SAMPLES, dtype=torch.long)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
random = torch.get_rng_state()
graph = trace(model, inputs, seconds=0.1) if kind == "graph" else None
tested, optimizer = pipeline(
    model, optimizer, example=inputs, stages=ranks, micro_batches=MICRO_BATCHES, graph=graph
)
assert torch.equal(random, torch.get_rng_state())
for name, parameter in tested.named_parameters():
    assert torch.equal(parameter, before[name]) and parameter.grad is None, name
tested.step(inputs, targets, loss=functional.cross_entropy)
assert not kind or not list(folder.iterdir())
print("trained", flush=True)
tested.close()
dist.destroy_process_group()
