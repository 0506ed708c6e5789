"""Jobs to which users and administrators do something by Slurm's own programs, as the broker reports them."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from carme.broker.records import Record, Records
from carme.config import Settings
from carme.errors import InvalidRequest, SlurmError
from carme.jobs import Job, JobRequest
from carme.sessions import Ending, SessionState
from carme.slurm.commands import SlurmCommands

from .conftest import FakeSlurm
from .test_broker_sessions import (
    JOB,
    KEY,
    READY,
    STARTED,
    closings,
    order,
    reaches,
    recorded,
    shown,
    submitted,
    until,
)

__all__ = ["order"]  # a fixture


# What a job is


async def test_a_session_stays_known_whatever_others_write_into_its_job(site: Any, order: JobRequest) -> None:
    number = await submitted(site, order)
    job, *_ = site.slurm.jobs
    changed = job | {"T": "RUNNING", "N": "n1", "S": int(time.time())}
    for change in (
        {"j": "x", "k": "site accounting: ok"},
        {"j": "session-s2", "k": job["k"].replace("session", "batch")},
        {"k": "(null)", "P": "long", "a": "other", "Q": 1, "l": "2:00:00"},
        # Slurm puts a job back with another time of submission.
        {"j": "x", "k": "", "V": int(job["V"]) + 60, "RestartCnt": 1},
    ):
        site.slurm.jobs = [changed | change | {"r": f"Change{len(change)}{change.get('j')}"}]

        async def seen(expected: str = str(site.slurm.jobs[0]["r"])) -> bool:
            return (await site.client.job(number)).reason == expected

        await until(seen)
        session = await site.client.session("s1", user="ada")
        assert (session.job_id, session.state, session.image) == (number, SessionState.STARTING, "torch")
        known = await site.client.job(number)
        assert (known.kind, known.name) == ("session", "session-s1")
    # Its end is reported rightly, from an accounting that has the new words alone.
    site.slurm.account(
        recorded(number, "TIMEOUT", Start="1795181538", End="1795181598")
        | {"JobName": "x", "Submit": site.slurm.jobs[0]["V"]}
    )
    site.slurm.jobs = []
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.TIME_LIMIT
    assert len(site.slurm.calls("sbatch")) == 1


async def test_a_broker_that_was_started_again_knows_its_jobs(
    start: Callable[[], Any], slurm: Any, order: JobRequest, request_: JobRequest
) -> None:
    async with start() as site:
        session = await submitted(site, order)
        site.act("ada")
        batch = await site.client.submit(request_)
        await shown(site)
    slurm.jobs = [job | {"j": "x", "k": "x", "T": "RUNNING", "N": "n1"} for job in slurm.jobs]
    async with start() as site:
        assert (await reaches(site, SessionState.STARTING)).job_id == session
        job = await site.client.job(batch)
        # A batch job is known by its number: its name is its owner's word and nothing else.
        assert (job.kind, job.name, job.key is not None) == ("batch", "x", True)
        assert (await site.client.log(batch)).size == 0


async def test_a_broker_that_has_lost_its_records_takes_comments_for_hints_once(
    start: Callable[[], Any], slurm: Any, settings: Settings
) -> None:
    slurm.jobs = [JOB]
    async with start() as site:
        await reaches(site, SessionState.STARTING)
    for file in settings.broker.state_directory.glob("sessions.sqlite*"):
        file.unlink()
    async with start() as site:
        assert (await reaches(site, SessionState.STARTING)).job_id == 7
        site.slurm.jobs = [JOB | {"j": "x", "k": "x", "r": "Renamed"}]

        async def seen() -> bool:
            return (await site.client.job(7)).reason == "Renamed"

        await until(seen)
        assert (await site.client.session("s1")).state is SessionState.STARTING


def test_a_poll_before_the_answer_to_a_submission_counts() -> None:
    records, now = Records(), datetime.now(UTC)
    records.load(now, [])
    records.begin(Record(key=KEY, user="ada", kind="session", name="session-s1", submitted=now))
    known = {"id": 7, "user": "ada", "state": "PENDING", "submitted": now + timedelta(seconds=2)}
    (job,) = records.queue([Job.model_validate(known | {"name": "session-s1", "key": KEY})], now)
    assert job.kind == "session"
    records.took(KEY, 7)
    (job,) = records.queue([Job.model_validate(known | {"name": "x"})], now)
    assert (job.kind, job.name, job.key) == ("session", "session-s1", KEY)
    # Another user's job with that number is another one.
    (job,) = records.queue([Job.model_validate(known | {"name": "x", "user": "bob"})], now)
    assert (job.kind, job.key) == ("other", None)


async def test_a_session_may_last_as_long_as_one_whatever_its_comment_says(
    site: Any, order: JobRequest
) -> None:
    number = await submitted(site, order)
    job, *_ = site.slurm.jobs
    now = int(time.time())
    site.slurm.jobs = [job | {"j": "x", "k": "", "T": "RUNNING", "N": "n1", "S": now, "e": now + 1800}]
    await reaches(site, SessionState.STARTING)
    with pytest.raises(InvalidRequest, match="a session in partition gpu lasts at most"):
        await site.client.extend(number, 365 * 1440, user="ada")


async def test_a_forged_comment_makes_no_job_a_session(site: Any, order: JobRequest) -> None:
    number = await submitted(site, order)
    own, *_ = site.slurm.jobs
    later = int(time.time()) + 600  # since this broker records what it submits
    forged = {"j": "session-s9", "V": later, "T": "RUNNING", "N": "n1", "S": later}
    site.slurm.jobs = [
        own,
        JOB | forged | {"A": 500},
        JOB | forged | {"A": 501, "k": own["k"], "j": own["j"]},  # a copy of another one's
        JOB | forged | {"A": 502, "u": "bob", "k": own["k"], "j": own["j"]},
    ]

    async def seen() -> bool:
        return len(await site.client.jobs()) == 4

    await until(seen)
    assert [session.job_id for session in await site.client.sessions()] == [number]
    assert {job.kind for job in await site.client.jobs() if job.id != number} == {"other"}


async def test_a_number_that_slurm_gives_again_to_the_same_user_is_another_job(
    site: Any, order: JobRequest
) -> None:
    number = await submitted(site, order)
    job, *_ = site.slurm.jobs
    site.slurm.jobs = [job | {"T": "RUNNING", "N": "n1", "S": STARTED}]
    await reaches(site, SessionState.STARTING)
    site.slurm.jobs = [job | {"j": "train", "k": "(null)", "V": STARTED + 900, "T": "RUNNING", "N": "n1"}]

    async def seen() -> bool:
        return (await site.client.job(number)).name == "train"

    await until(seen)
    assert (await site.client.job(number)).kind == "other"
    assert await site.client.sessions() == []


async def test_a_renamed_job_of_another_origin_is_not_taken_for_lost(site: Any) -> None:
    site.slurm.jobs = [JOB | {"k": "(null)", "j": "a"}]

    async def named(name: str) -> bool:
        return [job.name for job in await site.client.jobs()] == [name]

    await until(lambda: named("a"))
    site.slurm.jobs = [JOB | {"k": "other", "j": "b"}]
    await until(lambda: named("b"))
    assert closings(site) == []


# What others do to a job


async def test_a_suspended_session_says_so_and_its_time_stands_still(site: Any) -> None:
    ends = STARTED + 3600
    site.slurm.jobs = [JOB | {"e": ends}]
    assert (await reaches(site, SessionState.STARTING)).ends == datetime.fromtimestamp(ends, UTC)
    site.act("hub", trusted=True)
    await site.client.note(7, "ada", READY)
    # Slurm shows the old end as long as it is suspended.
    site.slurm.jobs = [JOB | {"T": "SUSPENDED", "e": ends, "L": "54:20"}]
    session = await reaches(site, SessionState.SUSPENDED)
    assert (session.label, session.ends) == ("Suspended", None)
    assert session.sentence.startswith("An administrator suspended the session: ")
    assert session.sentence.endswith("is paused; it resumes automatically with 54 minutes left.")
    with pytest.raises(InvalidRequest, match="The session is suspended, so its time limit is paused"):
        await site.client.extend(7, 10, user="ada")
    assert (await site.client.job(7)).explanation == session.sentence
    site.slurm.jobs = [JOB | {"e": ends + 420}]
    assert (await reaches(site, SessionState.READY)).ends == datetime.fromtimestamp(ends + 420, UTC)
    given = await site.client.extend(7, 10, user="ada")
    assert given.ends == datetime.fromtimestamp(ends + 420 + 600, UTC)


async def test_where_slurm_itself_suspends_jobs_it_is_reported(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme.broker.watch.CLUSTER_AT_MOST_EVERY", 0.5)
    partitions = site.slurm.state / "partitions"
    partitions.write_text(partitions.read_text().replace(" State=UP", " PreemptMode=GANG,SUSPEND State=UP"))
    cluster = await site.client.cluster()
    site.slurm.jobs = [JOB | {"T": "SUSPENDED"}]
    await reaches(site, SessionState.SUSPENDED)

    async def polled() -> bool:
        site.slurm.jobs = [JOB | {"T": "SUSPENDED", "Q": len(site.slurm.calls("scontrol"))}]
        return (await site.client.cluster()).taken > cluster.taken

    await until(polled)

    async def reported() -> bool:
        site.slurm.jobs = [JOB | {"T": "SUSPENDED", "Q": len(site.slurm.calls("scontrol"))}]
        session = await site.client.session("s1")
        return session.sentence.startswith("Slurm suspended the session in favour of others")

    await until(reported)


async def test_what_is_missing_for_a_session_that_waits(site: Any) -> None:
    # The node n1 has four GPUs, one of them in use; n2 takes no jobs.
    foreign = {"j": "theirs", "u": "bob", "k": "(null)", "e": int(time.time()) + 1800, "l": "UNLIMITED"}
    foreign |= {"tres-alloc": "cpu=2,mem=1000M,node=1,gres/gpu=1,gres/gpu:a100=1"}
    own = {"A": 8, "T": "PENDING", "r": "Resources", "N": "", "S": "N/A", "C": 1, "m": "1M"}
    site.slurm.jobs = [JOB | foreign, JOB | own | {"tres-alloc": "cpu=1,mem=1M,node=1,gres/gpu=4"}]
    session = await reaches(site, SessionState.QUEUED)
    assert "1 GPU must become free on n1, in use by 1 job of others" in session.sentence
    assert "bob" not in session.sentence and "theirs" not in session.sentence


async def test_a_job_of_whole_nodes_has_all_of_their_gpus(site: Any) -> None:
    whole = {"OverSubscribe": "NO", "u": "bob", "k": "(null)", "j": "a", "C": 1}
    waits = {"A": 8, "T": "PENDING", "N": "", "Y": "n1", "S": "N/A"}
    site.slurm.jobs = [JOB | whole, JOB | whole | waits, JOB | whole | waits | {"A": 9, "Y": "n/a", "D": 2}]

    async def seen() -> bool:
        return len(await site.client.jobs()) == 3

    site.act("hub", trusted=True)
    await until(seen)
    jobs = {job.id: job for job in await site.client.jobs()}
    assert [(jobs[number].gpus, jobs[number].cpus) for number in (7, 8, 9)] == [(4, 8), (4, 8), (8, 16)]


async def test_what_squeue_can_report_is_queried_until_it_answers(slurm: FakeSlurm, accounts: None) -> None:
    commands = SlurmCommands()
    slurm.fail("squeue", "squeue: fatal: the configuration could not be fetched")
    with pytest.raises(SlurmError):
        await commands.queue()
    slurm.heal("squeue")
    await commands.queue()
    await commands.queue()
    requested = ["--helpFormat" in call["arguments"] for call in slurm.calls("squeue")]
    assert requested == [True, False, True, False, False, False, False]
