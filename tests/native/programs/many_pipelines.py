"""Many pipelines in one process that nobody closes, as a search for good settings makes them.

Arguments: the API, `torch`, `loop` (whose outputs hold the pipeline), or `keras`; how many. After the first
one there are few segments left, so that there need not be hundreds of pipelines to use them up. The memory of
the process may not grow either.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from carme_runtime.collectives.core import load

face, rounds = sys.argv[1], int(sys.argv[2])
os.environ["KERAS_BACKEND"] = "torch"
torch.set_num_threads(1)
WIDTH, SAMPLES, LEFT = 64, 8, 16
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
inputs, targets = torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES)


def resident() -> int:
    """MiB of memory that this process uses, without what it shares."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) // 1024


def use_up_segments() -> None:
    """All but the last ones, which pipelines take first."""
    context = dist.group.WORLD.context  # pyright: ignore
    for number in range(1, load().SEGMENTS - LEFT):
        context.segment_alloc(number, 1)


class Search:
    """Trains one model after the other."""

    graph: Any = None  # what the first one has measured
    losses: list[float]

    def __init__(self) -> None:
        self.losses = []

    def train(self, number: int) -> None:
        torch.manual_seed(number)
        if face == "keras":
            self._train_keras(number)
            return
        from carme_runtime.torch import pipeline

        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pipe, optimizer = pipeline(
            model, optimizer, example=inputs, stages=size, micro_batches=2, graph=self.graph
        )
        self.graph = pipe.plan().graph
        if face == "loop":
            loss = functional.cross_entropy(pipe(inputs), targets)
            loss.backward()
            self.losses.append(float(loss.detach()))
            if number % 5 == rank:
                gc.collect()  # ranks look for garbage at different times
        else:
            self.losses.append(float(pipe.step(inputs, targets, loss=functional.cross_entropy)))
        optimizer.step()

    def _train_keras(self, number: int) -> None:
        import keras

        import carme_runtime.keras as tnt

        layers = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(WIDTH)]
        model = tnt.Model(keras.Sequential(layers), tnt.ParallelStrategy.PIPELINING, micro_batches=2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
        history = model.fit(inputs.numpy(), targets.numpy(), batch_size=SAMPLES, verbose=0)
        self.losses += history.history["loss"]
        keras.backend.clear_session()


if face == "keras":
    import keras  # noqa: F401

    import carme_runtime.keras  # noqa: F401
# Keras looks for garbage for each model: through all that was imported, which takes most of the time.
gc.freeze()
search, before = Search(), 0
for number in range(rounds):
    search.train(number)
    if number == 0:
        use_up_segments()
    if number == rounds // 3:
        before = resident()
assert resident() < before + 24, f"{before} MiB after a third, {resident()} MiB at the end"
assert len(search.losses) == rounds and all(0 < loss < 20 for loss in search.losses)
