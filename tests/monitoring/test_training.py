"""A real training run over two nodes: what its ranks report reaches Prometheus, boards, report and record."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Page

from carme.reports import read_record
from carme.validation import Visitor
from carme_monitoring.dashboards import BOARDS
from demo_site import ROOT, DemoSite, wait_until
from patience import HANG

from .conftest import Gpus
from .test_prometheus import value

PROGRAM = Path(__file__).with_name("train.py")
PICTURES = ROOT / "artifacts/monitoring"
#: What the demo's Slurm has no control groups for where the host has version 1 of them.
CANNOT_BE = {"Disks", "Threads"}


def empty(visitor: Visitor, where: str, boards: list[str], values: dict[str, str]) -> set[str]:
    """Panels of the boards with a query of Grafana that the portal answers with nothing."""
    found = set()
    for uid in boards:
        for panel in BOARDS[uid].panels:
            for query in panel.queries:
                requested = quote(re.sub(r"\$(\w+)", lambda name: values[name[1]], query))
                answer = visitor.fetch(f"{visitor.url}metrics/{where}/api/v1/query?query={requested}")
                if not answer.json()["data"]["result"]:
                    found.add(f"{uid}: {panel.title}")
    return found


def every_board_is_filled(demo: DemoSite, job: int) -> None:
    """Check that each panel of each board has data for its readers."""
    later = ("sbatch", "--begin=now+1hour", "--time=1", "--output=/dev/null", "--wrap=true")
    demo.run("head", *later, user="user2")
    of_job: dict[str, Any] = {"jobid": str(job), "node": "n1", "user": "user1", "account": "carme"}
    with demo.visitor("admin") as admin, demo.visitor("user1") as owner:
        wanted = {f"carme-job: {title}" for title in CANNOT_BE}
        left: set[str] = set()

        def filled() -> bool:
            left.clear()
            left.update(empty(admin, "all", list(BOARDS), of_job) - wanted)
            return not left

        try:
            wait_until("every board is filled", filled, timeout=HANG)
        except AssertionError as error:
            error.add_note(f"Nothing to show in: {sorted(left)}")
            raise
        assert empty(owner, "mine", ["carme-job", "carme-project"], of_job) <= wanted


def test_the_report_of_a_run_over_two_nodes_says_what_its_ranks_waited_for(
    demo: DemoSite, gpus: Gpus, page: Page, keep: Callable[[str], None]
) -> None:
    gpus.show("util=70", "util=5 xid=31 throttle=64", "util=65", "util=8")
    script = "/home/user1/monitored-train.py"
    demo.run("head", "tee", script, user="user1", data=PROGRAM.read_text())
    options = ("--json", "--image", "torch", "--nodes", "2", "--gpus", "2", "--time", "10m")
    done = demo.carme("submit", *options, "--name", "monitored", "--", "carme-run", "-n", "4", script)
    job = json.loads(done.stdout)["job_id"]

    labels = f'{{jobid="{job}",user="user1"}}'
    query = f"count(carme_training_loss{labels})"
    wait_until("four ranks report their progress", lambda: value(demo, query) == 4, timeout=HANG)
    assert value(demo, f"count(count by (node) (carme_training_ranks{labels}))") == 2
    assert value(demo, f"max(carme_training_ranks{labels})") == 4

    every_board_is_filled(demo, job)
    wait_until("the run is over", lambda: demo.job_state(job) == "COMPLETED", timeout=2 * HANG)

    report = demo.carme_json("report", str(job))
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "training.txt").write_text(demo.carme("report", str(job)).stdout)
    html = PICTURES / "training.html"
    html.write_text(demo.carme("report", str(job), "--html").stdout)
    page.goto(html.as_uri())
    page.set_viewport_size({"width": 1000, "height": 1500})
    keep("report-of-training")
    reported = report["usage"]["training"]
    each = reported["each"]
    assert [(rank["rank"], rank["node"]) for rank in each] == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    for rank in each:
        assert rank["step_seconds"] > 0.08 and rank["data_wait"] > 0.3 and rank["loss"] is not None
        assert 0 < rank["samples_per_second"] < 100
    assert reported["ranks"] == 4 and reported["loss"] is not None
    # Eight samples of 10 ms each: more than half of a step on any machine that trains at all.
    assert reported["step_seconds"] > 0.08 and reported["data_wait"] > 0.3
    assert 0 < reported["samples_per_second"] < 4 * 100
    assert "loader" in {advice["topic"] for advice in report["advice"]}
    assert {"wait", "samples", "loss"} <= {curve["what"] for curve in report["curves"]}

    def comment() -> str:
        form = ("--noheader", "--parsable2", "--allocations", "--format=AdminComment")
        return demo.run("head", "sacct", f"--jobs={job}", *form).stdout.strip()

    written = read_record(wait_until("its record is in the accounting", comment, timeout=HANG))
    assert written is not None and written.training is not None and written.training.ranks == 4
    wait_until("its series are gone", lambda: value(demo, query) is None, timeout=HANG)
