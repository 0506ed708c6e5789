"""Every way to end and every reason to wait, really produced on the demo, as the broker reports it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from carme.jobs import Job
from carme.sessions import Ending, QueueEstimate, Session
from demo_site import IMPATIENT, DemoSite, wait_until

pytestmark = pytest.mark.alone

ASK = """
import json, sys
from carme.broker import BrokerClient
from carme.jobs import JobRequest
from pydantic_core import to_jsonable_python
from carme.errors import CarmeError
order = json.load(sys.stdin)
if "request" in order["arguments"]:
    order["arguments"]["request"] = JobRequest.read(order["arguments"]["request"])
try:
    answer = {"result": getattr(BrokerClient(), order["method"])(**order["arguments"])}
except CarmeError as error:
    answer = {"error": str(error), "code": error.code}
print(json.dumps(to_jsonable_python(answer)))
"""
SLEEP = ["sleep", "600"]


@pytest.fixture(scope="module", autouse=True)
def without_hub(demo: DemoSite) -> Iterator[None]:
    """The hub would end these sessions after a minute, for it knows no server of theirs."""
    with demo.undoing(("head", "systemctl", "start", "carme-hub")):
        demo.run("head", "systemctl", "stop", "carme-hub")
        yield
    demo.wait_for_hub()


class Refused(Exception):
    """The broker's refusal."""


def ask(demo: DemoSite, method: str, **arguments: Any) -> Any:
    """What the broker answers root."""
    order = json.dumps({"method": method, "arguments": arguments})
    answer = json.loads(demo.run("head", "/opt/carme/venv/bin/python", "-c", ASK, data=order).stdout)
    if "error" in answer:
        raise Refused(answer["error"])
    return answer["result"]


def start(demo: DemoSite, name: str, user: str = "user1", **values: Any) -> int:
    """A session without a hub: its server is a program that sleeps."""
    request = {"name": f"session-{name}", "kind": "session", "image": "base", "command": SLEEP, "minutes": 10}
    return ask(demo, "submit", request=request | values, user=user)


def session(demo: DemoSite, name: str) -> Session:
    return Session.model_validate(ask(demo, "session", name=name))


def running(demo: DemoSite, job_id: int) -> Job:
    def job() -> Job | None:
        known = Job.model_validate(ask(demo, "job", job_id=job_id))
        assert not known.is_over, known.explanation
        return known if known.is_running else None

    return wait_until("the job runs", job)


def ended(demo: DemoSite, name: str, known: Callable[[Session], bool] = bool) -> Session:
    """The session once it is over, and `known` holds."""

    def over() -> Session | None:
        now = session(demo, name)
        return now if now.is_over and known(now) else None

    return wait_until(f"session {name} has ended", over)


def waits(demo: DemoSite, job_id: int, words: str) -> str:
    """The sentence of a waiting job, once it holds the words."""

    def sentence() -> str | None:
        job = Job.model_validate(ask(demo, "job", job_id=job_id))
        assert job.is_pending, job.state
        return job.explanation if words in job.explanation else None

    return wait_until(f"the job says {words!r}", sentence)


@contextmanager
def changed(demo: DemoSite, change: list[str], back: list[str]) -> Iterator[None]:
    """Something of the cluster that is otherwise for a while."""
    with demo.undoing(("head", *back)):
        demo.run("head", *change)
        yield


def test_a_server_that_dies_at_start_ends_with_the_last_lines_of_its_log(demo: DemoSite) -> None:
    start(demo, "e1", command=["sh", "-c", "echo the port is taken >&2; exit 3"])
    over = ended(demo, "e1", lambda ending: "log says:" in ending.sentence)
    assert over.ending is Ending.DIED_AT_START
    assert "ended with exit code 3 before its server was ready" in over.sentence
    assert "the port is taken" in over.sentence.splitlines()[-1]


