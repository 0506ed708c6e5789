"""What a session's state, timeline and sentences follow from."""

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from carme.jobs import Job, JobState, Phase
from carme.sessions import (
    TRANSITIONS,
    Ending,
    Mark,
    ServerStatus,
    SessionNote,
    SessionState,
    Step,
    may_follow,
)
from carme.sessions.facts import Facts, after_note, after_poll, session_name, session_of, state_of, timeline

NOW = datetime(2026, 11, 20, 12, 0, 0, 400_000, UTC)
SERVERS = [None, *ServerStatus]
STATES = [None, *SessionState]
OVER = [state for state in JobState if state.phase is Phase.OVER]
WAITING = [s for s in JobState if s.phase is Phase.PENDING and s is not JobState.CONFIGURING]


def job(state: JobState = JobState.RUNNING, **known: Any) -> Job:
    values: dict[str, Any] = {
        "id": 7, "kind": "session", "image": "torch", "name": "session-s1", "user": "ada", "state": state,
        "node_list": "" if state in WAITING else "n1", "nodes": 1, "minutes_limit": 60,
        "submitted": NOW.replace(microsecond=0),
        "started": None if state.phase is Phase.PENDING else NOW.replace(microsecond=0),
    }  # fmt: skip
    return Job(**(values | known))


def mark(step: Step, seconds: float) -> Mark:
    return Mark(step=step, at=NOW + timedelta(seconds=seconds))


EVERYTHING = list(product(STATES, JobState, SERVERS, [True, False]))


def test_no_state_is_left_in_a_way_that_the_table_forbids() -> None:
    for previous, state, server, reachable in EVERYTHING:
        following = state_of(state, server, previous, reachable)
        assert previous is None or following is previous or may_follow(previous, following), (
            previous, state, server, reachable, following,
        )  # fmt: skip
        assert following is not SessionState.REQUESTED or previous is SessionState.REQUESTED


def test_every_transition_of_the_table_happens_but_back_to_what_only_the_portal_knows() -> None:
    happening = {
        (previous, state_of(state, server, previous, reachable))
        for previous, state, server, reachable in EVERYTHING
        if previous
    }
    table = {(state, following) for state, all_ in TRANSITIONS.items() for following in all_}
    assert table <= happening


def test_an_ended_job_is_an_ended_session_and_nothing_else_is() -> None:
    for previous, state, server, reachable in EVERYTHING:
        over = state in OVER or previous is SessionState.ENDED
        assert (state_of(state, server, previous, reachable) is SessionState.ENDED) is over


def test_only_a_server_that_was_ready_and_answers_is_ready() -> None:
    for previous, state, server, reachable in EVERYTHING:
        if state_of(state, server, previous, reachable) is SessionState.READY:
            assert server is ServerStatus.READY or previous is SessionState.READY
            assert server not in (ServerStatus.UNREACHABLE, ServerStatus.STOPPING, ServerStatus.GONE)


@pytest.mark.parametrize(
    ("previous", "state", "server", "reachable", "following"),
    [
        (None, "PENDING", None, True, "queued"),
        ("requested", "PENDING", None, True, "queued"),
        ("queued", "CONFIGURING", None, True, "starting"),
        ("queued", "RUNNING", None, True, "starting"),
        ("queued", "PENDING", "starting", True, "queued"),
        ("queued", "PENDING", "ready", True, "ready"),  # the hub heard before the next poll of Slurm
        ("queued", "PENDING", "stopping", True, "stopping"),
        ("queued", "RUNNING", None, False, "starting"),  # never straight to lost
        ("starting", "RUNNING", None, False, "lost"),
        ("starting", "PENDING", None, True, "queued"),  # put back before it had run
        ("starting", "RUNNING", "ready", True, "ready"),
        ("ready", "RUNNING", "starting", True, "ready"),
        ("ready", "RUNNING", "ready", False, "lost"),
        ("ready", "RUNNING", "unreachable", True, "lost"),
        ("ready", "SUSPENDED", "ready", True, "suspended"),
        ("ready", "SUSPENDED", "unreachable", False, "suspended"),  # it cannot answer
        ("suspended", "RUNNING", "ready", True, "ready"),
        ("suspended", "RUNNING", "unreachable", True, "lost"),
        ("suspended", "RUNNING", "starting", True, "starting"),
        ("suspended", "PENDING", None, True, "lost"),
        ("ready", "PENDING", None, True, "lost"),
        ("ready", "COMPLETING", "ready", True, "stopping"),
        ("ready", "RUNNING", "gone", True, "stopping"),
        ("ready", "UNKNOWN", "ready", True, "ready"),
        ("lost", "RUNNING", "ready", True, "ready"),
        ("lost", "RUNNING", None, True, "starting"),
        ("lost", "NODE_FAIL", "ready", False, "ended"),
        ("stopping", "RUNNING", "ready", True, "stopping"),
        ("stopping", "CANCELLED", "stopping", True, "ended"),
        ("ended", "RUNNING", "ready", True, "ended"),
    ],
)
def test_a_state_follows_from_job_server_and_node(
    previous: str | None, state: str, server: str | None, reachable: bool, following: str
) -> None:
    before = SessionState(previous) if previous else None
    status = ServerStatus(server) if server else None
    assert state_of(JobState(state), status, before, reachable) == following


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("session-s1", "session", "s1"),
        ("session-s1", "batch", None),
        ("session-s1", "other", None),
        ("session-", "session", None),
        ("session-../x", "session", None),
        ("session-a b", "session", None),
        ("session-a\nb", "session", None),
        ("other", "session", None),
    ],
)
def test_only_valid_session_jobs_are_sessions(name: str, kind: Any, expected: str | None) -> None:
    assert session_name(job(name=name, kind=kind)) == expected


