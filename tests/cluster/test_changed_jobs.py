"""Users and administrators change jobs by Slurm's own programs: sessions stay known, and figures correct."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from carme.jobs import Job, JobState
from carme.sessions import Ending, Session, SessionState
from demo_site import DemoSite, wait_until
from patience import HANG

pytestmark = pytest.mark.alone

OPTIONS = {"image": "base", "nodes": "1", "gpus_per_node": "1", "minutes": "20"}


@pytest.fixture(autouse=True)
def nothing_left(demo: DemoSite) -> Iterator[None]:
    demo.end_all_jobs()
    yield
    demo.end_all_jobs()


def known(demo: DemoSite, name: str) -> Session:
    return Session.model_validate(demo.carme_json("session", "show", name))


def becomes(demo: DemoSite, name: str, state: SessionState) -> Session:
    """The session once it is in this state, and Slurm's end of its job is known where that matters."""

    def session() -> Session | None:
        found = known(demo, name)
        complete = state is not SessionState.READY or found.ends is not None
        return found if found.state is state and complete else None

    return wait_until(f"session {name} is {state}", session)


def seen(demo: DemoSite, number: int, *, running: bool) -> Job:
    """A job that Carme did not submit, once the broker has read it as running, or waiting."""

    def job() -> Job | None:
        found = map(Job.model_validate, demo.carme_json("jobs"))
        return next((job for job in found if (job.id, job.is_running) == (number, running)), None)

    return wait_until(f"job {number} is seen", job)


def slurms_end(demo: DemoSite, number: int) -> datetime:
    """The end of a job as Slurm itself reports it."""
    requested = ("env", "TZ=UTC", "SLURM_TIME_FORMAT=%s", "squeue", "--noheader", f"--jobs={number}")
    text = demo.run("head", *requested, "--format=%e").stdout.strip()
    return datetime.fromtimestamp(int(text), UTC)


def scontrol(demo: DemoSite, *words: str, user: str | None = None) -> None:
    demo.run("head", "scontrol", *words, user=user)


def test_a_session_stays_known_when_its_jobs_comment_and_name_change(demo: DemoSite) -> None:
    with demo.visitor("user1") as visitor:
        name = visitor.start(OPTIONS)
        visitor.wait(name, "ready", timeout=HANG)
        address = visitor.open(name)
        number = known(demo, name).job_id
        job = f"jobid={number}"
        scontrol(demo, "update", job, "jobname=x", user="user1")
        scontrol(demo, "update", job, "comment=site accounting: ok")
        scontrol(demo, "update", job, "admincomment=carme/1 kind=batch image= key=0")
        scontrol(demo, "update", job, "timelimit=25")
        wait_until("the broker has seen it", lambda: known(demo, name).ends == slurms_end(demo, number))
        session = known(demo, name)
        assert (session.state, session.job_id, session.owner) == (SessionState.READY, number, "user1")
        assert visitor.session(name).state == "ready"
        assert visitor.fetch(address + "api/status").status_code == 200  # the route stays
        # The broker's own record survives its restart.
        demo.run("head", "systemctl", "restart", "carme-broker")
        wait_until("the broker answers", lambda: demo.carme("jobs", check=False).returncode == 0)
        assert becomes(demo, name, SessionState.READY).job_id == number
        assert visitor.fetch(address + "api/status").status_code == 200
        visitor.stop(name)
        assert becomes(demo, name, SessionState.ENDED).ending is Ending.STOPPED


def test_a_suspended_session_says_so_and_goes_on(demo: DemoSite) -> None:
    with demo.visitor("user1") as visitor:
        name = visitor.start(OPTIONS)
        visitor.wait(name, "ready", timeout=HANG)
        before = becomes(demo, name, SessionState.READY)
        scontrol(demo, "suspend", str(before.job_id))
        try:
            reported = becomes(demo, name, SessionState.SUSPENDED)
            assert reported.sentence.startswith("An administrator suspended the session")
            assert reported.ends is None
            visitor.wait(name, "suspended", timeout=HANG)
            # What is suspended for a second only would not move Slurm's end, which is in whole seconds.
            begun = datetime.now(UTC)
            wait_until("some seconds have passed", lambda: datetime.now(UTC) > begun + timedelta(seconds=3))
        finally:
            scontrol(demo, "resume", str(before.job_id))
        visitor.wait(name, "ready", timeout=HANG)
        after = becomes(demo, name, SessionState.READY)
        assert after.ends == slurms_end(demo, before.job_id)
        assert before.ends is not None and after.ends is not None and after.ends > before.ends
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (["--gpus=1"], 1),
        (["--gpus-per-task=1", "--ntasks=2"], 2),
        (["--gpus-per-socket=1", "--sockets-per-node=1"], 1),
        (["--gpus-per-node=a100:2"], 2),
        (["--gpus=4", "--ntasks-per-gpu=1", "--nodes=1"], 4),
        (["--exclusive"], 4),
    ],
)
def test_gpus_are_counted_as_slurm_allots_them(demo: DemoSite, options: list[str], gpus: int) -> None:
    assert seen(demo, demo.sbatch(*options), running=True).gpus == gpus


def test_each_component_of_a_heterogeneous_job_is_listed_and_ends(demo: DemoSite) -> None:
    first = demo.sbatch("--nodes=1", "--gpus=1", second=["--nodes=1", "--ntasks=2", "--gpus-per-task=1"])
    components = [seen(demo, number, running=True) for number in (first, first + 1)]
    assert [(job.gpus, job.cpus, job.nodes, job.kind) for job in components] == [
        (1, 1, 1, "other"), (2, 2, 1, "other"),
    ]  # fmt: skip
    demo.carme("cancel", str(first + 1))
    wait_until("the second one has ended", lambda: demo.job_state(first + 1) is JobState.CANCELLED)
    assert demo.job_state(first) is JobState.RUNNING
    demo.carme("cancel", str(first))
    wait_until("the first one has ended", lambda: demo.job_state(first) is JobState.CANCELLED)
    # While it waits Slurm ends it only as a whole.
    begin = "--begin=now+1hour"
    first = demo.sbatch(begin, "--gpus=1", second=[begin, "--gpus=2"])
    assert [seen(demo, number, running=False).gpus for number in (first, first + 1)] == [1, 2]
    refused = demo.carme("cancel", str(first + 1), check=False)
    assert refused.returncode == 1 and "Cancel its first component." in refused.stderr
    demo.carme("cancel", str(first))
    wait_until("both have ended", lambda: demo.job_state(first + 1) is JobState.CANCELLED)


def test_a_job_that_waits_says_what_it_requested_and_what_is_missing(demo: DemoSite) -> None:
    first = [demo.sbatch("--gpus=3", "--nodes=1"), demo.sbatch("--gpus=3", "--nodes=1")]
    for number in first:
        seen(demo, number, running=True)
    requested: list[Any] = ["submit", "--gpus", "2", "--time", "10m", "--", "sleep", "60"]
    demo.carme(*requested)

    def waiting() -> Job | None:
        jobs = [Job.model_validate(job) for job in demo.carme_json("jobs")]
        return next(
            (job for job in jobs if job.kind == "batch" and "must become free" in job.explanation), None
        )

    job = wait_until("it says what is missing", waiting)
    assert job.gpus == 2
    assert "1 GPU must become free on n" in job.explanation
    assert any(f"in use by your job {number}" in job.explanation for number in first)
    second_job = demo.sbatch("--gpus-per-task=2", "--ntasks=1")
    assert seen(demo, second_job, running=False).gpus == 2
