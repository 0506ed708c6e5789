"""Models are measured under a limit of memory."""

import threading
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
BRING, READ = store.Store._bring, spill.SpillFile.read


class Clock:
    """Time that passes in reads of a disk alone, while an operation waits for its tensors."""

    def __init__(self) -> None:
        self.now, self._waits, self._lock = 0.0, False, threading.Lock()

    def perf_counter(self) -> float:
        return self.now

    def bring(self, *arguments: Any) -> None:
        with self._lock:
            self._waits = True
        try:
            BRING(*arguments)
        finally:
            with self._lock:
                self._waits = False

    def read(self, *arguments: Any) -> None:
        with self._lock:
            self.now += self._waits
        READ(*arguments)


def test_times_of_operators_are_without_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan adds what its stages move. Gradients to which others are added take a small part of memory."""
    clock = Clock()
    with carme_runtime.memory(limit(), tmp_path), monkeypatch.context() as patch:
        model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
        traced, example = capture(model, (torch.ones(8, 1024),), (), False), (torch.ones(8, 1024),)
        for module in (store, measuring):
            patch.setattr(module, "time", clock)
        patch.setattr(store.Store, "_bring", lambda *arguments: clock.bring(*arguments))
        patch.setattr(spill.SpillFile, "read", lambda *arguments: clock.read(*arguments))
        graph = measuring.measured(traced, example, (8,))
        assert clock.now  # its weights and gradients are larger than the limit
        room = host_room()
        assert room is not None
        assert 8 * len(measuring._Gradients(model.parameters())._memory) <= room.bytes
        for operator in graph.operators:
            timing = operator.timings[0]
            assert timing.forward_ms == timing.backward_ms == operator.accumulating_ms == 0, operator
