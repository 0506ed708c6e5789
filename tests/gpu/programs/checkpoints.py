"""A checkpoint of GPU tensors comes back to the GPU, bit by bit. Argument: the folder."""

# pyright: reportMissingImports=false

import os
import sys

import torch
import torch.distributed as dist

import carme_runtime.torch
from carme_runtime.checkpoint import Checkpoints

assert carme_runtime.torch
dist.init_process_group("carme")
torch.manual_seed(0)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(33, 777), torch.nn.BatchNorm1d(777), torch.nn.Linear(777, 1))
    model = model.cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


model, optimizer = build()
checkpoints = Checkpoints(sys.argv[1])
for _ in range(3):
    model(torch.ones(8, 33, device="cuda") * torch.arange(8, device="cuda")[:, None]).sum().backward()
    optimizer.step()
saving = checkpoints.save(3, model=model, optimizer=optimizer)
expected = {name: value.clone() for name, value in model.state_dict().items()}
moments = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
with torch.no_grad():  # what is written meanwhile is that of the call
    for parameter in model.parameters():
        parameter.zero_()
saving.wait()
model, optimizer = build()
assert checkpoints.resume(model=model, optimizer=optimizer) == {"step": 3}
for name, value in model.state_dict().items():
    assert value.is_cuda and torch.equal(value, expected[name]), name
for state, moment in zip(optimizer.state.values(), moments, strict=True):
    assert all(torch.equal(state[key], moment[key]) for key in moment)
print("PASSED checkpoints", flush=True)
dist.destroy_process_group()
os._exit(0)
