"""Daemons that hold a large site do not look for cycles after each snapshot of it."""

import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import carme
from carme.broker import daemon

PROGRAM = """
import gc, weakref
from carme.jobs import Cluster, Node
from carme.garbage import collect_rarely

nodes = [Node(name=f"n{number}", cpus=64, memory_mb=1, gpus={"a100": 4}) for number in range(2_000)]
text = Cluster(taken="2026-01-01T00:00:00Z", nodes=nodes).model_dump_json()
collect_rarely()
snapshots, most = [], 0
for _ in range(150):
    cluster = Cluster.model_validate_json(text)
    snapshots.append(weakref.ref(cluster))
    form = [cluster]
    form.append(form)
    most = max(most, sum(snapshot() is not None for snapshot in snapshots))
print(gc.get_freeze_count(), most)
"""


def test_modules_are_not_looked_through_and_snapshots_in_cycles_do_not_pile_up() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(carme.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    frozen, most = map(int, done.stdout.split())
    assert frozen > 10_000
    assert most <= 22, "one of a large site has 7 MB"


def test_the_broker_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        done.append("serve")

    monkeypatch.setattr(daemon, "collect_rarely", lambda: done.append("collect"))
    monkeypatch.setattr(daemon, "load", lambda _path: None)
    monkeypatch.setattr(daemon.asyncio, "run", run)
    assert daemon.main([]) == 0 and done == ["collect", "serve"]
