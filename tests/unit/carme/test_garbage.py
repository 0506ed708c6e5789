"""Daemons that hold a large site do not look for cycles after each snapshot of it."""

import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from carme.broker import daemon

PROGRAM = """
import gc
from carme.jobs import Cluster, Node
from carme.garbage import collect_rarely

nodes = [Node(name=f"n{number}", cpus=64, memory_mb=1, gpus={"a100": 4}) for number in range(2_000)]
text = Cluster(taken="2026-01-01T00:00:00Z", nodes=nodes).model_dump_json()
before = gc.get_stats()[2]["collections"] + (1 if RARELY else 0)
if RARELY:
    collect_rarely()
for _ in range(20):
    cluster = Cluster.model_validate_json(text)
print(gc.get_stats()[2]["collections"] - before, gc.get_freeze_count())
"""


@pytest.mark.parametrize("rarely", [False, True])
def test_reading_snapshots_stops_no_daemon_for_all_its_objects(rarely: bool) -> None:
    program = PROGRAM.replace("RARELY", str(rarely))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    complete, frozen = map(int, done.stdout.split())
    assert (complete == 0) is rarely
    assert (frozen > 10_000) is rarely


def test_the_broker_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        done.append("serve")

    monkeypatch.setattr(daemon, "collect_rarely", lambda: done.append("collect"))
    monkeypatch.setattr(daemon, "load", lambda _path: None)
    monkeypatch.setattr(daemon.asyncio, "run", run)
    assert daemon.main([]) == 0 and done == ["collect", "serve"]
