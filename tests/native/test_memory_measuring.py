"""Models are measured under a limit of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carme_runtime
from carme_runtime.out_of_core import host_room, spill, store
from carme_runtime.torch import measuring
from carme_runtime.torch.tracing import capture
from patience import HANG

from .memory_limits import limit

pytestmark = pytest.mark.timeout(4 * HANG)


class Clock:
    """Time that passes in reads of a disk alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_times_of_operators_are_without_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan adds what its stages move. Gradients to which others are added take a small part of memory."""
    clock, read = Clock(), spill.SpillFile.read

    def slowly(*arguments: Any) -> Any:
        clock.now += 1
        return read(*arguments)

    with carme_runtime.memory(limit(), tmp_path), monkeypatch.context() as patch:
        model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
        traced, example = capture(model, (torch.ones(8, 1024),), (), False), (torch.ones(8, 1024),)
        for module in (store, measuring):
            patch.setattr(module, "time", clock)
        patch.setattr(spill.SpillFile, "read", slowly)
        graph = measuring.measured(traced, example, (8,))
        assert clock.now  # its weights and gradients are larger than the limit
        room = host_room()
        assert room is not None
        assert 8 * len(measuring._Gradients(model.parameters())._memory) <= room.bytes
        for operator in graph.operators:
            assert operator.timings[0].backward_ms == operator.accumulating_ms == 0, operator
