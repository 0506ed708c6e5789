"""Forward passes that are computed again where that is cheaper than moving what they leave."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carme_runtime
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


def test_with_a_fast_disk_nothing_is_computed_again(tmp_path: Path) -> None:
    chosen = run("--recompute", FAST, f"{LIBRARIES + 400}M", tmp_path)[-1]["plan"]["recomputed"]
    assert chosen["groups"] == 0 and chosen["reason"].startswith("moving what layers leave")


def test_a_model_without_layers_in_a_row_has_nothing_to_compute_again(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as budget:
        model = nn.Bilinear(4, 4, 4)
        model, optimizer = budget.adopt(model, torch.optim.SGD(model.parameters(), 0.1), recompute=True)
        model(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert "the model has no layers in a row" in str(budget.plan())
