"""Everyday faults: each ends in one sentence, and the site works again afterwards."""

import json

import pytest

from carme.errors import CarmeError
from carme.jobs import JobState, Phase
from carme.sessions import Ending, Session
from demo_site import DemoSite, wait_until
from patience import HANG

START = {"image": "base", "nodes": "1", "gpus_per_node": "4", "minutes": "10", "title": "faults"}


def submit(demo: DemoSite, *arguments: str) -> int:
    return json.loads(demo.carme("submit", "--json", *arguments).stdout)["job_id"]


def test_a_job_that_dies_at_once_says_how(demo: DemoSite) -> None:
    job = submit(demo, "--time", "1", "--", "sh", "-c", "echo first words; exit 3")
    wait_until("the job has ended", lambda: demo.job_state(job) is JobState.FAILED)
    assert "first words" in demo.carme("logs", str(job)).stdout
    (known,) = [item for item in demo.carme_json("jobs", "--all-states") if item["id"] == job]
    assert known["exit_code"] == 3
    assert "3" in known["explanation"]


def test_a_program_that_does_not_exist_is_named_in_the_log(demo: DemoSite) -> None:
    job = submit(demo, "--time", "1", "--image", "base", "--", "nosuchprogram")
    wait_until("the job has ended", lambda: demo.job_state(job) is JobState.FAILED)
    log = demo.carme("logs", str(job)).stdout
    assert "nosuchprogram" in log
    assert "Traceback" not in log


@pytest.mark.alone
def test_with_a_full_queue_the_session_waits_with_the_reason_and_can_be_stopped(demo: DemoSite) -> None:
    for _ in range(2):
        submit(demo, "--gpus", "4", "--time", "5", "--", "sleep", "300")
    with demo.visitor("user1") as visitor:
        name = visitor.start(START)
        page = wait_until(
            "the session waits in the queue",
            lambda: (page := visitor.session(name)).label == "Waiting in the queue" and page,
        )
        assert "waits" in page.text or "waiting" in page.text
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
    wait_until(
        "its job is gone", lambda: f"session-{name}" not in {item["name"] for item in demo.carme_json("jobs")}
    )


def test_a_session_that_is_cancelled_in_slurm_shows_as_ended(demo: DemoSite) -> None:
    with demo.visitor("user1") as visitor:
        name = visitor.start(START | {"gpus_per_node": "0"})
        visitor.wait(name, "ready", timeout=HANG)
        demo.run("head", "scancel", "--name", f"session-{name}")
        page = visitor.wait(name, "ended", timeout=HANG)
        assert "cancel" in page.text.lower()


# It saves when it is requested to end.
SLOW = "trap 'sleep 8; echo saved; exit 0' TERM; while :; do sleep 0.2; done"


def test_the_time_limit_ends_a_session_says_so_and_leaves_time_to_save(demo: DemoSite) -> None:
    saves = submit(demo, "--time", "1", "--", "bash", "-c", SLOW)
    with demo.visitor("user1") as visitor:
        # Whether it gets ready within its minute depends on the machine.
        name = visitor.start(START | {"gpus_per_node": "0", "minutes": "1"})
        # It stays the same job under another name and comment.
        sessions = wait_until(
            "its job is there",
            lambda: [listed for listed in demo.carme_json("session", "list") if listed["name"] == name],
        )
        job = f"jobid={sessions[0]['job_id']}"
        demo.run("head", "scontrol", "update", job, "jobname=x", user="user1")
        demo.run("head", "scontrol", "update", job, "comment=site accounting: ok")
        page = visitor.wait(name, "ended", timeout=HANG)
        assert "time limit" in page.text
    over = Session.model_validate(demo.carme_json("session", "show", name))
    assert over.ending is Ending.TIME_LIMIT
    assert "reached its time limit of 1 minute" in over.sentence
    assert "more time" in over.sentence
    wait_until("the job has ended", lambda: demo.job_state(saves).phase is Phase.OVER, timeout=HANG)
    assert "saved" in demo.carme("logs", str(saves)).stdout


