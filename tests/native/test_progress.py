"""What ranks report of their training, with torch's own loaders and optimizers."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

PROGRAM = Path(__file__).parent / "programs/report_progress.py"


@pytest.mark.parametrize("how", ["ddp", "parallelize"])
def test_each_rank_reports_its_steps_samples_waits_and_loss(launcher, tmp_path, how):
    where = tmp_path / "socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(where))
    listener.setblocking(False)
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", str(PROGRAM), how]
    done = subprocess.run(
        run,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        env=os.environ | {"CARME_METRICS": str(where)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = {}
    while True:
        try:
            text = json.loads(listener.recv(4096))
        except BlockingIOError:
            break
        last[text["rank"]] = text
    listener.close()
    assert last.keys() == {0, 1}
    for text in last.values():
        assert (text["size"], text["steps"], text["samples"]) == (2, 8, 60)  # the evaluation does not count
        assert text["loss"] > 0
        assert 0 < text["wait"]["data"] <= text["seconds"]
        # DistributedDataParallel waits beside the main thread, maybe while that one has work of its own.
        assert 0 < text["wait"].get("ranks", 1e-9 * (how == "ddp")) <= text["seconds"]
