"""The first forward pass runs while rank 0's parameters still travel.

Argument 1: `overlap`, `uses`, `divided`, `compiled` or `mistakes`.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import parallelize
from carme_runtime.torch.parallel import join_run

torch.set_num_threads(1)
join_run()
rank, size = dist.get_rank(), dist.get_world_size()


def build(seed: int) -> nn.Module:
    """Layers, one of them not contiguous in memory, and statistics that change."""
    torch.manual_seed(seed)
    wide = nn.Conv2d(16, 24, 3, padding=1).to(memory_format=torch.channels_last)  # pyright: ignore
    last = nn.Linear(24, 8)
    last.bias.requires_grad_(False)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last
    )


def rank_0_has(model: nn.Module) -> None:
    """Every rank's state is that of rank 0's seed."""
    expected = build(0).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def overlap() -> None:
    """Rank 0 does not send the last parameters before rank 1 has run the first layer."""
    send: Any = Group.broadcast
    sent = [0]

    def hold(self: Group, *arguments: Any, **options: Any) -> Any:
        if options.get("asynchronous"):
            sent[0] += 1
            if sent[0] == 3:
                dist.recv(torch.empty(1), 1)
        return send(self, *arguments, **options)

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    if rank == 0:
        Group.broadcast = hold
    else:
        model[0].register_forward_hook(lambda *_: dist.send(torch.ones(1), 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, optimizer, start="streamed")
    model(torch.ones(2, 8)).sum().backward()
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for tested, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(tested, reference)
    optimizer.step()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = model(torch.randn(4, 3, 8, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build_parallel(seed: int, **options: Any):
    model = build(seed)
    return parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def uses() -> None:
    """Whatever uses the model first has rank 0's parameters."""
    model, _ = build_parallel(rank, start="streamed")
    rank_0_has(model)
    model, _ = build_parallel(rank, start="streamed")
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = build(0).eval()(x)
        assert torch.equal(model.eval()(x), expected)  # pyright: ignore[reportCallIssue]
    model(x)
    assert not model[3]._forward_pre_hooks, "the model was not left to itself"  # pyright: ignore
    model, _ = build_parallel(rank, start="streamed")
    first = model[0](x)  # pyright: ignore[reportIndexIssue]
    assert torch.equal(first, build(0)[0](x))  # pyright: ignore[reportIndexIssue]
    model, _ = build_parallel(rank, start="streamed")
    second = build(5).state_dict()
    model.load_state_dict(second)  # which nothing that travels comes after
    assert all(torch.equal(value, second[name]) for name, value in model.state_dict().items())
    model, optimizer = build_parallel(rank, start="streamed")
    whole, first_optimizer = build_parallel(rank)
    train(model, optimizer)
    train(whole, first_optimizer)
    for (name, tested), reference in zip(
        model.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        assert torch.equal(tested, reference), name
    twin = copy.deepcopy(model)
    twin(x)  # has no part in the run
    # It is never used: nobody waits for it in vain.
    model, optimizer = build_parallel(rank, start="streamed")


def divided() -> None:
    """Both ways to travel together."""
    model, optimizer = build_parallel(rank, start="streamed", shard_optimizer=True, overlap_step=True)
    whole, first = build_parallel(rank)
    train(model, optimizer)
    train(whole, first)
    for (name, tested), reference in zip(
        model.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(tested, reference, rtol=1e-5, atol=1e-6, msg=lambda t: f"{name}: {t}")  # noqa: B023


def compiled() -> None:
    """Compiled before and after, as a whole and a layer of it: bitwise as all would begin with rank 0's."""
    compilers: dict[str, Any] = {
        "before": lambda model: torch.compile(model, backend="eager"),
        "in place": lambda model: model.compile(backend="eager") or model,
        "a layer": lambda model: model[3].compile(backend="eager") or model,
    }
    losses: dict[tuple[str, str], list[float]] = {}
    for name, compile_it in compilers.items():
        for order in ("compiled first", "compiled last"):
            for start in ("", "streamed"):
                torch._dynamo.reset()
                model: Any = build(rank)
                model = compile_it(model) if order == "compiled first" else model
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                parallelize(model, optimizer, start=start)
                model = compile_it(model) if order == "compiled last" else model
                losses[name + order, start] = train(model, optimizer)
            assert losses[name + order, "streamed"] == losses[name + order, ""], (name, order, losses)


def mistakes() -> None:
    try:
        build_parallel(0, start="slowly")
    except InvalidCall as error:
        assert "no start 'slowly'" in str(error), error
        assert "streamed" in str(error), error
    else:
        raise AssertionError("a start that does not exist was not refused")


globals()[sys.argv[1]]()
dist.destroy_process_group()
