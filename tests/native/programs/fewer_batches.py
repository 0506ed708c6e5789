"""Rank 1 has a batch less than rank 0, which gets an error after the time that the process group allows.

Argument: what trains, `parallelize`, `overlap` (the same with overlap_step), `horovod` or `keras`.
"""

# pyright: reportMissingImports=false

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import carme_runtime.torch as carme
from carme_runtime.collectives.errors import Timeout
from patience import HANG

face = sys.argv[1]
LIMIT = 10  # longer than anything else takes that the ranks do together, on a busy machine too
torch.set_num_threads(1)
dist.init_process_group("carme", timeout=timedelta(seconds=LIMIT))
rank = dist.get_rank()
batches = 3 - rank


def train_with_torch():
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if face == "horovod":
        import carme_runtime.horovod as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer)
    else:
        model, optimizer = carme.parallelize(model, optimizer, overlap_step=face == "overlap")
    for _ in range(batches):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()


def train_with_keras():
    import keras

    import carme_runtime.keras as ck

    model = ck.Model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    model.compile("sgd", "mse")
    data = torch.ones(4, 4), torch.ones(4, 2)
    for _ in range(batches):
        model.fit(*data, batch_size=4, verbose=0)


store = dist.distributed_c10d._get_default_store()
try:
    train_with_keras() if face == "keras" else train_with_torch()
except Timeout:
    print("GAVE UP", flush=True)
    assert rank == 0
    store.set("rank 0 has given up", "")
    store.wait(["rank 1 has waited"], timedelta(seconds=HANG))
else:
    assert rank == 1
    store.wait(["rank 0 has given up"], timedelta(seconds=HANG))  # it is there, and does something else
    store.set("rank 1 has waited", "")
