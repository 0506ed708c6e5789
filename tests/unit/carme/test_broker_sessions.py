"""Sessions as the broker reports them, over its real socket."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from carme.broker import watch
from carme.config import Settings
from carme.errors import Denied, InvalidRequest, NotFound, SlurmError
from carme.jobs import JobRequest
from carme.sessions import Ending, Mark, ServerStatus, Session, SessionNote, SessionState, Step

from .conftest import running
from .session_records import JOB, KEY, STARTED, reaches

READY = SessionNote(server=ServerStatus.READY)
EPOCH = datetime.fromtimestamp(0, UTC)


@pytest.fixture
def order() -> JobRequest:
    return JobRequest(
        name="session-s1", kind="session", image="torch", command=["carme-singleuser"], minutes=30
    )


async def test_a_session_from_its_submission_to_its_end(site: Any, order: JobRequest) -> None:
    before = datetime.now(UTC)
    site.act("hub", trusted=True)
    job_id = await site.client.submit(order, user="ada")
    session = await site.client.session("s1", user="ada")
    assert (session.name, session.owner, session.job_id) == ("s1", "ada", job_id)
    assert (session.state, session.label) == (SessionState.QUEUED, "Waiting in the queue")
    submitted = session.at(Step.SUBMITTED)
    assert submitted and submitted >= before.replace(microsecond=0)
    queued = next(job for job in site.slurm.jobs if job["A"] == job_id)
    site.slurm.jobs = [queued | {"T": "RUNNING", "N": "n1", "S": int(time.time())}]
    session = await reaches(site, SessionState.STARTING)
    waited = session.between(Step.SUBMITTED, Step.ALLOCATED)
    assert waited is not None and waited >= timedelta(0)
    assert session.ends is not None

    listening = datetime.now(UTC)
    await site.client.note(
        job_id,
        "ada",
        SessionNote(server=ServerStatus.READY, marks=(Mark(step=Step.LISTENING, at=listening),)),
    )
    session = await site.client.session("s1", user="ada")
    assert (session.state, session.at(Step.LISTENING)) == (SessionState.READY, listening)
    await site.client.note(job_id, "ada", SessionNote(server=ServerStatus.STOPPING, ending=Ending.IDLE))
    await site.client.cancel(job_id, user="ada")
    session = await reaches(site, SessionState.ENDED)
    assert (session.ending, session.failed) == (Ending.IDLE, False)
    assert await site.client.sessions(user="ada") == []
    assert [session.name for session in await site.client.sessions(user="ada", active=False)] == ["s1"]
    assert [(e["action"], e.get("ending")) for e in site.audit()] == [
        ("submit", None), ("note", "idle"), ("cancel", None),
    ]  # fmt: skip


async def test_a_note_is_an_event_at_once(site: Any) -> None:
    site.slurm.jobs = [JOB]
    await reaches(site, SessionState.STARTING)
    site.slurm.fail("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    site.act("hub", trusted=True)
    cursor = (await site.client.events()).cursor
    waiting = asyncio.create_task(site.client.events(cursor, wait=60))
    await asyncio.sleep(0)
    await site.client.note(7, "ada", READY)
    batch = await waiting
    assert ([session.state for session in batch.sessions], batch.jobs) == ([SessionState.READY], [])
    # What changes nothing is not an event.
    await site.client.note(7, "ada", READY)
    quiet = await site.client.events(batch.cursor)
    assert (quiet.sessions, quiet.cursor) == ([], batch.cursor)


async def test_a_session_is_ready_with_what_slurm_knows_of_its_job(
    settings: Settings, slurm: Any, accounts: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = settings.model_copy(update={"slurm": settings.slurm.model_copy(update={"poll_seconds": 3600.0})})
    slurm.jobs = [JOB | {"T": "PENDING", "N": "", "S": 0}]
    async with running(rare, slurm, home, monkeypatch) as site:
        assert (await reaches(site, SessionState.QUEUED)).ends is None
        site.act("hub", trusted=True)
        site.slurm.jobs = [JOB]
        await site.client.note(7, "ada", READY)
        session = await site.client.session("s1", user="ada")
        assert (session.state, session.node_list) == (SessionState.READY, "n1")
        assert session.ends is not None
        assert (await site.client.job(7, user="ada")).is_running


async def test_a_silent_slurm_does_not_hold_up_who_says_that_a_session_is_ready(site: Any) -> None:
    site.slurm.jobs = [JOB | {"T": "PENDING", "N": "", "S": 0}]
    await reaches(site, SessionState.QUEUED)
    site.slurm.fail("scontrol", "slurm_load_jobs error: Unable to contact slurm controller")
    site.act("hub", trusted=True)
    await site.client.note(7, "ada", READY)
    assert (await site.client.session("s1", user="ada")).state is SessionState.READY


async def test_only_services_note_and_only_on_the_owners_session(site: Any) -> None:
    site.slurm.jobs = [JOB, JOB | {"A": 8, "j": "train"}]
    await reaches(site, SessionState.STARTING)
    with pytest.raises(Denied, match="ada may not note anything about sessions"):
        await site.client.note(7, "ada", READY)
    assert (site.audit()[-1]["action"], site.audit()[-1]["result"]) == ("note", "denied")
    site.act("hub", trusted=True)
    for job_id, user in ((7, "bob"), (8, "ada"), (9, "ada")):
        with pytest.raises(NotFound, match=f"Job {job_id} is not a session of {user}"):
            await site.client.note(job_id, user, READY)
    naive = Mark.model_construct(step=Step.ROUTED, at=EPOCH.replace(tzinfo=None))
    with pytest.raises(InvalidRequest, match="timezone"):
        await site.client.note(7, "ada", SessionNote(marks=(naive,)))
    with pytest.raises(InvalidRequest, match="Slurm"):
        await site.client.note(7, "ada", SessionNote(marks=(Mark(step=Step.ALLOCATED, at=EPOCH),)))
    assert (await site.client.session("s1", user="ada")).state is SessionState.STARTING


async def test_nobody_sees_the_sessions_of_others(site: Any) -> None:
    site.slurm.jobs = [JOB]
    await reaches(site, SessionState.STARTING)
    site.act("bob")
    assert await site.client.sessions(active=False) == []
    assert (await site.client.events()).sessions == []
    with pytest.raises(NotFound, match=r"There is no session 's1' of bob. See 'carme session list'"):
        await site.client.session("s1")
    with pytest.raises(Denied):
        await site.client.session("s1", user="ada")
    with pytest.raises(Denied):
        await site.client.sessions(user="ada")
    # A name of one's own does not hide or show another's.
    site.slurm.jobs = [JOB, JOB | {"A": 8, "u": "bob"}]
    await reaches(site, SessionState.STARTING)
    assert (await site.client.session("s1")).job_id == 8
    site.act("ada")
    assert (await site.client.session("s1")).job_id == 7


async def test_the_newest_session_of_a_name_is_the_one(site: Any) -> None:
    site.slurm.jobs = [JOB, JOB | {"A": 9, "T": "FAILED"}, JOB | {"A": 8, "T": "FAILED"}]
    await reaches(site, SessionState.STARTING)
    assert (await site.client.session("s1")).job_id == 7
    await site.queue([job | {"T": "FAILED"} for job in site.slurm.jobs])
    assert (await site.client.session("s1")).job_id == 9
    assert [session.job_id for session in await site.client.sessions(active=False)] == [9, 8, 7]


async def test_a_waiting_session_has_a_start_estimate(site: Any) -> None:
    waiting = JOB | {"T": "PENDING", "r": "Priority", "N": "", "S": "N/A"}
    site.slurm.jobs = [waiting, waiting | {"A": 6, "j": "x", "k": "", "r": "Resources"}]
    session = await reaches(site, SessionState.QUEUED)
    assert session.estimate is not None
    assert (session.estimate.place, session.estimate.waiting) == (2, 2)
    assert "higher priority" in session.estimate.reason and session.sentence == session.estimate.reason


async def test_notes_cost_slurm_nothing(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carme.broker.watch.CLUSTER_AT_MOST_EVERY", 3600.0)
    site.slurm.jobs = [JOB]
    await reaches(site, SessionState.STARTING)
    site.act("hub", trusted=True)

    def polls(*words: str) -> int:
        return sum(set(words) <= set(call["arguments"]) for call in site.slurm.calls("scontrol"))

    nodes, pulses = polls("show", "node"), polls("show", "job")
    while polls("show", "job") < pulses + 5:
        await site.client.note(7, "ada", SessionNote(idle_since=datetime.now(UTC)))
        await asyncio.sleep(0.02)
    assert polls("show", "node") == nodes


async def test_without_sessions_or_jobs_of_carme_the_broker_polls_rarely(
    site: Any, order: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pulses() -> int:
        return sum({"show", "job"} <= set(call["arguments"]) for call in site.slurm.calls("scontrol"))

    async def polled(times: int) -> None:
        before = pulses()
        while pulses() < before + times:
            await site.client.jobs()
            await asyncio.sleep(0.05)

    site.slurm.jobs = [JOB | {"A": 6, "j": "theirs", "k": ""}]
    site.act("hub", trusted=True)
    monkeypatch.setattr(site.broker._watch, "_seconds", 0.1)
    await polled(3)
    assert [job.id for job in await site.client.jobs()] == [6]
    monkeypatch.setattr("carme.broker.watch.CALM_AFTER", 0.0)
    monkeypatch.setattr("carme.broker.watch.CALM_TIMES", 100_000)
    before = pulses()
    await asyncio.sleep(0.5)  # five polls, were it not calm
    assert pulses() <= before + 1  # one pause had begun
    # A submission wakes it, and as long as that job is active it goes on looking.
    job_id = await site.client.submit(order, user="ada")
    await polled(3)
    site.slurm.jobs = [known | {"T": "COMPLETED"} for known in site.slurm.jobs if known["A"] == job_id]
    await reaches(site, SessionState.ENDED)


async def test_a_silent_node_loses_its_sessions_until_it_is_back(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme.broker.watch.CLUSTER_AT_MOST_EVERY", 0.1)
    site.slurm.jobs = [JOB]
    await reaches(site, SessionState.STARTING)
    nodes = (site.slurm.state / "nodes").read_text()
    silent = nodes.replace("NodeName=n1 ", "NodeName=n1 ", 1).replace("State=MIXED", "State=MIXED*", 1)
    assert silent != nodes
    (site.slurm.state / "nodes").write_text(silent)
    site.slurm.jobs = [JOB, JOB | {"A": 8, "j": "x"}]  # which makes the broker look at the nodes
    lost = await reaches(site, SessionState.LOST)
    assert "node of the session (n1) does not answer" in lost.sentence
    (site.slurm.state / "nodes").write_text(nodes)
    site.slurm.jobs = [JOB, JOB | {"A": 9, "j": "x"}]
    assert (await reaches(site, SessionState.STARTING)).sentence == ""


@pytest.mark.parametrize("published", ["silent", "taken from the job"])
async def test_a_session_that_has_lost_a_node_says_so(
    site: Any, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme.broker.watch.CLUSTER_AT_MOST_EVERY", 0.5)
    site.slurm.jobs = [JOB | {"N": "n[1-2]"}]
    await reaches(site, SessionState.STARTING)
    site.act("hub", trusted=True)
    await site.client.note(7, "ada", READY)
    batch = await site.client.events()
    assert [session.sentence for session in batch.sessions] == [""]
    if published == "silent":
        nodes = (site.slurm.state / "nodes").read_text()
        (site.slurm.state / "nodes").write_text(nodes.replace("State=IDLE+DRAIN", "State=DOWN+DRAIN"))
    left = {"silent": "n[1-2]", "taken from the job": "n1"}[published]
    # The new job makes the broker look at the nodes.
    site.slurm.jobs = [JOB | {"N": left}, JOB | {"A": 8, "j": "x"}]
    while not any(session.sentence for session in batch.sessions):
        batch = await site.client.events(batch.cursor, wait=30)
    session = await site.client.session("s1", user="ada")
    assert session.state is SessionState.READY
    assert session.sentence.startswith("The session lost its node n2 and continues without it.")


async def test_a_failed_session_reports_the_end_of_its_log(site: Any, order: JobRequest) -> None:
    job_id = await site.client.submit(order)
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    log.write_text("early\n" * 5000 + "ModuleNotFoundError: no jupyterhub\n")
    log.chmod(0o644)
    site.slurm.jobs = [
        job | {"T": "FAILED", "exit": 1 << 8, "N": "n1", "S": STARTED} for job in site.slurm.jobs
    ]
    session = await reaches(site, SessionState.ENDED)
    cursor = (await site.client.events()).cursor
    while "ModuleNotFoundError" not in session.sentence:
        (session,) = (await site.client.events(cursor, wait=30)).sessions or [session]
        session = await site.client.session("s1")
    assert (session.ending, session.failed) == (Ending.DIED_AT_START, True)


async def test_a_cancel_that_fails_is_no_end(site: Any) -> None:
    site.slurm.jobs = [JOB]
    await reaches(site, SessionState.STARTING)
    site.slurm.fail("scancel", "scancel: error: Kill job error on job id 7: Invalid user id")
    with pytest.raises(SlurmError):
        await site.client.cancel(7)
    assert (await site.client.session("s1")).state is SessionState.STARTING
    site.slurm.jobs = [JOB | {"T": "FAILED", "exit": 3 << 8}]
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.DIED_AT_START


async def test_cancellations_by_owner_and_administrator_are_distinguished(site: Any) -> None:
    site.slurm.jobs = [JOB, JOB | {"A": 8, "j": "session-s2"}]
    await reaches(site, SessionState.STARTING, "s2")
    await site.client.cancel(7)
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.STOPPED
    site.act("root", trusted=True)
    await site.client.cancel(8)
    assert (await reaches(site, SessionState.ENDED, "s2")).ending is Ending.CANCELLED_BY_ADMIN


ENDED = STARTED + 100
URGENT: dict[str, Any] = JOB | {
    "A": 17, "j": "urgent", "u": "bob", "P": "urgent", "k": "", "V": ENDED - 5, "S": ENDED + 1
}  # fmt: skip


async def published(site: Any, job_id: int, words: str) -> str:
    """The sentence of a job, once it has the words."""
    cursor = None
    while words not in (sentence := (await site.client.job(job_id)).explanation):
        cursor = (await site.client.events(cursor, wait=30)).cursor
    return sentence


async def test_what_took_the_place_of_a_preempted_session_is_named(site: Any) -> None:
    preempted = JOB | {"T": "PREEMPTED", "e": ENDED}
    site.slurm.jobs = [preempted]
    assert "in favour of one with a higher priority" in (await reaches(site, SessionState.ENDED)).sentence
    # It starts when the place is free: later than the end is seen.
    site.slurm.jobs = [preempted, URGENT]
    await published(site, 7, "in favour of job 17 in partition urgent, which has a higher priority; start")
    assert "job 17 in partition urgent" in (await site.client.session("s1")).sentence
    (requested,) = [call for call in site.slurm.calls("squeue") if "--Format=JobID:20" in call["arguments"]]
    assert requested["environment"]["USER"] == "ada"
    # What is known stays when Slurm has forgotten that job.
    site.slurm.jobs = [preempted, JOB | {"A": 9, "j": "session-s9"}]
    await reaches(site, SessionState.STARTING, "s9")
    assert "job 17" in (await site.client.session("s1")).sentence


@pytest.mark.parametrize(
    ("hidden", "words"),
    [("", "a job in partition urgent, which has a higher"), ("urgent", "one with a higher priority")],
)
async def test_only_the_partition_of_a_hidden_job_is_reported(site: Any, hidden: str, words: str) -> None:
    (site.slurm.state / "private").write_text(hidden)
    site.slurm.jobs = [
        JOB | {"T": "PREEMPTED", "e": ENDED},
        JOB | {"A": 8, "j": "session-s2", "N": "n2", "T": "PREEMPTED", "e": ENDED},
        URGENT,
        URGENT | {"A": 18, "u": "ada", "N": "n2", "q": "rush"},
    ]
    await reaches(site, SessionState.ENDED, "s2")
    await published(site, 8, "job 18 in partition urgent with quality of service rush, which has")
    assert f"in favour of {words}" in (await site.client.session("s1")).sentence


@pytest.mark.parametrize(
    "difference",
    [
        {"P": "gpu"},  # of equal rank
        {"N": "n2"},
        {"S": ENDED - 1},
        {"V": ENDED + 5, "S": ENDED + 6},
        {"T": "PENDING"},
    ],
)
async def test_what_did_not_take_the_place_is_not_blamed(site: Any, difference: dict[str, Any]) -> None:
    site.slurm.jobs = [JOB | {"T": "PREEMPTED", "e": ENDED}, URGENT | difference]
    await reaches(site, SessionState.ENDED)
    site.slurm.jobs = [*site.slurm.jobs, JOB | {"A": 9, "j": "session-s9"}]
    await reaches(site, SessionState.STARTING, "s9")
    assert "in favour of one with a higher priority" in (await site.client.session("s1")).sentence


async def test_a_cancellation_of_a_job_that_slurm_is_ending_is_not_its_cause(site: Any) -> None:
    site.slurm.jobs = [JOB]
    site.act("hub", trusted=True)
    await reaches(site, SessionState.STARTING)
    await site.client.note(7, "ada", READY)
    site.slurm.jobs = [JOB | {"T": "COMPLETING"}]
    await reaches(site, SessionState.STOPPING)
    # As the portal does, by way of the hub, with what is left of a session.
    await site.client.note(7, "ada", SessionNote(server=ServerStatus.STOPPING, ending=Ending.STOPPED))
    await site.client.cancel(7, user="ada", session="s1")
    site.slurm.jobs = [JOB | {"T": "TIMEOUT", "e": ENDED}]
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.TIME_LIMIT


# What Slurm loses when it is killed


def recorded(job_id: int, state: str, **known: str) -> dict[str, Any]:
    """A job of the session s1 in the accounting."""
    return {"JobIDRaw": job_id, "User": "ada", "JobName": "session-s1", "State": state} | known


async def submitted(site: Any, order: JobRequest) -> int:
    """The number of the session's job, which waits and which Slurm has shown."""
    site.act("hub", trusted=True)
    job_id = await site.client.submit(order, user="ada")
    await shown(site)
    return job_id


