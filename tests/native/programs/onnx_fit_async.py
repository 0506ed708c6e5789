"""Trains an ONNX model on ranks that do not wait for each other. Arguments: the model, and settings as JSON.

Each rank prints what it found, as JSON.
"""

import json
import os
import sys
import time

import numpy as np
import torch

import carme_runtime.onnx
from carme_runtime.onnx import asynchronous

torch.set_num_threads(1)
settings = json.loads(sys.argv[2])
slow, batches, mode = settings["slow"], settings["batches"], settings["mode"]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
chance = np.random.default_rng(0)
points = chance.standard_normal((batches, 8 * ranks, 8)).astype(np.float32)
own = []


def classes(given: np.ndarray) -> np.ndarray:
    return (given[:, 0] + given[:, 1] > 0).astype(np.int64) + (given[:, 2] > 0)


data = [(each, classes(each)) for each in points]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    own.append(len(targets))
    if rank == 1 and len(own) == settings.get("dies_at"):
        os._exit(9)
    if rank == 0:
        time.sleep(slow)
    return torch.nn.functional.cross_entropy(outputs, targets)


exchanges, summed = [], []
first, last = asynchronous.Exchange.__init__, asynchronous.Exchange.close


def noted(self: asynchronous.Exchange, *given: object) -> None:
    exchanges.append(self)
    first(self, *given)  # pyright: ignore[reportArgumentType]


def closed(self: asynchronous.Exchange) -> None:
    # Before rank 0's go to all.
    summed.extend(torch.cat([each.detach().reshape(-1) for each in self._parameters]).tolist())
    last(self)


asynchronous.Exchange.__init__ = noted  # pyright: ignore[reportAttributeAccessIssue] - takes any arguments
asynchronous.Exchange.close = closed
trained = carme_runtime.onnx.fit(
    sys.argv[1], data, loss=loss, mode=mode, learning_rate=0.2, **settings.get("more", {})
)
unseen = np.random.default_rng(1).standard_normal((500, 8)).astype(np.float32)
with torch.no_grad():
    scores = trained.module(torch.from_numpy(unseen))
    held_back = torch.nn.functional.cross_entropy(scores, torch.from_numpy(classes(unseen)))
weights = torch.cat([each.detach().reshape(-1) for each in trained.module.parameters()])
print(
    json.dumps(
        {
            "losses": trained.losses,
            "parts": len(own),
            "behind": max((each.most_behind for each in exchanges), default=0),
            "weights": weights.tolist(),
            "summed": summed,
            "held_back": float(held_back),
        }
    )
)
if ranks > 1:
    torch.distributed.destroy_process_group()