# The timeline


def test_slurms_whole_seconds_are_refined_but_never_contradicted() -> None:
    second = NOW.replace(microsecond=0)
    waiting = Facts(job=job(JobState.PENDING), submitted_seen=NOW)
    assert timeline(waiting) == (Mark(step=Step.SUBMITTED, at=NOW),)

    running = after_poll(waiting, job(started=second + timedelta(seconds=1)), NOW + timedelta(seconds=1))
    assert running.allocated_seen == NOW + timedelta(seconds=1)
    assert timeline(running)[1].at == NOW + timedelta(seconds=1)
    # Seen long after: it began within the second that Slurm names.
    late = after_poll(waiting, job(started=second + timedelta(seconds=1)), NOW + timedelta(seconds=30))
    assert timeline(late)[1].at == second + timedelta(seconds=2)
    # Slurm's second begins before the submission was seen: allocated is never before submitted.
    same = after_poll(waiting, job(started=second), NOW + timedelta(milliseconds=300))
    assert timeline(same)[1].at == NOW + timedelta(milliseconds=300)
    early = after_poll(waiting, job(started=second - timedelta(seconds=5)), NOW - timedelta(seconds=1))
    assert [entry.at for entry in timeline(early)] == [NOW, NOW]
    # The job's own script began before the next poll of Slurm.
    reported = after_note(late, SessionNote(marks=(mark(Step.PROLOG, 0.7),)))
    assert timeline(reported)[1].at == NOW + timedelta(seconds=0.7)
    # A node whose clock is behind says nothing about it.
    wrong = after_note(late, SessionNote(marks=(mark(Step.PROLOG, -300),)))
    assert timeline(wrong)[1].at == second + timedelta(seconds=2)


def test_a_job_that_the_broker_did_not_see_begin_has_slurms_times() -> None:
    facts = Facts(job=job())
    assert [(entry.step, entry.at) for entry in timeline(facts)] == [
        (Step.SUBMITTED, NOW.replace(microsecond=0)),
        (Step.ALLOCATED, NOW.replace(microsecond=0)),
    ]


def test_a_job_that_never_started_was_never_allocated() -> None:
    ended = after_poll(Facts(job=job(JobState.PENDING)), job(JobState.CANCELLED, node_list=""), NOW)
    assert [entry.step for entry in timeline(ended)] == [Step.SUBMITTED]


def test_the_first_time_of_a_step_holds_and_steps_have_an_order() -> None:
    facts = Facts(job=job())
    facts = after_note(facts, SessionNote(marks=(mark(Step.ROUTED, 3), mark(Step.LISTENING, 2))))
    facts = after_note(facts, SessionNote(marks=(mark(Step.ROUTED, 9), mark(Step.REQUESTED, -1))))
    assert [entry.step for entry in timeline(facts)] == [
        *(Step.REQUESTED, Step.SUBMITTED, Step.ALLOCATED, Step.LISTENING, Step.ROUTED),
    ]
    assert facts.marks[-1].at == NOW + timedelta(seconds=3)


# Notes


def test_an_empty_note_changes_nothing() -> None:
    facts = after_note(
        Facts(job=job()),
        SessionNote(
            server=ServerStatus.READY, ending=Ending.IDLE, message="So.", idle_since=NOW, stops_idle=NOW
        ),
    )
    assert after_note(facts, SessionNote()) == facts


def test_the_epoch_means_not_idle() -> None:
    facts = after_note(Facts(job=job()), SessionNote(idle_since=NOW, stops_idle=NOW))
    assert session_of(facts).stops_idle == session_of(facts).idle_since == NOW
    epoch = datetime.fromtimestamp(0, UTC)
    busy = session_of(after_note(facts, SessionNote(idle_since=epoch, stops_idle=epoch)))
    assert busy.stops_idle is busy.idle_since is None


def test_a_job_put_back_into_the_queue_has_no_server_any_more() -> None:
    ready = after_note(Facts(job=job()), SessionNote(server=ServerStatus.READY))
    ready = ready.model_copy(update={"state": session_of(ready).state})
    back = session_of(after_poll(ready, job(JobState.PENDING), NOW))
    assert back.state is SessionState.LOST
    assert "back into the queue" in back.sentence


