"""Two epochs of training with torch, and one of evaluation, on each rank; only the loss is reported."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import carme_runtime.torch  # noqa: F401
from carme_runtime import progress

# What is reported of a loss is no mistake of the script's.
warnings.filterwarnings("error", message="Converting a tensor")
dist.init_process_group("carme")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if sys.argv[1] == "parallelize":
    from carme_runtime.torch.parallel import parallelize

    model, optimizer = parallelize(model, optimizer, overlap_step=True, bucket_mb=0.00001)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
loader = DataLoader(TensorDataset(torch.ones(30, 4), torch.ones(30, 1)), batch_size=8)
for _ in range(2):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        progress.report(loss=loss)
with torch.no_grad():
    for inputs, _ in loader:
        model(inputs)
dist.destroy_process_group()