@pytest.mark.alone
def test_without_the_broker_pages_stay_and_starting_is_refused_with_the_reason(demo: DemoSite) -> None:
    with demo.undoing(("head", "systemctl", "start", "carme-broker")):
        demo.run("head", "systemctl", "stop", "carme-broker")
        done = demo.carme("status", check=False)
        assert done.returncode == 1
        assert "broker" in done.stderr
        with demo.visitor("user1") as visitor:
            assert visitor.http.get(demo.url + "/").status_code == 200
            # The dashboard shows the broker's earlier answer for some seconds, in each process of the portal.
            wait_until(
                "all processes of the portal say it",
                lambda: all("broker" in visitor.http.get(demo.url + "/").text for _ in range(10)),
            )
            with pytest.raises(CarmeError, match="broker"):
                visitor.start(START)
    wait_until("the broker answers", lambda: demo.carme("status", check=False).returncode == 0)


@pytest.mark.alone
def test_who_is_added_after_slurms_start_is_known_though_its_database_started_last(demo: DemoSite) -> None:
    # The two seconds are the fault: a database that takes its time.
    late = "{ sleep 2; systemctl start slurmdbd; }"
    starts = f"systemctl stop slurmctld slurmdbd; {late} & systemctl start slurmctld; wait"
    demo.run("head", "sh", "-c", starts)
    added = ["user", "name=addedlater", "account=carme"]
    remove = f"sacctmgr --immediate delete {' '.join(added[:2])} || :"
    with demo.undoing(("head", "sh", "-c", remove)):
        demo.run("head", "sacctmgr", "--immediate", "add", *added)
        wait_until(
            "slurmctld knows the account",
            lambda: "addedlater" in demo.run("head", "scontrol", "show", "assoc_mgr", "flags=users").stdout,
        )


def test_carme_run_outside_of_a_job_refuses_nodes(demo: DemoSite) -> None:
    done = demo.run(
        "head",
        "apptainer",
        "-q",
        "exec",
        "/srv/carme/images/base.sif",
        "carme-run",
        "--nodes",
        "2",
        "--",
        "true",
        user="user1",
        check=False,
    )
    assert done.returncode == 2
    assert "job" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_fails_ends_the_run_on_all_nodes_with_its_traceback(demo: DemoSite) -> None:
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '2': raise ValueError('rank two gave up')\n"
        "time.sleep(600)\n"
    )
    demo.run("head", "tee", "/home/user1/fails.py", user="user1", data=code)
    job = submit(
        demo,
        *("--image", "base", "--nodes", "2", "--gpus", "2", "--time", "5"),
        *("--", "carme-run", "-n", "4", "/home/user1/fails.py"),
    )
    wait_until("the job has ended", lambda: demo.job_state(job) is JobState.FAILED)
    log = demo.carme("logs", str(job)).stdout
    assert "ValueError: rank two gave up" in log
    assert "n2" in log.splitlines()[-1] or "rank 2" in log


def test_a_session_belongs_to_its_owner_alone(demo: DemoSite) -> None:
    with demo.visitor("user1") as owner, demo.visitor("user2") as visitor:
        name = owner.start(START | {"gpus_per_node": "0"})
        owner.wait(name, "ready", timeout=HANG)
        server = owner.open(name)
        visitor.http.get(f"{demo.url}/jupyter/hub/home")
        assert visitor.http.get(f"{server}api/contents").status_code == 403
        assert visitor.http.get(f"{demo.url}/sessions/{name}/").status_code == 404
        job = demo.job_of(name)["id"]
        assert demo.carme("cancel", str(job), user="user2", check=False).returncode == 1
        assert demo.carme("logs", str(job), user="user2", check=False).returncode == 1
        assert job not in demo.job_ids("user2")
        refused = demo.run(
            "head", "sh", "-c", "ls /home/user1/.local/share/carme/jobs", user="user2", check=False
        )
        assert refused.returncode != 0
        assert owner.session(name).state == "ready"
        owner.stop(name)
        owner.wait(name, "ended", timeout=HANG)


def test_stock_batchspawner_handler_is_absent(demo: DemoSite) -> None:
    with demo.visitor() as anybody:
        reply = anybody.http.post(f"{demo.url}/jupyter/hub/api/batchspawner", json={"port": 1})
        assert reply.status_code in {403, 404}