def test_out_of_memory_reports_the_peak_and_the_limit(demo: DemoSite) -> None:
    hungry = "x = bytearray(400 << 20); import time; time.sleep(600)"
    start(demo, "e2", command=["python3", "-c", hungry], memory_mb_per_node=200)
    over = ended(demo, "e2", lambda ending: "peak" in ending.sentence)
    assert over.ending is Ending.OUT_OF_MEMORY
    assert "ran out of memory" in over.sentence
    assert "its limit is 200 MiB" in over.sentence
    peak = int(over.sentence.split("its peak was ")[1].split(" MiB")[0])
    assert 180 <= peak <= 201


def test_a_kernel_that_runs_out_of_memory_does_not_end_its_session(demo: DemoSite) -> None:
    kernel = 'python3 -c "x = bytearray(400 << 20)"; echo the kernel is gone; exec sleep 600'
    job_id = start(demo, "e3", command=["sh", "-c", kernel], memory_mb_per_node=200)
    running(demo, job_id)
    wait_until(
        "the kernel is gone", lambda: "is gone" in ask(demo, "log", job_id=job_id, user="user1")["text"]
    )
    assert not session(demo, "e3").is_over
    ask(demo, "cancel", job_id=job_id, user="user1")
    assert ended(demo, "e3").ending is Ending.STOPPED


def test_a_node_that_fails_is_named(demo: DemoSite) -> None:
    with demo.slurm_settings(IMPATIENT):
        job_id = start(demo, "e5")
        node = running(demo, job_id).node_list
        resume = ("scontrol", "update", f"NodeName={node}", "State=RESUME")
        # The node may be up by itself: then there is nothing to resume.
        with demo.undoing(
            (node, "systemctl", "start", "slurmd"), ("head", "sh", "-c", f"{' '.join(resume)} || :")
        ):
            demo.run(node, "systemctl", "stop", "slurmd")
            over = ended(demo, "e5")  # once Slurm has given the node up
            assert over.ending is Ending.NODE_FAILURE
            assert f"Node {node} failed" in over.sentence
            assert "start it again" in over.sentence
        wait_until(
            "the node is back", lambda: "down" not in demo.run("head", "sinfo", "-hNo", "%N %t").stdout
        )


def test_root_who_cancels_is_an_administrator(demo: DemoSite) -> None:
    job_id = start(demo, "e6")
    running(demo, job_id)
    demo.run("head", "scancel", str(job_id))
    # The accounting may name them a moment later.
    over = ended(demo, "e6", lambda known: known.ending is Ending.CANCELLED_BY_ADMIN)
    assert "An administrator cancelled the session; ask them" in over.sentence


def test_the_owner_who_cancels_has_stopped_it(demo: DemoSite) -> None:
    job_id = start(demo, "e7")
    running(demo, job_id)
    demo.run("head", "scancel", str(job_id), user="user1")
    ended(demo, "e7", lambda known: known.ending is Ending.STOPPED)


def test_preemption_is_reported_and_by_what_as_far_as_slurm_shows_it(demo: DemoSite) -> None:
    """An urgent partition over the same nodes ends what runs there; users see no jobs of others."""
    settings = "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL\n"
    urgent = "PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP\n"
    with demo.slurm_settings(settings + urgent):
        for number in (1, 2):
            running(demo, start(demo, f"p{number}", gpus_per_node=4))
        request = {"name": "urgent", "kind": "batch", "command": SLEEP, "minutes": 5, "partition": "urgent"}
        wait_until("the broker knows the partition", lambda: "urgent" in str(ask(demo, "cluster")))

        def gives_way(to: str) -> tuple[int, Session]:
            """An urgent job of a user, and the one of the sessions that it ends."""
            before = [candidate for candidate in ("p1", "p2") if not session(demo, candidate).is_over]
            job_id = ask(demo, "submit", request=request | {"gpus_per_node": 4, "image": None}, user=to)
            running(demo, job_id)

            def preempted() -> Session | None:
                both = [session(demo, name) for name in before]
                reported = "in partition urgent, which has a higher priority; start it again"
                return next(
                    (candidate for candidate in both if candidate.is_over and reported in candidate.sentence),
                    None,
                )

            over = wait_until("one of the sessions gave way, and to what", preempted)
            assert over.ending is Ending.PREEMPTED
            return job_id, over

        job_id, over = gives_way("user2")
        assert "ended the session in favour of a job in partition urgent" in over.sentence
        assert str(job_id) not in over.sentence
        job_id, over = gives_way("user1")
        assert f"ended the session in favour of job {job_id} in partition urgent" in over.sentence
        demo.end_all_jobs()


