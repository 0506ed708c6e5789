"""Gradients that few bits cannot say: over many steps of other batches, a wire loses no more than in one.

Argument 1: how they travel; 2: in how many steps each parameter has a part, `all` or `half`.
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false

import sys

import torch
from torch import nn

import carme_runtime.torch as carme

wire, steps = sys.argv[1:]
RATE, STEPS, SMALL = 0.5, 60, 0.0015
torch.set_num_threads(1)


class Turns(nn.Module):
    """Layers that take turns in the loss; only one of them always has a part."""

    def __init__(self, count: int):
        super().__init__()
        # More than the 16 KiB below which nothing is rounded.
        self.layers = [nn.Linear(8192, 2, bias=False) for _ in range(count)]
        self.registered = nn.ModuleList(self.layers)
        self.calls = 0
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        self.calls += 1
        return self.layers[self.calls % len(self.layers)](x)


model = Turns({"all": 1, "half": 2}[steps])
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
model, optimizer = carme.parallelize(model, optimizer, wire=wire)
rank = torch.distributed.get_rank()
# Samples are alike and the loss is linear, so that all gradients of its mean are alike, whatever the weights
# and the batches are. In each block of int8, of 256 elements, one is large: the others are below half of a
# step of its 127, and travel in those steps alone in which enough of them was lost before.
sample = torch.full((8192,), SMALL)
sample[::256] = 1.0
for step in range(STEPS):
    optimizer.zero_grad()
    # Long and short batches take turns, and the ranks have other shares of them.
    length = (12, 3)[step % 2] + rank
    model(sample.expand(length, -1)).sum(1).mean().backward()
    optimizer.step()

# Each rank rounds what it sends once, to `unit` of the largest that it sends together. What all lost until
# now is what they still keep, and no more, and weights miss that times the rate: of shares of the batch that
# make 1 in the mean, at most unit / (1 - unit) of the gradient; see parallel.py.
unit, together = {"bf16": (2**-8, sample), "int8": (1 / 254, torch.ones(8192))}[wire]
exact = -RATE * STEPS / len(model.layers) * sample
bound = RATE * unit / (1 - unit) * together + 5e-6 * exact.abs()  # that of sums in float32
for layer in model.layers:
    missed = (layer.weight.detach() - exact).abs()
    assert (missed <= bound).all(), f"{(missed / bound).max():.3} times what may be missed"
torch.distributed.destroy_process_group()
