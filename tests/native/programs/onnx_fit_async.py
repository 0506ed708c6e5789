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
data = [(each, (each[:, 0] + each[:, 1] > 0).astype(np.int64) + (each[:, 2] > 0)) for each in points]
own = []


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    own.append(len(targets))
    if rank == 1 and len(own) == settings.get("dies_at"):
        os._exit(9)
    if rank == 0:
        time.sleep(slow)
    return torch.nn.functional.cross_entropy(outputs, targets)


exchanges = []
first = asynchronous.Exchange.__init__


def noted(self: asynchronous.Exchange, *given: object) -> None:
    exchanges.append(self)
    first(self, *given)  # pyright: ignore[reportArgumentType]


asynchronous.Exchange.__init__ = noted
trained = carme_runtime.onnx.fit(
    sys.argv[1], data, loss=loss, mode=mode, learning_rate=0.2, **settings.get("more", {})
)
weights = torch.cat([each.detach().reshape(-1) for each in trained.module.parameters()])
print(
    json.dumps(
        {
            "losses": trained.losses,
            "parts": len(own),
            "behind": max((each.most_behind for each in exchanges), default=0),
            "weights": weights.double().tolist(),
        }
    )
)
if ranks > 1:
    torch.distributed.destroy_process_group()
