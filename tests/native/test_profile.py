"""`carme-run --profile`: who waits for whom."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG

PROGRAMS = Path(__file__).parent / "programs"


def test_the_rank_that_others_wait_for_waits_least(launcher, tmp_path):
    folder = tmp_path / "profile"
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", "--profile", str(folder)]
    loader = "import runpy, carme_runtime.torch; runpy.run_path"
    program = tmp_path / "program.py"
    program.write_text(f"{loader}({str(PROGRAMS / 'profiled.py')!r}, run_name='__main__')\n")
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = re.findall(r"^ +(\d) +[\d.]+ +([\d.]+) % +([\d.]+) % +([\d.]+) % +(\d+)", done.stderr, re.M)
    assert [share[0] for share in shares] == ["0", "1"], done.stderr
    sums = [json.loads((folder / f"rank-{rank}.json").read_text())["carme"] for rank in (0, 1)]
    # Rank 1 sleeps for a second in all, in which rank 0 waits.
    assert sums[0]["waiting"] > sums[1]["waiting"] + 0.5, sums
    assert sums[0]["calls"] == sums[1]["calls"] >= 20 and sums[0]["bytes"] >= 10 * 100 * 101 * 4
    assert sums[0]["loader"] > 0
    kinds = {event.get("cat") for event in json.loads((folder / "rank-0.json").read_text())["traceEvents"]}
    assert {"waiting", "collective", "loader"} <= kinds


@pytest.mark.timeout(4 * HANG)
def test_passes_of_a_pipeline_are_seen(tmp_path):
    folder = tmp_path / "profile"
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", "--profile", str(folder)]
    program = [str(PROGRAMS / "planned.py"), "--stages"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*run, *program], capture_output=True, text=True, timeout=3 * HANG, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    idle = r"Rank 1, stage 1: idle for [\d.]+ % of its steps \(even stages: 33\.3 %\)\."
    assert re.search(idle, done.stderr), done.stderr
    picture = (folder / "schedule.svg").read_text()
    assert f"is drawn beside its schedule in {folder / 'schedule.svg'}." in done.stderr, done.stderr
    assert "Schedule 1f1b with even passes: idle at most 33.3 %" in picture
    measured = re.search(r"Measured: [\d.]+ ms, idle at most ([\d.]+) %", picture)
    assert measured and float(measured[1]) < 100, picture
    events = json.loads((folder / "rank-1.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "pipeline"]
    passes = [f"stage 1, {each} pass of micro-batch {m}" for m in (0, 1) for each in ("forward", "backward")]
    assert sorted(names) == sorted(passes)
    assert "message from rank 0" in {event["name"] for event in events if event.get("cat") == "waiting"}
