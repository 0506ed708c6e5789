"""PyTorch with `carme_runtime.torch.parallelize`."""

# PyTorch is optional.
# pyright: reportMissingImports=false

import torch
from torch.nn import functional

from carme_runtime.compare.programs import Mark, Step, Work
from carme_runtime.compare.programs.torch_networks import build, precision_of, prepare_inputs, set_threads
from carme_runtime.compare.tasks import MOMENTUM
from carme_runtime.torch import parallelize

VERSIONS = ("torch",)


def prepare(work: Work) -> Step:
    """The step of one rank."""
    set_threads(work.threads)
    inputs, targets = work.task.share(work.rank, work.ranks)
    inputs = prepare_inputs(inputs)
    network = build(work.task)
    rate, precision = work.task.network.rate, precision_of(work)
    # user: begin
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=MOMENTUM)
    model, optimizer = parallelize(network, optimizer)

    def step(number: int, mark: Mark) -> float:
        x, y = torch.from_numpy(inputs[number]), torch.from_numpy(targets[number])
        mark("input")
        optimizer.zero_grad()
        with precision:
            loss = functional.cross_entropy(model(x), y)
        mark("forward")
        loss.backward()
        mark("backward and communication")
        optimizer.step()
        mark("optimizer")
        return loss.item()

    # user: end
    return step