def closings(site: Any) -> list[Any]:
    """The times that the broker closed the records of lost jobs."""
    return [call for call in site.slurm.calls("sacctmgr") if "runawayjobs" in call["arguments"]]


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until the next polls fulfil a condition; the test's own time limit ends it otherwise."""
    while not (result := await condition()):  # noqa: ASYNC110 - what changes is outside
        await asyncio.sleep(0.02)
    return result


async def called(site: Any, program: str, times: int = 1) -> None:
    """The broker has run one of Slurm's programs so often."""

    async def enough() -> bool:
        return len(site.slurm.calls(program)) >= times

    await until(enough)


async def resubmitted(site: Any) -> Session:
    """The session, once its job was submitted again."""

    async def again() -> Session | None:
        session = await site.client.session("s1")
        return session if session.lost_jobs else None

    return await until(again)


async def shown(site: Any) -> None:
    """Wait until the broker has polled Slurm as it is now."""
    polls = len(site.slurm.calls("squeue"))
    site.slurm.jobs = [*site.slurm.jobs, JOB | {"A": 900 + polls, "j": "other", "k": "", "T": "PENDING"}]

    async def seen() -> bool:
        return 900 + polls in [job.id for job in await site.client.jobs()]

    await until(seen)


async def test_a_waiting_session_that_slurm_lost_is_submitted_again_once(
    site: Any, order: JobRequest
) -> None:
    lost = await submitted(site, order)
    site.slurm.account(recorded(lost, "PENDING"))
    batch = await site.client.events()
    site.slurm.jobs = [JOB | {"A": 50 + number, "j": "other", "k": ""} for number in range(5)]
    sessions = [session for session in batch.sessions if session.name == "s1"]
    while sessions[-1].job_id == lost:
        batch = await site.client.events(batch.cursor, wait=30)
        sessions += [session for session in batch.sessions if session.name == "s1"]
    assert {session.state for session in sessions} == {SessionState.QUEUED}
    assert (sessions[-1].job_id, sessions[-1].lost_jobs) == (105, (lost,))
    assert "Carme submitted it again" in sessions[-1].sentence
    await shown(site)
    first, second = site.slurm.calls("sbatch")
    assert first["uid"] == second["uid"]
    assert first["arguments"] == second["arguments"]
    assert second["stdin"] == first["stdin"].replace(' "$PWD"', ' --submission 2 "$PWD"')
    assert len(closings(site)) == 1
    assert [session.job_id for session in await site.client.sessions(active=False)] == [105]
    # A client that does not know the new number yet still means this session.
    site.slurm.account()
    await site.client.note(lost, "ada", SessionNote(server=ServerStatus.STARTING), session="s1")
    await site.client.cancel(lost, user="ada", session="s1")
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.STOPPED
    assert [call["arguments"] for call in site.slurm.calls("scancel")] == [["105"]]


