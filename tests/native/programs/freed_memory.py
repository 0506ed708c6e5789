"""Counts the pages that a training step takes from the kernel, once the first steps are over.

It reports the median of several steps: what is freed and given back is missing in every one; a heap that
grows, or a system that takes pages from processes which wait, is seen in some.
"""

import resource
import statistics

import torch
from torch import nn

import carme_runtime.torch as carme

STEPS = 5

torch.set_num_threads(1)
layers = [nn.Linear(1500, 1500) for _ in range(6)]  # gradients of 9 MB
model = nn.Sequential(*layers)
model, optimizer = carme.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.01))


def step() -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 1500)).square().mean().backward()
    optimizer.step()


for _ in range(3):
    step()
faults = []
for _ in range(STEPS):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print("FAULTS", statistics.median(faults), "is the median of", faults)
