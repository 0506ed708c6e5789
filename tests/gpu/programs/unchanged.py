"""An ordinary script for DDP on NCCL that knows nothing of carme; started with CARME_TORCH_BACKEND."""

# pyright: reportMissingImports=false

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(100, 10).to(device), device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 100, device=device)).square().mean().backward()
    optimizer.step()
weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(each, weights[0]) for each in weights)
assert dist.get_backend() == "carme", dist.get_backend()
print("PASSED ddp", flush=True)
dist.destroy_process_group()
