"""From a job's load to what people read: exporters, Prometheus, alerts, the report, the accounting."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from carme.reports import read_record
from demo_metrics import CURL, READER
from demo_site import DemoSite, wait_until
from patience import HANG

from .conftest import Gpus

LONG_ENOUGH = 150  # seconds: shorter jobs get no advice


def ask(demo: DemoSite, query: str) -> list[dict[str, Any]]:
    """The value of a query to Prometheus now."""
    address = f"https://127.0.0.1:9090/api/v1/query?query={quote(query)}"
    return json.loads(demo.run("head", *READER, address).stdout)["data"]["result"]


def value(demo: DemoSite, query: str) -> float | None:
    found = ask(demo, query)
    return float(found[0]["value"][1]) if found else None


def alerts(demo: DemoSite) -> dict[str, dict[str, str]]:
    """Labels of the alerts that Alertmanager knows, by name."""
    reported = json.loads(demo.run("head", *READER, "https://127.0.0.1:9093/api/v2/alerts").stdout)
    return {alert["labels"]["alertname"]: alert["labels"] for alert in reported}


def test_every_exporter_is_scraped(demo: DemoSite) -> None:
    def up() -> bool:
        found = {
            series["metric"].get("node", series["metric"]["job"]): series["value"][1]
            for series in ask(demo, "up")
        }
        names = [machine.name for machine in demo.settings.machines() if not machine.is_head]
        return all(found.get(name) == "1" for name in (*names, "carme-cluster", "prometheus"))

    wait_until("all targets are up", up)


def test_users_cannot_ask_prometheus_or_its_alerts(demo: DemoSite) -> None:
    for port in (9090, 9093):
        for scheme in ("http", "https"):
            requested = (*CURL, "--insecure", f"{scheme}://127.0.0.1:{port}/api/v2/alerts")
            done = demo.run("head", *requested, user="user2", check=False)
            # A plain request is answered with the sentence that this is TLS, and with nothing else.
            assert done.returncode != 0 and done.stdout == ""
    for path in ("/var/lib/prometheus", "/etc/carme/monitoring/prometheus", "/etc/prometheus/carme-rules"):
        assert demo.run("head", "ls", path, user="user2", check=False).returncode != 0
    assert demo.run("head", "cat", "/etc/prometheus/carme-web.yml", user="user2", check=False).returncode != 0


def test_a_lost_gpu_and_an_xid_reach_the_administrators(demo: DemoSite, gpus: Gpus) -> None:
    gpus.show("util=0", "util=0", "util=0", "util=0")
    wait_until("Prometheus sees the GPUs", lambda: value(demo, 'sum(carme_gpu_up{node="n1"})') == 4)
    gpus.show("util=0 xid=79", "util=0", "util=0", "util=0")
    wait_until("the XID is an alert", lambda: "CarmeGpuXid" in alerts(demo), timeout=2 * HANG)
    found = alerts(demo)["CarmeGpuXid"]
    assert (found["node"], found["gpu"], found["xid"], found["audience"]) == ("n1", "0", "79", "admin")


@pytest.fixture
def idle_job(demo: DemoSite, gpus: Gpus) -> Callable[[], int]:
    """Runs a job of user1 with two GPUs, one of them at work, until it is over."""

    def run() -> int:
        done = demo.run(
            *(
                "head",
                "sbatch",
                "--parsable",
                "--nodelist=n1",
                "--gres=gpu:2",
                "--cpus-per-task=2",
                "--mem=9G",
            ),
            *("--time=10", "--chdir=/", "--output=/dev/null", "--job-name=half idle"),
            *("--wrap", f"sleep {LONG_ENOUGH}"),
            user="user1",
        )
        job = int(done.stdout)
        record = f"/run/carme/allocations/{job}.json"
        wait_until("the job runs", lambda: not demo.run("n1", "test", "-e", record, check=False).returncode)
        allotted = {int(word) for word in json.loads(demo.run("n1", "cat", record).stdout)["gpus"].split(",")}
        working = min(allotted)
        gpus.show(*(f"util={80 if place == working else 0}" for place in range(4)))
        return job

    return run


def test_a_report_is_the_same_from_metrics_and_from_the_accounting(
    demo: DemoSite, idle_job: Callable[[], int]
) -> None:
    job = idle_job()
    query = f'count(carme_job_gpu_utilization_ratio{{jobid="{job}",user="user1"}})'
    wait_until("Prometheus knows the job's GPUs", lambda: value(demo, query) == 2)
    # Slurm drops a job seconds after its end, so this polls until then.
    wait_until("the job is over", lambda: demo.job_state(job) == "COMPLETED", timeout=LONG_ENOUGH + 120)

    report = demo.carme_json("report", str(job))
    assert report["source"] == "live"
    busy = sorted(gpu["busy"] for gpu in report["usage"]["gpus"])
    assert busy[0] == 0 and busy[1] > 0.5
    assert report["energy_joules"] > 0
    changes = {advice["topic"]: advice["change"] for advice in report["advice"]}
    assert changes["gpu"].startswith("--gpus 1, or: carme-run -n 2")
    assert changes["memory"].startswith("--memory ")
    text = demo.carme("report", str(job)).stdout
    assert "1 of the job's 2 GPUs did nothing" in text
    assert demo.carme("report", str(job), "--html").stdout.count("<svg") >= 3
    refused = demo.carme("report", str(job), user="user2", check=False)
    assert refused.returncode == 1 and f"There is no job {job} of user2" in refused.stderr

    def comment() -> str:
        form = ("--noheader", "--parsable2", "--allocations", "--format=AdminComment")
        return demo.run("head", "sacct", f"--jobs={job}", *form).stdout.strip()

    written = read_record(wait_until("its record is in the accounting", comment, timeout=HANG))
    assert written is not None
    assert sorted(gpu.busy for gpu in written.gpus)[1] > 0.5
    # Without Prometheus the record has the same.
    demo.run("head", "systemctl", "stop", "prometheus")
    try:
        saved = demo.carme_json("report", str(job))
    finally:
        demo.run("head", "systemctl", "start", "prometheus")
    assert saved["source"] == "record"
    assert {advice["topic"] for advice in saved["advice"]} == set(changes)
