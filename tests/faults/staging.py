"""A node goes down under a job that has results on its disk: they come out when it is back."""

import json
from collections.abc import Iterator

import pytest

from carme.jobs import Job
from demo_site import DemoSite, wait_until

JOBS = "/var/cache/carme/data/jobs"
TO = "/home/user1/went-down"


@pytest.fixture(autouse=True)
def nothing_left(demo: DemoSite) -> Iterator[None]:
    yield
    demo.end_all_jobs()
    demo.run("head", "rm", "-rf", TO)


def test_results_on_a_node_that_went_down(demo: DemoSite) -> None:
    script = "echo half >$CARME_RESULTS/state; exec sleep 300"
    options = ["--json", "--time", "5m", "--results", TO]
    job_id = json.loads(demo.carme("submit", *options, "--", "sh", "-c", script).stdout)["job_id"]
    node = wait_until("the job runs", lambda: _running(demo, job_id)).node_list

    def written() -> bool:
        return bool(demo.run(node, "cat", f"{JOBS}/{job_id}/results/state", check=False).stdout)

    wait_until("it has written", written)
    demo.run(node, "systemctl", "stop", "slurmd")  # no epilog will run
    demo.run(node, "sh", "-c", "pkill -KILL slurmstepd; true")
    try:
        wait_until("Slurm has given the node up", lambda: not _active(demo, job_id), timeout=60)
        assert not demo.run("head", "cat", f"{TO}/state", check=False).stdout
    finally:
        demo.run(node, "systemctl", "start", "slurmd")
        demo.run("head", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def idle() -> bool:
        return (
            demo.run("head", "sinfo", "--noheader", f"--nodes={node}", "--format=%t").stdout.strip() == "idle"
        )

    wait_until("the node is back", idle)
    demo.run(node, "systemctl", "start", "carme-janitor")  # as its timer does
    wait_until(
        "the results are out", lambda: demo.run("head", "cat", f"{TO}/state", check=False).stdout == "half\n"
    )
    wait_until("nothing is left on the node", lambda: not demo.run(node, "ls", JOBS).stdout.strip())


def _running(demo: DemoSite, job_id: int) -> Job | None:
    job = Job.model_validate(next(one for one in demo.carme_json("jobs") if one["id"] == job_id))
    return job if job.is_running else None


def _active(demo: DemoSite, job_id: int) -> bool:
    return any(job["id"] == job_id for job in demo.carme_json("jobs"))
