"""A little training whose rank 1 takes its time; rank 0 waits for it."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("carme")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
samples = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(40, 100)), batch_size=4)
for (batch,) in samples:
    if rank == 1:
        time.sleep(0.1)
    model(batch).sum().backward()
    dist.barrier()
dist.destroy_process_group()
