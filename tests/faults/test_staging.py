"""Faults while data is staged to jobs and results are copied back: lost nodes and full file systems."""

import json
from collections.abc import Iterator

import pytest

from carme.jobs import Job, JobState
from demo_site import DemoSite, wait_until
from faults.plan import boot, heal, kill
from patience import HANG

CACHE = "/var/cache/carme/data"
JOBS = f"{CACHE}/jobs"
TO = "/home/user1/went-down"
SOURCE = "/scratch/staging-faults"
FILES = 60_000
#: As many as take some seconds to copy; each has its own contents.
MAKE = f"""
import os
for number in range({FILES}):
    if number % 1000 == 0:
        os.makedirs(f"{SOURCE}/{{number // 1000}}")
    with open(f"{SOURCE}/{{number // 1000}}/{{number}}", "w") as file:
        file.write(f"{{number}}\\n" * (number % 50))
"""
DIGEST = "cd -P {} && find . -type f | LC_ALL=C sort | xargs cat | md5sum | cut -d' ' -f1"


@pytest.fixture(autouse=True)
def nothing_left(demo: DemoSite) -> Iterator[None]:
    yield
    heal(demo)
    demo.run("head", "sh", "-c", f"rm -rf {TO} {SOURCE} /scratch/carme-*")
    for node in ("n1", "n2"):
        demo.run(
            node, "sh", "-c", f"rm -rf {CACHE}/users/* && /opt/carme/venv/bin/carme-janitor", timeout=2 * HANG
        )


@pytest.fixture
def source(demo: DemoSite) -> str:
    """A folder that all hosts have; what its files hold, as a digest."""
    demo.run("head", "python3", "-c", MAKE)
    return demo.run("head", "sh", "-c", DIGEST.format(SOURCE), timeout=2 * HANG).stdout


def test_results_on_a_node_that_went_down_are_copied_when_it_is_back(demo: DemoSite) -> None:
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
        wait_until("Slurm has given the node up", lambda: not _active(demo, job_id), timeout=HANG)
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


def test_results_of_a_job_that_reaches_its_time_limit_are_copied(demo: DemoSite) -> None:
    """The job's data is on the scratch that all nodes share."""
    demo.run("head", "sh", "-c", f"mkdir -p {SOURCE} && seq 100 >{SOURCE}/numbers")
    script = (
        "cp $CARME_DATA/staging-faults/numbers $CARME_RESULTS/state; "
        "readlink -f $CARME_DATA/staging-faults >$CARME_RESULTS/place; exec sleep 600"
    )
    options = ["--time", "1m", "--stage", f"scratch:{SOURCE}", "--results", TO]
    job_id = _submit(demo, *options, "--", "sh", "-c", script)
    wait_until("its time is over", lambda: not _active(demo, job_id), timeout=2 * HANG)
    assert demo.job_state(job_id) is JobState.TIMEOUT
    wait_until("the results are out", lambda: demo.run("head", "cat", f"{TO}/place", check=False).stdout)
    assert demo.run("head", "cat", f"{TO}/place").stdout.startswith("/scratch/carme-")
    assert demo.run("head", "cat", f"{TO}/state").stdout == "".join(f"{number}\n" for number in range(1, 101))


def test_a_job_whose_node_is_killed_during_the_copy_starts_on_another(demo: DemoSite, source: str) -> None:
    job_id = _submit(demo, "--stage", SOURCE, "--", "sh", "-c", DIGEST.format("$CARME_DATA/staging-faults"))

    def half() -> str | None:
        """The node that has a part of the copy."""
        for node in ("n1", "n2"):
            if demo.run(node, "sh", "-c", f"ls -d {CACHE}/users/*/*/data/0", check=False).stdout:
                return node
        return None

    node = wait_until("data comes", half)
    kill(demo, node)
    wait_until("the job is over", lambda: not _active(demo, job_id), timeout=HANG)
    # The job went to another node, and had all of the data there.
    assert source in demo.carme("logs", str(job_id)).stdout
    boot(demo, node)
    heal(demo)
    demo.run(node, "systemctl", "start", "carme-janitor", timeout=2 * HANG)
    # What is not complete is not reported as a copy.
    assert not demo.run(node, "sh", "-c", f"ls {CACHE}/users/*/*/about.json", check=False).stdout
    assert " AvailableFeatures=carme_" not in demo.run("head", "scontrol", "-o", "show", "node", node).stdout
    assert not demo.run(node, "ls", JOBS).stdout.strip()

    other_node = "n2" if node == "n1" else "n1"
    demo.run("head", "scontrol", "update", f"NodeName={other_node}", "State=DRAIN", "Reason=test")
    try:
        again = _submit(
            demo, "--stage", SOURCE, "--", "sh", "-c", DIGEST.format("$CARME_DATA/staging-faults")
        )
        wait_until("the next job is over", lambda: not _active(demo, again), timeout=HANG)
    finally:
        demo.run("head", "scontrol", "update", f"NodeName={other_node}", "State=RESUME")
    # It resumed the copy, whose bytes are those of the source.
    assert source in demo.carme("logs", str(again)).stdout


