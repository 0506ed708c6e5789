"""Pipelines with stages on GPUs against one process: losses, gradients and states, in every schedule."""

# pyright: reportMissingImports=false

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from ranks import Checks
from torch import nn

from carme_runtime.pipeline import KINDS
from carme_runtime.torch import pipeline, trace
from carme_runtime.torch.parallel import join_run

torch.backends.cudnn.allow_tf32 = False
join_run()
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
check = Checks()
SAMPLES, STEPS = 16, 4
graphs: dict[Any, Any] = {}  # measured once for each model


class Residual(nn.Module):
    """Skips, and weights that the first and the last layer share."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return x @ self.embedding.weight.t()


def images() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).cuda()


def tokens_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return Residual(dropout).cuda()


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def batches(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(11)
    if kind == "tokens":
        return [tuple(torch.randint(50, (2, SAMPLES, 9)).cuda().unbind()) for _ in range(STEPS)]
    return [(torch.randn(SAMPLES, 3, 8, 8).cuda(), torch.randint(5, (SAMPLES,)).cuda()) for _ in range(STEPS)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(model: nn.Module, data: Any, autocast: bool = False) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    torch.manual_seed(21)
    for inputs, targets in data:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss))
    return losses


def compare(
    build: Any, kind: str, loose: float = 1.0, autocast: bool = False, evaluate: bool = False, **options: Any
) -> None:
    data = batches(kind)
    whole = build()
    expected = alone(whole, data, autocast)
    model = build()
    if rank == 0 and build not in graphs:
        graphs[build] = trace(model, data[0][0], samples=(4, SAMPLES), seconds=1)
    graph = graphs.get(build)
    optimizer = optimizer_of(model)
    staged, optimizer = pipeline(
        model, optimizer, example=data[0][0], strategy="pipeline", graph=graph, **options
    )
    losses = []
    torch.manual_seed(21)
    for inputs, targets in data:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            losses.append(float(staged.step(inputs, targets, loss=loss_of)))
        assert all(p.grad is None or p.grad.is_cuda for p in staged.parameters())
        staged.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(losses, expected, rtol=1e-4 * loose, atol=1e-5 * loose)
    state = staged.state_dict()
    for name, value in state.items():
        torch.testing.assert_close(
            value, whole.state_dict()[name].cpu(), rtol=1e-3 * loose, atol=1e-5 * loose
        )
    if evaluate:
        staged.optimizer_state_dict()
        staged.eval()
        with torch.no_grad():
            outputs = staged(data[0][0][:3])
        assert outputs.is_cuda
        torch.testing.assert_close(outputs, whole.eval()(data[0][0][:3]), rtol=1e-3, atol=1e-4)
    staged.close()


@check
def every_schedule() -> None:
    for schedule in KINDS if size > 1 else ("gpipe", "1f1b"):
        compare(tokens_model, "tokens", micro_batches=4, schedule=schedule, evaluate=schedule == "1f1b")


@check
def convolutions() -> None:
    for schedule in ("1f1b", "gpipe", *(["zb1p"] if size > 1 else [])):
        compare(images, "images", micro_batches=4, schedule=schedule)


@check
def chosen_by_itself() -> None:
    compare(tokens_model, "tokens")


@check
def dropout_draws_the_masks_of_one_process() -> None:
    compare(lambda: tokens_model(0.2), "tokens", micro_batches=4, schedule="1f1b")


@check
def autocast_to_bf16() -> None:
    compare(tokens_model, "tokens", loose=300, autocast=True, micro_batches=4, schedule="1f1b")


@check
def own_loop() -> None:
    data = batches("tokens")
    whole, model = tokens_model(), tokens_model()
    expected = alone(whole, data)
    optimizer = optimizer_of(model)
    staged: Any
    staged, optimizer = pipeline(model, optimizer, example=data[0][0], strategy="pipeline", micro_batches=4)
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = loss_of(staged(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(staged.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss))
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    state = copy.deepcopy(whole.state_dict())
    staged.load_state_dict(state)
    for name, value in staged.state_dict().items():
        assert torch.equal(value, state[name].cpu()), name
    staged.close()


@check
def the_plan_knows_the_gpu() -> None:
    data = batches("tokens")
    model = tokens_model()
    staged, _ = pipeline(model, optimizer_of(model), example=data[0][0], micro_batches=4)
    assert torch.cuda.get_device_name(0) in str(staged.plan().graph.device), staged.plan().graph.device
    staged.close()


failed = check.run(*sys.argv[1:])
print(f"DONE rank {rank} of {size}", flush=True)
dist.destroy_process_group()
os._exit(min(failed, 1))
