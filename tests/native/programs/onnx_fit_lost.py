"""Trains an ONNX model, with checkpoints. Arguments: the model, and the folder of the checkpoints.

On the first start rank 1 of several says WAITS in its seventh step and makes it no more. Rank 0 prints the
steps that it has made in this start and all losses, as JSON.
"""

import json
import os
import sys
import time

import numpy as np
import torch

import carme_runtime.onnx

torch.set_num_threads(1)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
is_lost = os.environ.get("CARME_RESTARTS", "0") == "0" and os.environ.get("RANK") == "1"
chance = np.random.default_rng(0)
data = [
    (chance.standard_normal((7, 8)).astype(np.float32), chance.integers(0, 3, 7).astype(np.int64))
    for _ in range(12)
]
steps = 0


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    global steps
    steps += 1
    if is_lost and steps == 7:
        print("WAITS", flush=True)
        while True:
            time.sleep(1000)
    return torch.nn.functional.cross_entropy(outputs, targets)


trained = carme_runtime.onnx.fit(
    sys.argv[1], data, loss=loss, learning_rate=0.1, momentum=0.9, checkpoints=sys.argv[2], interval=2
)
if os.environ.get("RANK", "0") == "0":
    print(json.dumps([steps, trained.losses]), flush=True)
if ranks > 1:
    torch.distributed.destroy_process_group()
