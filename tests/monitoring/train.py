"""Three minutes of training with a loader that takes longer than the rest; for test_training.py."""

import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import carme_runtime.torch  # noqa: F401
from carme_runtime import progress
from carme_runtime.torch.parallel import parallelize

SECONDS = 180


class Slow(Dataset):
    """Samples that take a while to come."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((8,), float(number % 2))


torch.set_num_threads(1)
dist.init_process_group("carme")
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model, optimizer = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.05))
begin, going = time.monotonic(), torch.ones(1)
while going:
    for inputs in DataLoader(Slow(), batch_size=8):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :1])
        loss.backward()
        optimizer.step()
        progress.report(loss=loss)
    going.fill_(time.monotonic() - begin < SECONDS)
    dist.broadcast(going, 0)
if os.environ["RANK"] == "0":
    print("trained", flush=True)
dist.destroy_process_group()
