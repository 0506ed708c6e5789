"""Forward passes that are computed again where that is cheaper than moving what they leave."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import carme_runtime
from carme_runtime.out_of_core.recomputing import Recomputing
from carme_runtime.out_of_core.trace import Operation, Trace
from patience import HANG

from .memory_limits import limit
from .test_memory import LIBRARIES, PROGRAM, finish, losses, start

pytestmark = pytest.mark.timeout(8 * HANG)
LIMIT = f"{LIBRARIES + 80}M"
SLOW, FAST = 60, 100_000  # MiB in a second


def run(*arguments: str | int | Path) -> list[dict[str, Any]]:
    return finish(start(*arguments, program=PROGRAM.with_name("recomputed.py")))


def test_with_a_slow_disk_layers_are_computed_again_to_the_same_losses(tmp_path: Path) -> None:
    alone = losses(run(SLOW))
    moved, again = run(SLOW, LIMIT, tmp_path), run("--recompute", SLOW, LIMIT, tmp_path)
    assert losses(moved) == losses(again) == alone  # masks of Dropout and BatchNorm's statistics, too
    never, some = moved[-1]["plan"], again[-1]["plan"]
    assert never["recomputed"]["reason"] == "adopt(..., recompute=True) asks for it"
    chosen = some["recomputed"]
    assert chosen["reason"] == "" and 1 <= chosen["groups"] < chosen["of"]  # not the one with BatchNorm
    assert 0 < chosen["seconds"] < chosen["instead_seconds"]
    assert some["read"] + some["written"] < 0.7 * (never["read"] + never["written"])
    assert some["measured_seconds"] < never["measured_seconds"]
    assert "groups of layers" in again[-1]["text"] and "to the disk and back takes" in again[-1]["text"]


def test_where_all_fits_nothing_is_computed_again(tmp_path: Path) -> None:
    chosen = run("--recompute", FAST, f"{LIBRARIES + 400}M", tmp_path)[-1]["plan"]["recomputed"]
    assert chosen["groups"] == 0 and chosen["reason"].startswith("moving what layers leave")


def test_a_model_without_layers_in_a_row_has_nothing_to_compute_again(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        model = nn.Bilinear(4, 4, 4)
        model, optimizer = budget.adopt(model, torch.optim.SGD(model.parameters(), 0.1), recompute=True)
        model(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert "the model has no layers in a row" in str(budget.plan())


class Recorded:
    """The operations of a step of four layers: each makes a block of 1 MiB in 10 ms for its backward pass.

    Args:
        layers: Whose forward passes are those.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self.steps = SimpleNamespace(position=-1)
        for layer in layers:
            layer.register_forward_pre_hook(self._note)
        forward = [
            Operation("forward", uses=(n - 1,) if n else (), makes=((n, 1 << 20),), seconds=0.01)
            for n in range(4)
        ]
        backward = [
            Operation("backward", uses=(n, n - 1) if n else (n,), dies=(n,), seconds=0.01)
            for n in reversed(range(4))
        ]
        self.trace = Trace([*forward, *backward], dict.fromkeys(range(4), 1 << 20))

    def _note(self, *_: Any) -> None:
        self.steps.position += 1

    def block_of(self, _: torch.Tensor) -> Any:
        """That of a group's result, which is asked for behind the last layer."""
        return SimpleNamespace(label=self.steps.position)

    def choose(self, model: nn.Sequential, mib_per_second: float) -> Recomputing:
        """What is chosen after two steps with so fast a disk, and room for two of the blocks."""
        recomputing = Recomputing(model, self)  # pyright: ignore[reportArgumentType]
        for _ in range(2):
            self.steps.position = -1
            model(torch.ones(2, 4)).sum().backward()
            rate = mib_per_second * (1 << 20)
            recomputing.end_step(self.trace, 2 << 20, rate, rate)
        return recomputing


def row(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize(("rate", "groups"), [(1, 1), (100_000, 0)])
def test_what_is_computed_again_depends_on_the_disk(rate: float, groups: int) -> None:
    found = Recorded(model := row(nn.Tanh())).choose(model, rate).found
    assert (found.groups, found.of) == (groups, 2)
    assert found.reason == (
        ""
        if groups
        else "moving what layers leave for the backward pass takes no longer than computing it again"
    )


def test_layers_that_change_their_statistics_later_on_do_it_once() -> None:
    model, plain = row(nn.BatchNorm1d(4)).eval(), row(nn.BatchNorm1d(4)).eval()
    assert Recorded(model).choose(model, 1).found.groups
    for each in (model, plain):
        each.zero_grad()
        each.train()
        for step in range(3):
            each(torch.arange(8.0).reshape(2, 4) * step).sum().backward()
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # pyright: ignore[reportArgumentType]


def test_layers_that_are_changed_after_the_adoption_are_those_that_run(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        model = row(nn.Tanh())
        model, _ = budget.adopt(model, torch.optim.SGD(model.parameters(), 0.1), recompute=True)
        x = torch.ones(2, 4)
        for change in (
            lambda: model.__setitem__(2, nn.Linear(4, 3)),
            lambda: model.append(nn.Linear(3, 5)),
            lambda: model.__delitem__(1),
        ):
            change()
            expected = x
            for layer in model:
                expected = layer(expected)
            assert torch.equal(model(x), expected)
