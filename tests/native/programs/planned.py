"""A script for `carme-run --plan` and `--strategy`: it trains with pipeline(), or without.

With --taken another program listens where the ranks are to meet; with --joins the script joins them itself.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from carme_runtime.torch import pipeline

torch.set_num_threads(1)
torch.manual_seed(0)
taken = socket.socket()
if "--taken" in sys.argv and os.environ["RANK"] == "0":
    taken.bind(("", int(os.environ["MASTER_PORT"])))
    taken.listen()
if "--joins" in sys.argv:
    dist.init_process_group("carme")
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
inputs, targets = torch.randn(12, 4), torch.randint(0, 3, (12,))
if "--alone" in sys.argv:
    functional.cross_entropy(model(inputs), targets).backward()
else:
    stages = 2 if "--stages" in sys.argv else None
    tested, optimizer = pipeline(model, optimizer, example=inputs, micro_batches=2, stages=stages)
    print(f"replica {tested.replica} of {tested.replicas}", flush=True)
    tested.step(inputs, targets, loss=functional.cross_entropy)
optimizer.step()
print("trained", flush=True)
