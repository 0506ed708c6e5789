"""A session out of what Slurm and the hub say. Pure functions.

`carme.sessions` does not export them: they need `carme.jobs`, which needs the endings from there.
"""

import re
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from pydantic import ConfigDict

from carme.jobs import Job, JobState, Phase, ending_of
from carme.jobs.nodes import expand
from carme.sessions.models import Mark, QueueEstimate, ServerStatus, Session, SessionNote
from carme.sessions.states import Ending, SessionState, Step
from carme.translation import joined, plural
from carme.translation import message as _
from carme.translation.models import Sentence, WithMessages

__all__ = [
    "Facts",
    "after_note",
    "after_poll",
    "has_lost_server",
    "session_name",
    "session_of",
    "state_of",
    "timeline",
]

EPOCH = datetime.fromtimestamp(0, UTC)  # in a note: not idle, nothing threatens
RESOLUTION = timedelta(seconds=1)  # of Slurm's times

_NAME = re.compile(r"session-([A-Za-z0-9][A-Za-z0-9_.-]{0,55})")
_STEPS = list(Step)
_RESUBMITTED = _("Slurm lost the session when it was restarted, so Carme submitted it again.")


class Facts(WithMessages):
    """All that is known about one session; a `Session` follows from it.

    Attributes:
        job: Its Slurm job as last seen.
        state: The state that was reported last; None before the first.
        server, was_ready: What the hub noted last, and whether the server was ever ready.
        server_at: When the broker heard the former; None if that is not known.
        marks: The steps that services noted.
        submitted_seen, allocated_seen: When the broker itself saw Slurm take the job, and start it.
        ending, message: What was noted about its end.
        log: The end of its log, once it has failed by itself.
        ended: When the broker saw that it is over.
        lost_jobs: Its jobs that Slurm lost while they waited; the broker submitted it again.
        nodes: The nodes that it began with, in Slurm's short form: a job that loses one is shown without.
    """

    model_config = ConfigDict(frozen=True)

    job: Job
    state: SessionState | None = None
    server: ServerStatus | None = None
    server_at: datetime | None = None
    was_ready: bool = False
    marks: tuple[Mark, ...] = ()
    submitted_seen: datetime | None = None
    allocated_seen: datetime | None = None
    ending: Ending | None = None
    message: Sentence = ""
    log: str | None = None
    idle_since: datetime | None = None
    stops_idle: datetime | None = None
    ended: datetime | None = None
    lost_jobs: tuple[int, ...] = ()
    nodes: str = ""

    @property
    def is_unwanted(self) -> bool:
        """It is over or meant to end: its job must not go on."""
        leaving = self.server in (ServerStatus.STOPPING, ServerStatus.GONE)
        return self.ended is not None or self.ending is not None or leaving

    @property
    def is_ending(self) -> bool:
        """Slurm is ending its job, or has: anyone who cancels or clears away now is not why."""
        state = self.job.state
        return state.phase in (Phase.ENDING, Phase.OVER) and state is not JobState.UNKNOWN


def session_name(job: Job) -> str | None:
    """The name of the session that a job serves; None for any other job."""
    match = _NAME.fullmatch(job.name) if job.kind == "session" else None
    return match[1] if match else None


def after_poll(facts: Facts, job: Job, now: datetime, taken: datetime | None = None) -> Facts:
    """The facts after a poll of Slurm.

    Args:
        job: The session's job as Slurm shows it now.
        now: When that was.
        taken: When the look had not begun yet; None if that is not known.
    """
    if facts.job.preempted_by and not job.preempted_by:
        # A broker that was started again may see what took the place no more.
        job = job.model_copy(update={"preempted_by": facts.job.preempted_by})
    known: dict[str, object] = {"job": job}
    if _waits(job.state) and not _waits(facts.job.state):
        # Slurm put it back into the queue: the server that there was is gone.
        known |= {"server": None, "allocated_seen": None, "nodes": ""}
    elif has_lost_server(facts, job, taken):
        known["server"] = None
    elif facts.allocated_seen is None and _waits(facts.job.state) and _has_nodes(job):
        known["allocated_seen"] = now
    if job.is_over and facts.ended is None:
        known["ended"] = now
    if job.state is JobState.RUNNING and not facts.nodes:
        known["nodes"] = job.node_list
    return facts.model_copy(update=known)


