"""Checkpoints of training in less memory than it needs: they count against the limit as all else does."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carme_runtime
from carme_runtime.checkpoint import Checkpoints
from carme_runtime.out_of_core import pages
from patience import HANG

from .memory_limits import MIB, limit


def stack_of_layers(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and momentum of 48 MiB each."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 1024)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.timeout(5 * HANG)  # a busy disk
def test_checkpoints_are_saved_and_loaded_within_the_limit(tmp_path: Path) -> None:
    """A checkpoint of 96 MiB, where 40 are left for blocks; written with a limit, and without one."""
    (spill := tmp_path / "spill").mkdir()
    model, optimizer = stack_of_layers(0)
    step_of(model, optimizer)
    Checkpoints(tmp_path / "free").save(1, model=model, optimizer=optimizer, epoch=1).wait()
    expected = [step_of(model, optimizer) for _ in range(2)]
    del model, optimizer
    for where in ("free", "limited"):
        with carme_runtime.memory(most := limit(), spill) as budget:
            model, optimizer = budget.adopt(*stack_of_layers(1))
            pages.forget_peak()
            values = Checkpoints(tmp_path / where).resume(model=model, optimizer=optimizer)
            assert values == {"step": 1, "epoch": 1}
            if where == "free":
                checkpoints = Checkpoints(tmp_path / "limited")
                checkpoints.save(1, model=model, optimizer=optimizer, epoch=1)
                checkpoints.wait()
            assert pages.peak() <= most
            assert [step_of(model, optimizer) for _ in range(2)] == expected
        del model, optimizer


@pytest.mark.timeout(5 * HANG)
def test_checkpoints_of_keras_are_saved_and_loaded_within_the_limit(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "programs/keras_checkpoint_in_less_memory.py", tmp_path],
        env=os.environ | {"KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for where in ("free", "limited"):
        assert f"{where} went on within the limit" in done.stdout


def test_a_checkpoint_that_cannot_be_written_within_a_limit_is_reported_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spill := tmp_path / "spill").mkdir()
    with carme_runtime.memory(limit(), spill):
        checkpoints = Checkpoints(tmp_path / "run")
        tensor = torch.ones(4 * MIB)

        def fail(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            saving = checkpoints.save(1, tensor=tensor)
        with pytest.raises(OSError, match="No space left"):
            saving.wait(HANG)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(2, tensor=tensor)
        checkpoints.save(2, tensor=tensor).wait(HANG)
        loaded = checkpoints.load()
        assert loaded and loaded[0] == 2 and torch.equal(loaded[1]["tensor"], tensor)
    assert checkpoints.steps() == [2]
