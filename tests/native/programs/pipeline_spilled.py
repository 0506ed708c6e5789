"""Stages under a limit of memory that is smaller than they are: they move to a folder and train alike.

pipeline_spilled.py FOLDER
"""

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from pipelined import alike
from torch import nn
from torch.nn import functional

import carme_runtime
import carme_runtime.out_of_core.budget  # large: the limit counts it from the beginning
from carme_runtime.out_of_core import pages
from carme_runtime.torch import pipeline

torch.set_num_threads(1)
MIB = 1 << 20
WIDTH, LAYERS, SAMPLES, STEPS = 512, 24, 32, 4


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A first pipeline, which loads what later ones need."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.ones(8, 8), torch.ones(8, 8)


def train(model: Any, optimizer: Any, step: Any) -> list[torch.Tensor]:
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
        optimizer.zero_grad()
        losses.append(step(model, inputs, targets))
        optimizer.step()
    return losses


def alone(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


def in_stages(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model.step(inputs, targets, loss=functional.mse_loss)


def main(folder: str) -> None:
    dist.init_process_group("carme")
    first, inputs, targets = small()
    tested, _ = pipeline(
        first, torch.optim.AdamW(first.parameters()), example=inputs, stages=2, micro_batches=2
    )
    tested.step(inputs, targets, loss=functional.mse_loss)
    tested.close()
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model: Any = nn.Sequential(*layers)
    reference = copy.deepcopy(model)
    expected = train(reference, torch.optim.AdamW(reference.parameters()), alone)
    weights = {name: each.detach().clone() for name, each in reference.named_parameters()}
    del reference
    assert pages.map_large_blocks(1 << 17)
    pages.free(pages.fill_heap(1 << 17))  # what has been freed goes back to the kernel
    pages.drop_library_pages()
    # A stage needs 48 MiB for its weights, gradients and moments. Libraries take some 20 MiB again.
    limit = pages.resident() + pages.page_tables() + 72 * MIB
    with carme_runtime.memory(limit, folder):
        optimizer: Any = torch.optim.AdamW(model.parameters())
        tested, optimizer = pipeline(
            model, optimizer, example=torch.randn(SAMPLES, WIDTH), stages=2, micro_batches=2
        )
        found = tested.plan()
        assert found.fits[dist.get_rank()].spilled_bytes > 0, found
        print(found, flush=True)
        for value, second in zip(train(tested, optimizer, in_stages), expected, strict=True):
            alike(value, second, "loss")
        for name, parameter in tested.named_parameters():
            alike(parameter.detach(), weights[name], name)
        tested.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