def has_lost_server(facts: Facts, job: Job, taken: datetime | None) -> bool:
    """Whether the job waits although its server had been ready before this poll of Slurm began.

    Slurm put it back into the queue, and the hub's note came only afterwards.
    """
    if taken is None or facts.server_at is None or facts.server is not ServerStatus.READY:
        return False
    return _waits(job.state) and facts.server_at < taken


def after_note(facts: Facts, note: SessionNote, now: datetime | None = None) -> Facts:
    """The facts after a note; the first time of a step holds, and the first ending.

    Who clears away what is ending anyway notes an ending too, which is not why it ends: nor is its message.

    Args:
        now: When the note came.
    """
    known: dict[str, object] = {}
    if note.server is not None:
        known["server"] = note.server
        known["server_at"] = now
        known["was_ready"] = facts.was_ready or note.server is ServerStatus.READY
    if note.marks:
        times = {mark.step: mark for mark in (*reversed(note.marks), *facts.marks)}
        known["marks"] = tuple(times[step] for step in _STEPS if step in times)
    is_why = facts.ending is None and not facts.is_ending
    if note.ending is not None and is_why:
        known["ending"] = note.ending
    if note.message and (note.ending is None or is_why):
        known["message"] = note.message
    for field in ("idle_since", "stops_idle"):
        moment = getattr(note, field)
        if moment is not None:
            known[field] = None if moment == EPOCH else moment
    return facts.model_copy(update=known)


def state_of(
    job: JobState, server: ServerStatus | None, previous: SessionState | None, reachable: bool = True
) -> SessionState:
    """The state that follows `previous`.

    Args:
        job: Slurm's state of its job.
        server: What the hub noted last.
        previous: The state that was reported last; None for a session that is seen for the first time.
        reachable: Slurm hears the node of its server.
    """
    if previous is SessionState.ENDED or job.phase is Phase.OVER:
        return SessionState.ENDED
    if previous is SessionState.STOPPING or server in (ServerStatus.STOPPING, ServerStatus.GONE):
        return SessionState.STOPPING
    before = (SessionState.REQUESTED, SessionState.QUEUED)
    if job is JobState.UNKNOWN and (previous is None or previous in before):
        return previous or SessionState.STARTING  # a word of a newer Slurm says nothing new
    if job.phase is Phase.ENDING and job is not JobState.UNKNOWN:
        return SessionState.STOPPING
    # A server that is ready while its job waits was heard of before the next poll of Slurm.
    if job is JobState.SUSPENDED:
        return SessionState.SUSPENDED
    if _waits(job) and server is not ServerStatus.READY:
        was_up = previous in (SessionState.READY, SessionState.SUSPENDED, SessionState.LOST)
        return SessionState.LOST if was_up else SessionState.QUEUED
    if not reachable or server is ServerStatus.UNREACHABLE:
        return SessionState.STARTING if previous in before else SessionState.LOST
    if server is ServerStatus.READY or previous is SessionState.READY:
        return SessionState.STARTING if previous is SessionState.REQUESTED else SessionState.READY
    return SessionState.STARTING


def timeline(facts: Facts) -> tuple[Mark, ...]:
    """The marks in their order.

    Slurm's own times are whole seconds, cut off. The broker's sight of the same event is later than the event
    but finer, and so is the beginning of the job's own script on the node: the earliest of them that is
    possible is reported, and never one before the submission.
    """
    times = {mark.step: mark.at for mark in facts.marks}
    submitted = _latest(facts.submitted_seen, facts.job.submitted)
    if submitted:
        times[Step.SUBMITTED] = submitted
    allocated = _allocated(facts, times.get(Step.PROLOG))
    if allocated:
        times[Step.ALLOCATED] = max(allocated, submitted) if submitted else allocated
    return tuple(Mark(step=step, at=times[step]) for step in _STEPS if step in times)


