"""PyTorch's DistributedDataParallel; the setting is the backend of torch.distributed."""

# PyTorch is optional.
# pyright: reportMissingImports=false

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from carme_runtime.compare.programs import Gradients, Mark, Step, Work
from carme_runtime.compare.programs.torch_networks import (
    build,
    first_gradients,
    precision_of,
    prepare_inputs,
    set_threads,
)
from carme_runtime.compare.tasks import MOMENTUM

VERSIONS = ("torch",)


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    set_threads(work.threads)
    inputs, targets = work.task.share(work.rank, work.ranks)
    inputs, targets = work.batches(prepare_inputs(inputs)), work.batches(targets)
    network, backend = build(work.task), work.setting
    rate, precision = work.task.network.rate, precision_of(work)
    # user: begin
    dist.init_process_group(backend)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)

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
    return step, lambda: first_gradients(work.task, network)
