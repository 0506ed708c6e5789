"""Daemons that hold a large site do not look for cycles after each snapshot of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import carme
from carme.garbage import THRESHOLDS

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

BROKER = """
import gc, json, os, signal, sys
from carme.broker import daemon
from carme.broker.service import Broker
from carme.slurm.commands import SlurmCommands

def notify(state):
    if state == "READY=1":
        found = [type(each).__name__ for each in gc.get_objects() if type(each) in (Broker, SlurmCommands)]
        print(json.dumps([gc.get_freeze_count(), gc.get_threshold(), found]))
        os.kill(os.getpid(), signal.SIGTERM)

daemon.notify = notify
sys.exit(daemon.main(["--config", sys.argv[1]]))
"""
CONFIGURATION = """
[site]
url = "https://carme.example.org"
[slurm]
cluster = "c"
adapter = "commands"
[broker]
socket = "{folder}/s"
audit_log = "{folder}/audit.jsonl"
state_directory = "{folder}/state"
"""


def test_garbage_collection_skips_modules_and_frees_old_snapshots() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(carme.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    frozen, most = map(int, done.stdout.split())
    assert frozen > 10_000
    assert most <= 22, "one of a large site has 7 MB"


def test_the_broker_does_so_once_its_services_and_its_adapter_are_there(tmp_path: Path) -> None:
    (tmp_path / "carme.toml").write_text(CONFIGURATION.format(folder=tmp_path))
    environment = os.environ | {"PYTHONPATH": str(Path(carme.__file__).parents[1])}
    command = [sys.executable, "-c", BROKER, str(tmp_path / "carme.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    frozen, thresholds, looked_through = json.loads(done.stdout)
    assert frozen > 10_000 and thresholds == list(THRESHOLDS)
    assert looked_through == []
