"""Staging on the demo: data before the start of a job, on the node's own disk, cached, and results."""

import json
import re
from collections.abc import Iterator

import pytest

from carme.jobs import Job
from demo_site import DemoSite, wait_until
from patience import HANG
from points import training

CACHE = "/var/cache/carme/data"
OPTIONS = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "10", "stage": "lines"}
MAKE = """
import os, random
os.makedirs("/scratch/lines", exist_ok=True)
chance = random.Random(1)
for number in range(200):
    with open(f"/scratch/lines/part{number}", "w") as file:
        for _ in range(20):
            x = chance.random()
            file.write(f"{x} {3 * x + 1}\\n")
"""


@pytest.fixture
def lines(demo: DemoSite) -> Iterator[None]:
    """A dataset of the site; no node has a copy of it."""
    demo.run("head", "python3", "-c", MAKE)
    demo.run("head", "/opt/carme/venv/bin/carme", "datasets", "add", "--site", "lines", "/scratch/lines")
    yield
    demo.run("head", "/opt/carme/venv/bin/carme", "datasets", "remove", "--site", "lines", check=False)
    demo.run("head", "rm", "-rf", "/scratch/lines", "/home/user1/lines-results", "/home/user1/stopped")
    for node in ("n1", "n2"):
        demo.run(node, "sh", "-c", f"rm -rf {CACHE}/users/* && /opt/carme/venv/bin/carme-janitor")


def brought(demo: DemoSite) -> list[Job]:
    """The stage-in jobs of user1 by the accounting, as Slurm's queue soon drops them."""
    found = demo.carme_json("jobs", "--history")
    return [Job.model_validate(job) for job in found if job["name"].startswith("stage-")]


def results(demo: DemoSite, path: str) -> str:
    return demo.run("head", "cat", path, check=False).stdout


@pytest.mark.alone  # it goes where its data is, if that node has room
@pytest.mark.usefixtures("lines")
def test_a_session_trains_from_its_node_and_the_next_one_finds_the_copy(demo: DemoSite) -> None:
    before = {job.id for job in brought(demo)}
    with demo.visitor("user1") as visitor:
        name = visitor.start(OPTIONS | {"title": "Staged", "results": "/home/user1/lines-results"})
        visitor.wait(name, "ready", timeout=HANG)
        (first,) = wait_until(
            "the accounting knows what brought it",
            lambda: [job for job in brought(demo) if job.id not in before and job.node_list],
        )
        assert first.node_list and not first.gpus
        log = demo.carme("logs", str(first.id)).stdout
        assert "lines: copied to local" in log
        with visitor.kernel(visitor.open(name)) as kernel:
            cell = kernel.run(training("lines"), timeout=HANG)
        assert cell.ok, cell.output
        points, path, slope, offset, changed = json.loads(cell.output)
        assert points == 4000 and path.startswith(f"{CACHE}/users/") and changed == "Read-only file system"
        assert (slope, offset) == (3, 1)
        # It ran on the node with its data, and Slurm lists the copy as a feature.
        assert demo.job_of(name)["node_list"] == first.node_list
        node = ("scontrol", "-o", "show", "node", first.node_list)
        copy = re.compile(r"ActiveFeatures=\S*carme_[0-9]+_[0-9a-f]{24}")
        wait_until("Slurm knows of the copy", lambda: copy.search(demo.run("head", *node).stdout))
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
        wait_until(
            "the results are out",
            lambda: results(demo, "/home/user1/lines-results/line.json") == "[3.0, 1.0]",
        )

        name = visitor.start(OPTIONS | {"title": "Staged again"})
        visitor.wait(name, "ready", timeout=HANG)
        assert {job.id for job in brought(demo)} - before == {first.id}
        job = demo.job_of(name)
        assert job["node_list"] == first.node_list
        assert "lines: it was there already" in demo.carme("logs", str(job["id"])).stdout
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
    gone = f"{CACHE}/jobs/"
    wait_until("no job's folder is left", lambda: not demo.run(first.node_list, "ls", gone).stdout.strip())


def test_several_nodes_make_one_copy(demo: DemoSite) -> None:
    demo.run("head", "python3", "-c", MAKE.replace("/scratch/lines", "/scratch/many"))
    copied = "/home/user1/copied"
    try:
        reported = demo.carme("data", "copy", "--nodes", "2", "--json", "/scratch/many", copied)
        end = json.loads(reported.stdout.splitlines()[-1])
        assert end["ok"] and end["copied"] == 200 and end["engine"] == "native"
        assert end["hosts"] and set(end["hosts"]) <= {"n1", "n2"}
        compared = demo.carme("data", "verify", "/scratch/many", copied)
        assert compared.stdout.startswith("200 files are the same")
    finally:
        demo.run("head", "rm", "-rf", "/scratch/many", copied)


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize("image", [(), ("--image", "base")])
def test_results_of_a_job_that_fails_are_copied(demo: DemoSite, image: tuple[str, ...]) -> None:
    def submit(script: str) -> int:
        options = [
            "--json",
            *image,
            "--time",
            "5m",
            "--stage",
            "ram:/scratch/lines",
            "--results",
            "/home/user1/stopped",
        ]
        return json.loads(demo.carme("submit", *options, "--", "sh", "-c", script).stdout)["job_id"]

    before = {job.id for job in brought(demo)}
    job_id = submit("ls $CARME_DATA/lines | wc -l >$CARME_RESULTS/state; exit 3")
    wait_until("the results are out", lambda: results(demo, "/home/user1/stopped/state") == "200\n")
    # What lies in memory comes with the job itself.
    assert {job.id for job in brought(demo)} <= before
    wait_until("the log says it", lambda: "Results: 1 files" in demo.carme("logs", str(job_id)).stdout)


@pytest.mark.usefixtures("lines")
def test_what_cannot_be_staged_is_reported(demo: DemoSite) -> None:
    refused = demo.carme("submit", "--stage", "lines2", "--", "hostname", check=False)
    assert refused.returncode == 1 and "There is no dataset 'lines2'; there are: lines" in refused.stderr
