"""`carme-run --profile`: who waits for whom."""

import json
import re
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def test_the_rank_that_others_wait_for_waits_least(launcher, tmp_path):
    folder = tmp_path / "profile"
    run = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "2", "--profile", str(folder)]
    loader = "import runpy, carme_runtime.torch; runpy.run_path"
    program = tmp_path / "program.py"
    program.write_text(f"{loader}({str(PROGRAMS / 'profiled.py')!r}, run_name='__main__')\n")
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=150, check=False)
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