def test_an_image_that_is_missing_on_the_node(demo: DemoSite) -> None:
    # The catalogue is checked on the head when the job is submitted; a node may lack the file.
    with held_back(demo):
        job_id = start(demo, "e8")
        waits(demo, job_id, "partition is down")
        for node in ("n1", "n2"):
            among_slurmds_mounts(demo, node, "mount -t tmpfs none /srv/carme/images")
    try:
        over = ended(demo, "e8", lambda ending: "log says" not in ending.sentence)
        assert over.ending is Ending.IMAGE_MISSING
        assert "The image base is missing on node n" in over.sentence
        assert "choose another one" in over.sentence
    finally:
        for node in ("n1", "n2"):
            among_slurmds_mounts(demo, node, "umount /srv/carme/images")


def among_slurmds_mounts(demo: DemoSite, node: str, command: str) -> None:
    """Run a command once in slurmd's own mount namespace.

    The images are shared by all hosts, so a node hides them from itself alone. A slurmd that reads its
    configuration anew becomes another process, and systemd has the number of the former one for a moment.
    """
    command = f"nsenter --target $(systemctl show --property MainPID --value slurmd) --mount {command}"
    wait_until(
        f"{command} on {node}", lambda: demo.run(node, "sh", "-c", command, check=False).returncode == 0
    )


@contextmanager
def held_back(demo: DemoSite) -> Iterator[None]:
    """Jobs that are submitted meanwhile start afterwards."""
    with changed(
        demo,
        ["scontrol", "update", "PartitionName=gpu", "State=DOWN"],
        ["scontrol", "update", "PartitionName=gpu", "State=UP"],
    ):
        yield


def test_a_home_that_cannot_be_written_is_refused_and_ends_what_waited(demo: DemoSite) -> None:
    with demo.undoing(("head", "chmod", "0700", "/home/user1")):
        with held_back(demo):
            job_id = start(demo, "e9")
            waits(demo, job_id, "partition is down")
            demo.run("head", "chmod", "0500", "/home/user1")
        over = ended(demo, "e9", lambda ending: "log says" not in ending.sentence)
        assert over.ending is Ending.HOME_NOT_WRITABLE
        assert "home directory is not writable on node n" in over.sentence
        with pytest.raises(Refused, match=r"/home/user1: .*Check that your home directory"):
            start(demo, "e10")


def test_a_home_that_is_not_there_is_refused(demo: DemoSite) -> None:
    with (
        changed(demo, ["mv", "/home/user2", "/home/away"], ["mv", "-T", "/home/away", "/home/user2"]),
        pytest.raises(Refused, match="no home directory"),
    ):
        start(demo, "e11", user="user2")


# Waiting


def test_a_partition_that_is_down(demo: DemoSite) -> None:
    with held_back(demo):
        sentence = waits(demo, start(demo, "w1"), "partition is down")
        assert "choose another partition" in sentence
        assert session(demo, "w1").sentence == sentence
        estimate = wait_until("its place is published", lambda: session(demo, "w1").estimate)
        assert (estimate.place, estimate.waiting) == (1, 1)
        with (
            changed(
                demo,
                ["scontrol", "update", "PartitionName=gpu", "State=INACTIVE"],
                ["scontrol", "update", "PartitionName=gpu", "State=DOWN"],
            ),
            pytest.raises(Refused, match="takes no jobs at the moment"),
        ):
            start(demo, "w2")
        demo.end_all_jobs()


