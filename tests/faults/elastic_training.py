"""Trains until a file named `stop` lies beside it, and says with which checkpoint each start began."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from carme_runtime.checkpoint import Checkpoints

here = Path(__file__).parent
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("carme")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
checkpoints = Checkpoints(str(here / "checkpoints"), keep=3)
values = checkpoints.resume(model=model, optimizer=optimizer) or {"epoch": 0, "loss": float("inf")}
start = os.environ.get("CARME_RESTARTS", "0")
place = f"{socket.gethostname()} {os.getpid()} {os.getppid()}"
print(f"BEGAN {start} {rank} {size} {place} epoch {values['epoch']}", flush=True)
trained = torch.nn.parallel.DistributedDataParallel(model)
samples = torch.arange(24.0)[rank::size, None]
epoch, loss = values["epoch"], values["loss"]
stopping = torch.zeros(1)
while not stopping.item():
    optimizer.zero_grad()
    error = (trained(samples) - 2 * samples - 1).square().mean()
    error.backward()
    optimizer.step()
    assert not epoch or float(error) < 1e6
    epoch += 1
    checkpoints.save(epoch, model=model, optimizer=optimizer, epoch=epoch, loss=0.0)
    checkpoints.wait()
    time.sleep(0.1)
    stopping.fill_(float(rank == 0 and (here / "stop").exists()))
    dist.all_reduce(stopping)
print(f"ENDED {rank} {size} epoch {epoch}", flush=True)
dist.destroy_process_group()
