"""Six steps of an ordinary training with DistributedDataParallel."""

import torch
import torch.distributed as dist

dist.init_process_group("carme")
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
samples = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 64)), batch_size=4)
for (batch,) in samples:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