async def test_a_broker_that_was_restarted_submits_a_lost_session_again(
    start: Callable[[], Any], slurm: Any, order: JobRequest
) -> None:
    async with start() as site:
        lost = await submitted(site, order)
    slurm.account(recorded(lost, "PENDING"))
    slurm.jobs = []
    async with start() as site:
        site.act("hub", trusted=True)
        assert (await resubmitted(site)).state is SessionState.QUEUED


async def test_a_broker_that_ended_before_it_stored_a_lost_jobs_new_number_finds_it(
    start: Callable[[], Any], slurm: Any, order: JobRequest
) -> None:
    async with start() as site:
        lost = await submitted(site, order)
    slurm.account(recorded(lost, "PENDING"))
    slurm.jobs = [job | {"A": 107} for job in slurm.jobs if job["A"] == lost]
    async with start() as site:
        site.act("hub", trusted=True)
        session = await resubmitted(site)
        assert (session.state, session.job_id, session.lost_jobs) == (SessionState.QUEUED, 107, (lost,))
        await shown(site)
        assert len(site.slurm.calls("sbatch")) == 1
        assert [session.job_id for session in await site.client.sessions(active=False)] == [107]


async def test_a_lost_session_waits_for_the_accounting(
    site: Any, order: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carme.broker.vanished.CLOSE_AGAIN_SECONDS", 0.5)
    lost = await submitted(site, order)
    site.slurm.account(recorded(lost, "PENDING"))
    for program in ("sacct", "sacctmgr"):
        site.slurm.fail(program, f"{program}: error: slurm_persist_conn_open: Connection refused")
    site.slurm.jobs = []
    await called(site, "sacct")
    await shown(site)
    assert (await site.client.session("s1")).state is SessionState.QUEUED
    site.slurm.heal("sacct")
    await until(lambda: asyncio.to_thread(closings, site))
    assert len(site.slurm.calls("sbatch")) == 1
    # Somebody else closes the record: it is that of a lost job as before.
    site.slurm.account(recorded(lost, "COMPLETED", Start="None", End="1795181538"))
    site.slurm.heal("sacctmgr")
    assert (await resubmitted(site)).state is SessionState.QUEUED


async def test_a_lost_session_that_was_to_end_ends(site: Any, order: JobRequest) -> None:
    lost = await submitted(site, order)
    site.slurm.account(recorded(lost, "PENDING"))
    await site.client.note(lost, "ada", SessionNote(server=ServerStatus.STOPPING, ending=Ending.STOPPED))
    site.slurm.jobs = []
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.STOPPED
    assert len(site.slurm.calls("sbatch")) == 1
    assert closings(site)


async def test_a_session_that_was_lost_after_it_had_begun_ends(site: Any, order: JobRequest) -> None:
    lost = await submitted(site, order)
    site.slurm.account(recorded(lost, "RUNNING", Start="1795181538"))
    site.slurm.jobs = []
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.LOST
    assert len(site.slurm.calls("sbatch")) == 1
    assert closings(site)


@pytest.mark.parametrize("shown", ["PENDING", "RUNNING"])
async def test_a_session_that_was_lost_after_it_had_begun_and_whose_record_is_closed_ends(
    site: Any, order: JobRequest, shown: str
) -> None:
    lost = await submitted(site, order)
    if shown == "RUNNING":
        site.slurm.jobs = [job | {"T": shown} if job["A"] == lost else job for job in site.slurm.jobs]
        await reaches(site, SessionState.STARTING)
    # As Slurm closes it: with its start as its end, and without the comment by which we know our jobs.
    site.slurm.account(recorded(lost, "COMPLETED", Start="1795181538", End="1795181538"))
    site.slurm.jobs = []
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.LOST
    assert len(site.slurm.calls("sbatch")) == 1


async def test_what_the_accounting_says_of_a_session_s_end_is_taken_without_its_comment(
    site: Any, order: JobRequest
) -> None:
    lost = await submitted(site, order)
    site.slurm.account(recorded(lost, "TIMEOUT", Start="1795181538", End="1795181598"))
    site.slurm.jobs = []
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.TIME_LIMIT


async def test_a_session_whose_number_another_job_gets_is_lost(site: Any, order: JobRequest) -> None:
    lost = await submitted(site, order)
    site.slurm.account(recorded(lost, "PENDING"))
    site.slurm.jobs = [JOB | {"A": lost, "j": "session-s2", "k": JOB["k"].replace(KEY, "1" * 32)}]
    assert (await reaches(site, SessionState.STARTING, "s2")).job_id == lost
    for ask in (
        lambda: site.client.cancel(lost, user="ada", session="s1"),
        lambda: site.client.note(lost, "ada", READY, session="s1"),
    ):
        with pytest.raises(NotFound, match="no session 's1'"):
            await ask()
    # Slurm closes records by number: not while that one is in use.
    assert (site.slurm.calls("scancel"), closings(site)) == ([], [])
    site.slurm.jobs = [site.slurm.jobs[0] | {"T": "COMPLETED"}]
    await until(lambda: asyncio.to_thread(closings, site))


async def test_a_job_whose_cancellation_slurm_lost_is_cancelled_again(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "CANCEL_AGAIN_SECONDS", 0.2)
    site.slurm.jobs = [JOB, JOB | {"A": 8, "j": "session-s2"}]
    await reaches(site, SessionState.STARTING, "s2")
    await site.client.cancel(7)
    assert (await reaches(site, SessionState.ENDED)).ending is Ending.STOPPED
    site.slurm.jobs = [JOB, JOB | {"A": 8, "j": "session-s2"}]
    await called(site, "scancel", 2)
    assert [call["arguments"] for call in site.slurm.calls("scancel")] == [["7"], ["7"]]
    assert (await site.client.session("s2")).state is SessionState.STARTING


async def test_a_job_that_has_lost_its_first_node_is_ended(site: Any) -> None:
    site.slurm.jobs = [
        JOB | {"N": "n[1-2]", "B": "n1"},
        JOB | {"A": 8, "j": "session-s2", "B": "n1"},
    ]
    await reaches(site, SessionState.STARTING, "s2")
    site.slurm.jobs = [JOB | {"N": "n2", "B": "n1"}, site.slurm.jobs[1]]
    await called(site, "scancel", 1)
    site.slurm.jobs = [site.slurm.jobs[0] | {"T": "CANCELLED"}, site.slurm.jobs[1]]
    over = await reaches(site, SessionState.ENDED)
    assert over.ending is Ending.NODE_FAILURE
    assert "Node n1 failed" in over.sentence
    assert [call["arguments"] for call in site.slurm.calls("scancel")] == [["7"]]
