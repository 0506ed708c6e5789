"""PyTorch with Horovod's calls; the setting is the module that has them."""

# PyTorch is optional.
# pyright: reportMissingImports=false

import importlib

import torch
from torch.nn import functional

from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.programs.torch_networks import (
    build,
    first_gradients,
    precision_of,
    prepare_inputs,
    set_threads,
)
from carme_runtime.compare.tasks import MOMENTUM

VERSIONS = ("torch",)  # Horovod's, where that is what the contestant needs


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    set_threads(work.threads)
    inputs, targets = work.task.share(work.rank, work.ranks)
    inputs, targets = work.batches(prepare_inputs(inputs)), work.batches(targets)
    model = build(work.task)
    hvd = importlib.import_module(work.setting)
    rate, precision = work.task.network.rate, precision_of(work)
    # user: begin
    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(number: int, mark: Mark) -> float:
        x, y = torch.from_numpy(inputs[number]), torch.from_numpy(targets[number])
        mark("input")
        optimizer.zero_grad()
        with precision:
            loss = functional.cross_entropy(model(x), y)
        mark("forward")
        loss.backward()
        mark("backward")
        optimizer.step()
        mark("communication and optimizer")
        return loss.item()

    # user: end
    return step, lambda: first_gradients(work.task, model)