def session_of(facts: Facts, silent: Collection[str] = (), estimate: QueueEstimate | None = None) -> Session:
    """The session as it is reported.

    Args:
        silent: Its nodes that Slurm does not hear.
        estimate: When it may start; used while it is queued.
    """
    job = facts.job
    # The server runs on the first node.
    reachable = next(iter(expand(job.node_list)), "") not in silent
    state = state_of(job.state, facts.server, facts.state, reachable)
    ending, sentence = None, ""
    if state is SessionState.ENDED:
        ending, sentence = ending_of(job, facts.ending, facts.was_ready, facts.message, facts.log or "")
    elif state is SessionState.QUEUED:
        sentence = estimate.reason if estimate else job.explanation
        if facts.lost_jobs:
            sentence = joined([sentence, _RESUBMITTED])
            estimate = estimate.model_copy(update={"reason": sentence}) if estimate else None
    elif state is SessionState.SUSPENDED:
        sentence = job.explanation
    elif state is SessionState.LOST:
        sentence = _lost_text(facts, reachable)
    elif state is SessionState.READY:
        sentence = _missing(facts, silent)
    running = state in (SessionState.STARTING, SessionState.READY, SessionState.STOPPING, SessionState.LOST)
    return Session(
        name=session_name(job) or job.name,
        owner=job.user,
        job_id=job.id,
        lost_jobs=facts.lost_jobs,
        image=job.image,
        state=state,
        sentence=sentence,
        ending=ending,
        log_pending=ending in (Ending.DIED, Ending.DIED_AT_START) and facts.log is None,
        estimate=estimate if state is SessionState.QUEUED else None,
        node_list=job.node_list,
        partition=job.partition,
        marks=timeline(facts),
        ends=job.ends if running else None,
        idle_since=facts.idle_since if running else None,
        stops_idle=facts.stops_idle if running else None,
    )


def _waits(state: JobState) -> bool:
    # A job in CONFIGURING has its nodes already, which are being prepared.
    return state.phase is Phase.PENDING and state is not JobState.CONFIGURING


def _has_nodes(job: Job) -> bool:
    # Slurm gives a job that was cancelled while it waited a start, but no nodes.
    return not _waits(job.state) and bool(job.node_list or job.state is JobState.CONFIGURING)


def _allocated(facts: Facts, prolog: datetime | None) -> datetime | None:
    job, sight = facts.job, facts.allocated_seen
    if not _has_nodes(job):
        return None
    if job.started is None:
        return sight
    later = [moment for moment in (sight, prolog) if moment and moment >= job.started]
    return min(*later, job.started + RESOLUTION) if later else job.started


def _latest(*moments: datetime | None) -> datetime | None:
    return max((moment for moment in moments if moment), default=None)


def _missing(facts: Facts, silent: Collection[str]) -> str:
    """The sentence for a session that continues without some of its nodes."""
    saved = expand(facts.job.node_list)
    lost = [node for node in expand(facts.nodes) if node not in saved or node in silent]
    if not lost:
        return ""
    return plural(
        "The session lost its node {nodes} and continues without it. Training under "
        "'carme-run --max-restarts' continues on the other nodes; start any other run again. "
        "To use all nodes, start a new session.",
        "The session lost its nodes {nodes} and continues without them. Training under "
        "'carme-run --max-restarts' continues on the other nodes; start any other run again. "
        "To use all nodes, start a new session.",
        len(lost),
        nodes=", ".join(lost),
    )


def _lost_text(facts: Facts, reachable: bool) -> str:
    if _waits(facts.job.state):
        return _(
            "Slurm put the session's job back into the queue, and its server is gone; stop the session and "
            "start it again."
        )
    if not reachable:
        return _(
            "The node of the session ({node}) does not answer; wait: the session comes back with it, or ends "
            "when Slurm gives the node up.",
            node=facts.job.node_list,
        )
    if not facts.was_ready:
        return facts.message or _(
            "The session's job runs, but its server has not reported for minutes, and its node may have "
            "lost it; wait a moment, or stop the session and start it again."
        )
    return facts.message or _(
        "The session's server does not answer, though its job still runs; wait a moment, or stop the session "
        "and start it again."
    )