def test_the_limit_of_an_association_is_reported_with_its_value(demo: DemoSite) -> None:
    modify = ["sacctmgr", "--immediate", "modify", "user", "user2", "set"]
    with changed(demo, [*modify, "GrpTRES=gres/gpu=1"], [*modify, "GrpTRES=gres/gpu=-1"]):
        running(demo, start(demo, "w3", user="user2", gpus_per_node=1))
        sentence = waits(demo, start(demo, "w4", user="user2", gpus_per_node=1), "in use")
        assert "the limit that your account has on GPUs" in sentence
        assert "(user2: at most 1 GPU at a time, 1 in use)" in sentence
        assert "end one of them or ask for less" in sentence
        demo.end_all_jobs()


def test_nodes_that_are_drained_are_named(demo: DemoSite) -> None:
    with changed(
        demo,
        ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test"],
        ["scontrol", "update", "NodeName=n2", "State=RESUME"],
    ):
        sentence = waits(demo, start(demo, "w5", nodes=2), "(n2)")
        assert "down, drained or reserved" in sentence
        assert "choose another partition" in sentence
        demo.end_all_jobs()


def test_a_reservation_that_has_not_begun_reports_when_it_does(demo: DemoSite) -> None:
    """The job is moved into the booking by hand: bookings are not the broker's yet."""
    create = ["ReservationName=course", "StartTime=now+2hours", "Duration=60", "Users=user1", "Nodes=n1"]
    with changed(
        demo, ["scontrol", "create", "reservation", *create], ["scontrol", "delete", "ReservationName=course"]
    ):
        with held_back(demo):
            job_id = start(demo, "w6")
            demo.run("head", "scontrol", "update", f"JobId={job_id}", "ReservationName=course")
        sentence = waits(demo, job_id, "course begins")
        assert "waits for its booking" in sentence
        assert "choose no booking" in sentence
        demo.end_all_jobs()


def test_the_queue_has_places_and_expected_starts(demo: DemoSite) -> None:
    for number in (1, 2):
        running(demo, start(demo, f"q{number}", gpus_per_node=4, minutes=5))
    first, second = (start(demo, f"q{number}", gpus_per_node=4, minutes=5) for number in (3, 4))
    assert first < second

    def planned() -> Session | None:
        seen = session(demo, "q3")
        # The last job may have been submitted since that poll of the queue.
        return seen if seen.estimate and seen.estimate.latest and seen.estimate.waiting == 2 else None

    seen = wait_until("Slurm has a plan", planned)
    assert (
        seen.estimate is not None and seen.estimate.earliest is not None and seen.estimate.latest is not None
    )
    assert (seen.estimate.place, seen.estimate.waiting) == (1, 2)
    assert seen.estimate.earliest <= seen.estimate.latest
    fourth = session(demo, "q4").estimate
    assert fourth is not None and fourth.place == 2


JUDGED = """
import json, sqlite3, sys
store = sqlite3.connect("file:/var/lib/carme/broker/sessions.sqlite?mode=ro", uri=True)
rows = store.execute("select job_id, kept from estimates where kept is not null").fetchall()
print(json.dumps(dict(rows)))
"""


def test_expected_starts_are_reported_and_judged_afterwards(demo: DemoSite) -> None:
    def judged(job_id: int) -> bool | None:
        """Whether the range that the broker published for a job was right; None: not judged."""
        found = json.loads(demo.run("head", "/usr/bin/python3", "-c", JUDGED).stdout)
        return bool(found[str(job_id)]) if str(job_id) in found else None

    def reported(name: str) -> QueueEstimate:
        """The expected range of a session that waits, once Slurm has a plan."""

        def estimate() -> QueueEstimate | None:
            found = session(demo, name).estimate
            return found if found and found.latest else None

        return wait_until(f"a start is foretold for {name}", estimate)

    def starts_once_ended(waiting: int, running_job: int, right: bool) -> None:
        with suppress(Refused):  # its minute is over already
            ask(demo, "cancel", job_id=running_job, user="user1")
        running(demo, waiting)
        assert wait_until("it is judged", lambda: judged(waiting) in (True, False))
        assert judged(waiting) is right

    # Both nodes are taken for hours, so nobody expects the end of one right now.
    long = [start(demo, f"j{number}", gpus_per_node=4, minutes=1200) for number in (1, 2)]
    for job_id in long:
        running(demo, job_id)
    surprised = start(demo, "j3", gpus_per_node=4, minutes=1)
    range_ = reported("j3")
    assert range_.earliest and range_.latest
    assert range_.earliest <= range_.latest
    assert range_.earliest - datetime.now(UTC) > timedelta(minutes=3)
    starts_once_ended(surprised, long[0], right=False)

    # This one ends within a minute in any case.
    foreseen = start(demo, "j4", gpus_per_node=4, minutes=1)
    range_ = reported("j4")
    assert range_.latest and range_.latest - datetime.now(UTC) < timedelta(minutes=3)
    starts_once_ended(foreseen, surprised, right=True)

    # The next one that waits shows how often such ranges were right.
    start(demo, "j5", gpus_per_node=4, minutes=1)
    record = reported("j5")
    assert 1 <= record.correct < record.judged
    shown = demo.carme("session", "show", "j5").stdout
    assert f"{record.correct} of the last {record.judged} such estimates" in shown


