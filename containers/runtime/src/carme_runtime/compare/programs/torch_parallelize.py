"""PyTorch with `carme_runtime.torch.parallelize`."""

# PyTorch is optional.
# pyright: reportMissingImports=false

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
from carme_runtime.scaling.advice import measure
from carme_runtime.scaling.machines import machine_of
from carme_runtime.scaling.network import Machine
from carme_runtime.scaling.profiles import Profile
from carme_runtime.torch import parallelize
from carme_runtime.torch.pipeline_run import Run

VERSIONS = ("torch",)


def prepare(work: Work) -> tuple[Step, Gradients]:
    """The step of one rank, and the first one's gradients."""
    set_threads(work.threads)
    inputs, targets = work.task.share(work.rank, work.ranks)
    inputs, targets = work.batches(prepare_inputs(inputs)), work.batches(targets)
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
    return step, lambda: first_gradients(work.task, network)


def profile(work: Work, seconds: float) -> Profile:
    """What `carme_runtime.scaling` predicts steps from: of a copy of the network, on this rank.

    Raises ScalingError where the network cannot be measured.
    """
    network = build(work.task)
    inputs, targets = work.task.share(work.rank, work.ranks)
    batch = torch.from_numpy(prepare_inputs(inputs)[0]), torch.from_numpy(targets[0])
    optimizer = torch.optim.SGD(network.parameters(), lr=work.task.network.rate, momentum=MOMENTUM)
    return measure(network, batch, functional.cross_entropy, optimizer=optimizer, seconds=seconds)


def machine(work: Work, ranks_per_node: int) -> Machine:
    """Links, and what reducing takes from computing; all ranks call this together."""
    network = build(work.task)
    inputs, targets = work.task.share(work.rank, work.ranks)
    batch, classes = torch.from_numpy(prepare_inputs(inputs)[0]), torch.from_numpy(targets[0])

    def compute() -> None:
        network.zero_grad()
        functional.cross_entropy(network(batch), classes).backward()

    return machine_of(Run(), ranks_per_node, compute)
