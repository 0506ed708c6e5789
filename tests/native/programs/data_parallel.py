"""An ordinary script for DistributedDataParallel or FullyShardedDataParallel; says what the model became."""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

backend, how = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group(backend)
rank = dist.get_rank()
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 256),
    torch.nn.ReLU(), torch.nn.Linear(256, 10),
)  # fmt: skip
if how == "ddp":
    wrapped: torch.nn.Module = DDP(model, bucket_cap_mb=1)
else:
    wrapped = FSDP(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
data = torch.Generator().manual_seed(rank)
for _ in range(5):
    x = torch.randn(32, 64, generator=data)
    y = torch.randint(0, 10, (32,), generator=data)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(wrapped(x), y)
    loss.backward()
    optimizer.step()
if how == "fsdp":
    with FSDP.summon_full_params(wrapped):
        state = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
else:
    state = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
dist.barrier()
if rank == 0:
    print("RESULT", hashlib.sha256(state.numpy().tobytes()).hexdigest())
dist.destroy_process_group()