def test_a_server_that_reports_after_its_job_was_requeued_is_lost() -> None:
    def at(seconds: float) -> datetime:
        return NOW + timedelta(seconds=seconds)

    def reported(facts: Facts) -> Facts:
        return facts.model_copy(update={"state": session_of(facts).state})

    facts = reported(after_poll(reported(Facts(job=job())), job(JobState.PENDING), at(1), at(1)))
    assert facts.state is SessionState.QUEUED
    facts = reported(after_note(facts, SessionNote(server=ServerStatus.READY), at(2)))
    # A poll that had begun before may show the earlier state.
    early = reported(after_poll(facts, job(JobState.PENDING), at(3), at(1.9)))
    assert early.state is SessionState.READY
    lost = reported(after_poll(early, job(JobState.PENDING), at(4), at(3.9)))
    assert lost.state is SessionState.LOST
    assert "back into the queue" in session_of(lost).sentence
    # It does not come back with the job, but another one may.
    again = reported(after_poll(lost, job(), at(5), at(4.9)))
    assert again.state is SessionState.STARTING
    assert (
        reported(after_note(again, SessionNote(server=ServerStatus.READY), at(6))).state is SessionState.READY
    )
    assert reported(after_poll(facts, job(), at(3), at(2.9))).state is SessionState.READY


def test_what_clears_away_a_session_that_its_owner_stopped_does_not_say_why_it_ended() -> None:
    stopped = after_note(Facts(job=job(JobState.PENDING)), SessionNote(ending=Ending.STOPPED))
    cleared = after_note(
        stopped, SessionNote(ending=Ending.LOST, message="The hub did not know it any more.")
    )
    over = session_of(after_poll(cleared, job(JobState.CANCELLED, node_list=""), NOW))
    assert over.ending is Ending.STOPPED
    assert "did not know" not in over.sentence


# What is reported


def test_a_running_session_has_the_values_of_its_job() -> None:
    session = session_of(after_note(Facts(job=job()), SessionNote(server=ServerStatus.READY)))
    assert (session.name, session.owner, session.job_id, session.image) == ("s1", "ada", 7, "torch")
    assert (session.label, session.sentence, session.node_list) == ("Ready", "", "n1")
    assert session.ends == NOW.replace(microsecond=0) + timedelta(minutes=60)


def test_a_waiting_session_says_why() -> None:
    session = session_of(Facts(job=job(JobState.PENDING, reason="Priority")))
    assert "higher priority" in session.sentence
    assert session.ends is None


def test_a_lost_session_says_what_is_silent() -> None:
    facts = after_note(Facts(job=job()), SessionNote(server=ServerStatus.READY))
    assert "node of the session (n1) does not answer" in session_of(facts, silent=["n1"]).sentence
    silent = after_note(facts, SessionNote(server=ServerStatus.UNREACHABLE))
    assert "server does not answer" in session_of(silent).sentence


def test_how_it_ended_is_what_was_noted_before() -> None:
    idle = after_note(Facts(job=job()), SessionNote(server=ServerStatus.READY, ending=Ending.IDLE))
    session = session_of(after_poll(idle, job(JobState.CANCELLED), NOW))
    assert (session.ending, session.failed, session.ends) == (Ending.IDLE, False, None)
    died = session_of(after_poll(Facts(job=job()), job(JobState.FAILED, exit_code=3), NOW))
    assert (died.ending, died.failed) == (Ending.DIED_AT_START, True)
    assert "exit code 3" in died.sentence
    log = session_of(
        after_poll(Facts(job=job()), job(JobState.FAILED, exit_code=3), NOW).model_copy(
            update={"log": "boom\n"}
        )
    )
    assert log.sentence.endswith("\nboom")


@pytest.mark.parametrize("state", OVER)
def test_every_end_has_a_sentence(state: JobState) -> None:
    session = session_of(after_poll(Facts(job=job()), job(state), NOW))
    assert session.ending and session.sentence.endswith(".")


@pytest.mark.parametrize(
    ("ends", "ending"),
    [
        (JobState.COMPLETING, Ending.TIME_LIMIT),
        (JobState.TIMEOUT, Ending.TIME_LIMIT),
        (JobState.UNKNOWN, Ending.STOPPED),
        (JobState.RUNNING, Ending.STOPPED),
    ],
)
def test_a_cancellation_of_an_ending_session_is_not_its_cause(ends: JobState, ending: Ending) -> None:
    ready = after_note(Facts(job=job()), SessionNote(server=ServerStatus.READY))
    cleared = after_note(
        after_poll(ready, job(ends), NOW), SessionNote(server=ServerStatus.STOPPING, ending=Ending.STOPPED)
    )
    assert session_of(after_poll(cleared, job(JobState.TIMEOUT), NOW)).ending is ending


def test_the_first_ending_that_is_noted_holds() -> None:
    idle = after_note(Facts(job=job()), SessionNote(server=ServerStatus.STOPPING, ending=Ending.IDLE))
    cleared = after_note(idle, SessionNote(server=ServerStatus.STOPPING, ending=Ending.STOPPED))
    assert session_of(after_poll(cleared, job(JobState.CANCELLED), NOW)).ending is Ending.IDLE
