"""Jobs over two nodes that lose ranks, agents and nodes; part of `./test faults`."""

import json
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme.jobs import Job, JobState
from demo_site import DemoSite, wait_until
from patience import HANG

SCRIPT = Path(__file__).parent / "elastic_training.py"
BEGAN = re.compile(
    r"BEGAN (\d+) (?P<rank>\d+) (?P<size>\d+) (?P<host>\S+) (?P<process>\d+) (?P<agent>\d+) "
    r"epoch (?P<epoch>\d+)"
)


class Training:
    """A job that trains in a folder of user1, and its output."""

    def __init__(self, demo: DemoSite, *options: str) -> None:
        self.demo = demo
        self.folder = f"/home/user1/elastic-{secrets.token_hex(4)}"
        demo.run("head", "install", "-d", "-m", "700", self.folder, user="user1")
        demo.run("head", "tee", f"{self.folder}/train.py", user="user1", data=SCRIPT.read_text())
        run = ["carme-run", "-n", "4", "--devices-per-rank", "1", *options, f"{self.folder}/train.py"]
        self.job_id = submit(demo, "torch", *run)

    def log(self) -> str:
        return self.demo.carme("logs", str(self.job_id)).stdout

    def ranks(self, start: int, size: int) -> list[re.Match[str]]:
        """The ranks of a start, once all of them have begun and a checkpoint is written."""

        def begun() -> list[re.Match[str]]:
            found = [match for match in BEGAN.finditer(self.log()) if int(match[1]) == start]
            return found if len(found) == size else []

        found = wait_until(f"start {start} has {size} ranks", begun, timeout=HANG)
        assert {int(match["size"]) for match in found} == {size}, self.log()
        return found

    def says(self, words: str) -> None:
        wait_until(f"the log says {words!r}", lambda: words in self.log(), timeout=HANG)

    def trains(self) -> None:
        """Return when there are newer checkpoints."""
        listed = ("ls", "-t", f"{self.folder}/checkpoints")

        def newest() -> set[str]:
            return set(self.demo.run("head", *listed, user="user1", check=False).stdout.split())

        before = newest()
        wait_until("a checkpoint is written", lambda: newest() - before)


@pytest.fixture(autouse=True)
def nothing_left(demo: DemoSite) -> Iterator[None]:
    yield
    demo.end_all_jobs()
    demo.run("head", "sh", "-c", "rm -rf /home/user1/elastic-*")


def submit(demo: DemoSite, image: str, *command: str) -> int:
    options = ["--json", "--time", "15m", "--nodes", "2", "--gpus", "2", "--image", image]
    return json.loads(demo.carme("submit", *options, "--", *command).stdout)["job_id"]


def job(demo: DemoSite, job_id: int) -> Job:
    return Job.model_validate(
        next(listed for listed in demo.carme_json("jobs", "--all-states") if listed["id"] == job_id)
    )


def over(demo: DemoSite, job_id: int) -> Job:
    return wait_until("the job is over", lambda: known if (known := job(demo, job_id)).is_over else None)


def lose(demo: DemoSite, node: str) -> None:
    """The node is gone for Slurm, and nothing of the job runs there any more."""
    demo.run(node, "systemctl", "stop", "slurmd")
    demo.run(node, "sh", "-c", "pkill -KILL slurmstepd; pkill -KILL -u user1; true")