# More time


def test_extending(demo: DemoSite) -> None:
    job_id = start(demo, "x1", minutes=10, gpus_per_node=4)
    job = running(demo, job_id)
    extension = ask(demo, "extend", job_id=job_id, minutes=20, user="user1")
    assert extension["minutes_limit"] == 30
    limit = demo.run("head", "squeue", "--noheader", f"--jobs={job_id}", "--format=%l").stdout.strip()
    assert limit == "30:00"
    with pytest.raises(Refused, match=r"There is no job"):
        ask(demo, "extend", job_id=job_id, minutes=1, user="user2")
    with pytest.raises(
        Refused, match=r"at most .* until .* because a session in partition gpu lasts at most"
    ):
        ask(demo, "extend", job_id=job_id, minutes=100_000, user="user1")
    create = ["ReservationName=course", "StartTime=now+60minutes", "Duration=60", "Users=user2"]
    with (
        changed(
            demo,
            ["scontrol", "create", "reservation", *create, f"Nodes={job.node_list}"],
            ["scontrol", "delete", "ReservationName=course"],
        ),
        pytest.raises(Refused, match=f"because the booking course follows on {job.node_list}"),
    ):
        ask(demo, "extend", job_id=job_id, minutes=60, user="user1")
    # Another one waits for all GPUs of both nodes: Slurm plans it for when this one ends.
    waiting = start(demo, "x2", nodes=2, gpus_per_node=4, minutes=5, user="user2")
    wait_until("Slurm has a plan", lambda: ask(demo, "job", job_id=waiting)["planned_nodes"])
    with pytest.raises(Refused, match="because another job waits and is planned to start there then"):
        ask(demo, "extend", job_id=job_id, minutes=20, user="user1")
    with pytest.raises(Refused, match="has not started"):
        ask(demo, "extend", job_id=waiting, minutes=20, user="user2")
    ask(demo, "cancel", job_id=job_id, user="user1")
    ended(demo, "x1")
    with pytest.raises(Refused, match="is over"):
        ask(demo, "extend", job_id=job_id, minutes=20, user="user1")


# Time at the end

SLOW = "trap 'sleep 8; echo saved; exit 0' TERM; echo up; while :; do sleep 0.2; done"


def test_a_server_that_takes_eight_seconds_to_save_is_not_killed_before(demo: DemoSite) -> None:
    job_id = start(demo, "s1", command=["bash", "-c", SLOW], minutes=1)
    wait_until("the server is up", lambda: "up" in log(demo, job_id))
    ask(demo, "cancel", job_id=job_id, user="user1")
    saved(demo, job_id)


def log(demo: DemoSite, job_id: int) -> str:
    return ask(demo, "log", job_id=job_id, user="user1")["text"]


def saved(demo: DemoSite, job_id: int) -> None:
    """The job ends, and had the time to save."""
    over = wait_until(
        "the job has ended",
        lambda: (job := Job.model_validate(ask(demo, "job", job_id=job_id))).is_over and job,
    )
    assert "saved" in log(demo, job_id)
    assert over.started is not None and over.ended is not None
