"""A real training run over two nodes: what its ranks tell reaches Prometheus, the report, the accounting."""

import json
from pathlib import Path

from carme.reports import read_record
from demo_site import ROOT, DemoSite, wait_until

from .test_prometheus import value

PROGRAM = Path(__file__).with_name("train.py")
PICTURES = ROOT / "artifacts/monitoring"


def test_the_report_of_a_run_over_two_nodes_says_what_its_ranks_waited_for(demo: DemoSite) -> None:
    script = "/home/user1/monitored-train.py"
    demo.run("head", "tee", script, user="user1", data=PROGRAM.read_text())
    options = ("--json", "--image", "torch", "--nodes", "2", "--time", "10m", "--name", "monitored")
    done = demo.carme("submit", *options, "--", "carme-run", "-n", "4", script)
    job = json.loads(done.stdout)["job_id"]

    whose = f'{{jobid="{job}",user="user1"}}'
    query = f"count(carme_training_loss{whose})"
    wait_until("four ranks tell how they go on", lambda: value(demo, query) == 4, timeout=180)
    assert value(demo, f"count(count by (node) (carme_training_ranks{whose}))") == 2
    assert value(demo, f"max(carme_training_ranks{whose})") == 4
    wait_until("the run is over", lambda: demo.job_state(job) == "COMPLETED", timeout=360)

    report = demo.carme_json("report", str(job))
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "training.txt").write_text(demo.carme("report", str(job)).stdout)
    (PICTURES / "training.html").write_text(demo.carme("report", str(job), "--html").stdout)
    told = report["usage"]["training"]
    assert told["ranks"] == 4 and told["loss"] is not None
    # Eight samples of 10 ms each: more than half of a step on any machine that trains at all.
    assert told["step_seconds"] > 0.08 and told["data_wait"] > 0.3
    assert 0 < told["samples_per_second"] < 4 * 100
    assert "loader" in {advice["topic"] for advice in report["advice"]}
    assert {"wait", "samples", "loss"} <= {curve["what"] for curve in report["curves"]}

    def comment() -> str:
        form = ("--noheader", "--parsable2", "--allocations", "--format=AdminComment")
        return demo.run("head", "sacct", f"--jobs={job}", *form).stdout.strip()

    written = read_record(wait_until("its record is in the accounting", comment, timeout=120))
    assert written is not None and written.training is not None and written.training.ranks == 4
    wait_until("its series are gone", lambda: value(demo, query) is None, timeout=120)