def bring_back(demo: DemoSite, node: str) -> None:
    demo.run(node, "systemctl", "start", "slurmd")
    demo.run("head", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    wait_until(
        "the node is back",
        lambda: (
            demo.run("head", "sinfo", "--noheader", f"--nodes={node}", "--format=%t").stdout.strip() == "idle"
        ),
    )


def test_a_run_shrinks_and_grows_and_its_job_outlives_a_node(demo: DemoSite) -> None:
    training = Training(demo, "--max-restarts", "5")
    first = training.ranks(0, 4)
    assert {rank["host"] for rank in first} == {"n1", "n2"}
    training.trains()
    victim = next(rank for rank in first if rank["rank"] == "3")
    demo.run(victim["host"], "kill", "-9", victim["process"])
    second = training.ranks(1, 3)
    training.trains()

    agent = next(rank for rank in second if rank["host"] == "n2")["agent"]
    demo.run("n2", "kill", "-9", agent)
    training.says("Restart 2 of 5: 2 ranks go on, 3 there were before.")
    training.says("A node has come: 4 ranks go on, 2 there were before.")
    training.ranks(3, 4)
    training.trains()

    try:
        lose(demo, "n2")
        training.says("Restart 3 of 5: 2 ranks go on, 4 there were before.")
        training.ranks(4, 2)
        wait_until(
            "Slurm has taken the node from the job", lambda: job(demo, training.job_id).node_list == "n1"
        )
        training.trains()
    finally:
        bring_back(demo, "n2")
    demo.run("head", "touch", f"{training.folder}/stop", user="user1")
    assert over(demo, training.job_id).exit_code == 0, training.log()
    log = training.log()
    assert "Restart 1 of 5: 3 ranks go on, 4 there were before." in log
    assert log.count("ENDED") == 2
    began = {int(rank[1]): int(rank["epoch"]) for rank in BEGAN.finditer(log)}
    assert list(began.values()) == sorted(began.values())
    assert began[0] == 0 < began[1]


def test_a_run_that_is_not_elastic_ends_with_an_error_when_a_node_is_lost(demo: DemoSite) -> None:
    training = Training(demo)
    agent = next(rank for rank in training.ranks(0, 4) if rank["host"] == "n2")["agent"]
    demo.run("n2", "kill", "-9", agent)
    assert over(demo, training.job_id).exit_code == 1
    assert "The agent of n2 was lost, so the run was ended." in training.log()


def test_a_run_outlives_a_suspension_of_its_job(demo: DemoSite) -> None:
    """As `scontrol suspend` and Slurm's gang scheduling do it: for longer than an agent may be silent."""
    counts = "for n in $(seq 20); do echo COUNT $n; sleep 1; done"
    job_id = submit(demo, "base", "carme-run", "-n", "2", "--devices-per-node", "1", "--", "sh", "-c", counts)

    def log() -> str:
        return demo.carme("logs", str(job_id)).stdout

    wait_until("both ranks run", lambda: log().count("COUNT 3") == 2)
    demo.run("head", "scontrol", "suspend", str(job_id))
    wait_until("the job stands still", lambda: job(demo, job_id).state is JobState.SUSPENDED)
    before = log()
    time.sleep(45)
    assert log() == before
    demo.run("head", "scontrol", "resume", str(job_id))
    assert over(demo, job_id).exit_code == 0, log()
    assert log().count("COUNT 20") == 2


def test_a_job_ends_with_its_first_node_and_leaves_nothing_on_the_others(demo: DemoSite) -> None:
    job_id = submit(demo, "base", "sleep", "600")
    wait_until("both agents are there", lambda: "n2 joined" in demo.carme("logs", str(job_id)).stdout)
    try:
        lose(demo, "n1")
        ended = over(demo, job_id)
        assert ended.explanation.startswith("Node n1 failed and the job ended with it")
        processes = ("ps", "-u", "user1", "-o", "pid=")
        wait_until("nothing of it runs", lambda: not demo.run("n2", *processes, check=False).stdout.strip())
        wait_until("n2 is free", lambda: "n2 idle" in demo.run("head", "sinfo", "-hNo", "%N %t").stdout)
    finally:
        bring_back(demo, "n1")


def test_a_session_goes_on_without_a_node_and_says_so(demo: DemoSite) -> None:
    start = {"image": "base", "nodes": "2", "gpus_per_node": "0", "minutes": "10", "title": "Two nodes"}
    # A round of slurmctld's pings takes 12 s while a node is away. With a SlurmdTimeout of 6 s it may
    # give up the other node as well, which it has not queried meanwhile.
    with demo.slurm_settings("SlurmdTimeout=20\n"), demo.visitor("user1") as visitor:
        name = visitor.start(start)
        visitor.wait(name, "ready", timeout=HANG)
        with visitor.kernel(visitor.open(name)) as kernel:
            kernel.run("kept = 42", timeout=HANG)
            try:
                lose(demo, "n2")
                wait_until(
                    "the page says it",
                    lambda: (
                        "The session lost its node n2 and continues without it."
                        in visitor.wait(name, "ready", timeout=HANG).text
                    ),
                    timeout=HANG,
                )
                assert kernel.run("print(kept)", timeout=HANG).output.strip() == "42"
            finally:
                bring_back(demo, "n2")
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