def test_data_that_does_not_fit_ends_the_job_with_the_reason(demo: DemoSite, source: str) -> None:
    """Copies may take one file system's worth: here 16 MiB, as a real file system without more room."""
    assert source
    for node in ("n1", "n2"):
        _small(demo, node)
    try:
        job_id = _submit(demo, "--stage", SOURCE, "--", "hostname")
        wait_until("the job is over", lambda: not _active(demo, job_id), timeout=HANG)
        log = demo.carme("logs", str(job_id)).stdout
        assert "There is not enough space for" in log and "stage less, or stage to scratch" in log
        (job,) = [job for job in demo.carme_json("jobs", "--all-states") if job["id"] == job_id]
        assert "data" in Job.model_validate(job).explanation
        wait_until("nothing is left", lambda: not demo.run("n1", "ls", JOBS).stdout.strip())
    finally:
        for node in ("n1", "n2"):
            _large(demo, node)


def test_results_that_do_not_fit_stay_until_there_is_space(demo: DemoSite) -> None:
    """The target is really too small: the results stay, and are copied when there is space."""
    demo.run("head", "install", "-d", "-o", "user1", TO)
    nodes = ("n1", "n2")
    for node in nodes:
        demo.run(node, "mount", "-t", "tmpfs", "-o", "size=1m,mode=0777", "tmpfs", TO)
    mounted = True
    try:
        fill = "head -c 3000000 /dev/urandom >$CARME_RESULTS/big; md5sum <$CARME_RESULTS/big"
        job_id = _submit(demo, "--results", TO, "--", "sh", "-c", fill)
        wait_until("the job is over", lambda: not _active(demo, job_id))

        def log() -> str:
            return demo.carme("logs", str(job_id)).stdout

        wait_until("the log says so", lambda: "there is no space left. They stay on" in log())
        (node,) = [node for node in nodes if str(job_id) in demo.run(node, "ls", JOBS).stdout]
        for each in nodes:
            demo.run(each, "umount", TO)
        mounted = False
        demo.run(node, "systemctl", "start", "carme-janitor")
        wait_until("they are out", lambda: "Results: 1 files" in log())
        assert demo.run("head", "sh", "-c", f"md5sum <{TO}/big").stdout in log()
        assert not demo.run(node, "ls", JOBS).stdout.strip()
    finally:
        for node in nodes if mounted else ():
            demo.run(node, "umount", "--lazy", TO, check=False)


def _submit(demo: DemoSite, *arguments: str) -> int:
    return json.loads(demo.carme("submit", "--json", "--time", "5m", *arguments).stdout)["job_id"]


def _small(demo: DemoSite, node: str) -> None:
    """Let a node's cache lie on a file system of 16 MiB."""
    mount = f"mount -t tmpfs -o size=16m,mode=0711 tmpfs {CACHE} && mkdir -m 0711 {JOBS} {CACHE}/users"
    demo.run(node, "sh", "-c", mount)
    demo.run(node, "systemctl", "restart", "slurmd")


def _large(demo: DemoSite, node: str) -> None:
    demo.run(node, "systemctl", "stop", "slurmd")
    demo.run(node, "umount", "--lazy", CACHE)
    demo.run(node, "systemctl", "start", "slurmd")


def _running(demo: DemoSite, job_id: int) -> Job | None:
    job = Job.model_validate(next(listed for listed in demo.carme_json("jobs") if listed["id"] == job_id))
    return job if job.is_running else None


def _active(demo: DemoSite, job_id: int) -> bool:
    return any(job["id"] == job_id for job in demo.carme_json("jobs"))
