"""The outcome of a job or session: how it ended, and the sentence with the cause and the next step."""

from carme.jobs.record import JobRecord
from carme.jobs.states import JobState
from carme.jobs.times import minutes_text
from carme.launch.exits import Exit
from carme.sessions.states import Ending
from carme.translation import Message, joined, noop, row_of
from carme.translation import message as _

__all__ = [
    "FORGOTTEN",
    "LOG_FOLLOWS",
    "NEVER_BEGUN",
    "ending_of",
    "ending_sentence",
    "last_lines",
    "without_log",
]

#: Our own reason for a job that vanished from the queue and is in no accounting.
FORGOTTEN = "Forgotten"

#: And for a task that was cancelled while it waited with others: Slurm keeps no record of it.
NEVER_BEGUN = "NeverBegun"

#: Between a sentence and the last lines of the log, one a line.
LOG_FOLLOWS = " The end of its log says:\n"

_WITH_LOG = noop("{sentence} The end of its log says:\n{lines}")

LOG_LINES = 8
LOG_LETTERS = 1200

# slurmstepd sets it when it cannot open the job's log, which lies in the owner's home.
_NO_OUTPUT_SIGNAL = 53

# A measured peak below this share of the limit was taken before the last allocation.
_NEAR_THE_LIMIT = 0.9

_BY_STATE: dict[JobState, Ending] = {
    JobState.TIMEOUT: Ending.TIME_LIMIT,
    JobState.DEADLINE: Ending.TIME_LIMIT,
    JobState.NODE_FAIL: Ending.NODE_FAILURE,
    JobState.BOOT_FAIL: Ending.NODE_FAILURE,
    JobState.OUT_OF_MEMORY: Ending.OUT_OF_MEMORY,
    JobState.PREEMPTED: Ending.PREEMPTED,
    JobState.REVOKED: Ending.LOST,
    JobState.LAUNCH_FAILED: Ending.DIED_AT_START,
}

_BY_EXIT: dict[int, Ending] = {
    Exit.FAILED: Ending.DIED_AT_START,
    Exit.IMAGE_MISSING: Ending.IMAGE_MISSING,
    Exit.HOME_NOT_WRITABLE: Ending.HOME_NOT_WRITABLE,
    Exit.NO_APPTAINER: Ending.DIED_AT_START,
    Exit.NO_COMMAND: Ending.DIED_AT_START,
    Exit.NO_WORKDIR: Ending.DIED_AT_START,
    Exit.BEGUN_BEFORE: Ending.LOST,
    Exit.NOT_STAGED: Ending.DIED_AT_START,
}


def ending_of(
    job: JobRecord, note_ending: Ending | None, was_ready: bool, message: str = "", log: str = ""
) -> tuple[Ending, str]:
    """Why a job that is over has ended, and its sentence.

    Args:
        job: A job that is over.
        note_ending: What the hub noted before it cancelled the job (`stopped`, `idle`, `lost`): the cause.
        was_ready: Whether its server was ready; batch jobs count as ready.
        message: What the hub has to say about a failure, one sentence; it is the cause where Slurm merely
            says that the owner cancelled the job.
        log: The end of the job's log, for a job that failed by itself; its last lines follow the sentence.
    """
    if note_ending is Ending.STOPPED and message and not was_ready:
        note_ending = None  # it was stopped because its start had failed
    if note_ending is Ending.LOST and message:
        return note_ending, message
    ending = note_ending or _cause(job, was_ready, bool(message))
    if ending is Ending.STOPPED and note_ending is None and job.cancelled_by is None:
        return ending, _cancelled_by_somebody(job)
    if ending in (Ending.DIED, Ending.DIED_AT_START):
        own = job.exit_code in _BY_EXIT or _was_never_launched(job)
        sentence = message if message and not own else ending_sentence(job, ending)
        lines = last_lines(log)
        return ending, _(_WITH_LOG, sentence=sentence, lines=lines) if lines else sentence
    return ending, ending_sentence(job, ending)


def without_log(sentence: str) -> str:
    """What `ending_of` says, without the end of the log."""
    if isinstance(sentence, Message) and sentence.template == _WITH_LOG:
        cause = sentence.values["sentence"]
        return cause if isinstance(cause, str) else ""
    if LOG_FOLLOWS in sentence and (row := row_of(sentence)):
        return joined(map(without_log, row[0]), row[1])
    return sentence.partition(LOG_FOLLOWS)[0] if LOG_FOLLOWS in sentence else sentence


def _was_never_launched(job: JobRecord) -> bool:
    """Slurm gave it nodes and could not start it there; it cancels some of these as root itself."""
    if job.state is JobState.LAUNCH_FAILED:
        return True
    return job.state is JobState.CANCELLED and job.cancelled_by == "slurm" and bool(job.node_list)


def _kind_word(job: JobRecord) -> str:
    return _("session") if job.kind == "session" else _("job")


def _again(job: JobRecord) -> str:
    return _("start it again") if job.kind == "session" else _("submit it again")


def _cancelled_by_somebody(job: JobRecord) -> str:
    """A job that was cancelled, where Slurm does not say by whom (yet, or without accounting)."""
    if job.reason == NEVER_BEGUN:
        return ending_sentence(job, Ending.STOPPED)
    what, again = _kind_word(job), _again(job)
    return _(
        "The {what} was cancelled, and Slurm does not record by whom; {again} to continue.",
        what=what,
        again=again,
    )


def _cause(job: JobRecord, was_ready: bool, blamed: bool) -> Ending:
    if job.reason == FORGOTTEN:
        return Ending.LOST
    if job.state in _BY_STATE:
        return _BY_STATE[job.state]
    if job.state is JobState.CANCELLED and job.failed_node:
        return Ending.NODE_FAILURE  # the broker cancelled it, as its first node was gone
    if job.state is JobState.CANCELLED:
        if job.cancelled_by == "slurm" and job.node_list:
            return Ending.DIED_AT_START  # it had its nodes, and nothing of it ever ran there
        if job.cancelled_by in ("other", "root", "slurm"):
            return Ending.CANCELLED_BY_ADMIN
        if not blamed:
            return Ending.STOPPED
    elif job.signal == _NO_OUTPUT_SIGNAL:
        return Ending.HOME_NOT_WRITABLE
    elif job.exit_code in _BY_EXIT:
        return _BY_EXIT[job.exit_code]
    if not was_ready:
        return Ending.DIED_AT_START
    return Ending.FINISHED if job.state is JobState.COMPLETED else Ending.DIED


_SENTENCES = {
    Ending.IDLE: noop("The {what} was stopped because nothing ran in it; {again} to continue."),
    Ending.TIME_LIMIT: noop(
        "The {what} reached its time limit{limit} and was ended; {again} with more time, or extend it next "
        "time before it ends."
    ),
    Ending.OUT_OF_MEMORY: noop(
        "The {what} ran out of memory{memory}; {again} with more memory, or load less at a time."
    ),
    Ending.PREEMPTED: noop("Slurm ended the {what} in favour of {other}; {again} and it waits for its turn."),
    Ending.HOME_NOT_WRITABLE: noop(
        "Your home directory is not writable on {where}; check that it is yours and has "
        "space left, or tell an administrator that it is not mounted there."
    ),
    Ending.LOST: noop(
        "Slurm has no record of the {what} any more, so Carme does not know how it ended; check its log, "
        "then {again}."
    ),
    Ending.REFUSED: noop("Slurm refused the {what}; ask for less, or tell an administrator."),
    Ending.CANCELLED_BY_ADMIN: noop(
        "An administrator cancelled the {what}; ask them for the reason before you {again}."
    ),
    Ending.IMAGE_MISSING: noop(
        "The image {image} is missing on {where}; choose another one, or ask an administrator to distribute "
        "it."
    ),
    Ending.NODE_FAILURE: noop(
        "One of its nodes failed and the {what} ended with it; {again}, it goes to nodes that work."
    ),
}
_OF_SESSIONS = {
    Ending.STOPPED: noop("You stopped this session."),
    Ending.FINISHED: noop(
        "The session's server was shut down from within; start a new session if you need one."
    ),
}
_OF_JOBS = {
    Ending.STOPPED: noop("You stopped this job."),
    Ending.FINISHED: noop("The job ended without an error; its log has its output."),
}


def ending_sentence(job: JobRecord, ending: Ending) -> str:
    """The cause and the next step; the one table for sessions and batch jobs."""
    match ending:
        case Ending.STOPPED | Ending.FINISHED:
            if ending is Ending.STOPPED and job.reason == NEVER_BEGUN:
                return _("You cancelled this job before it began.")
            return _((_OF_SESSIONS if job.kind == "session" else _OF_JOBS)[ending])
        case Ending.TIME_LIMIT if job.state is JobState.DEADLINE:
            template = noop("The {what} could not end before its deadline; {again} with a later one.")
        case Ending.NODE_FAILURE if _failed_node(job):
            template = noop(
                "Node {node} failed and the {what} ended with it; {again}, it goes to nodes that work."
            )
        case Ending.CANCELLED_BY_ADMIN if job.cancelled_by == "root":
            template = noop(
                "Slurm or an administrator cancelled the {what}; ask an administrator for the reason before "
                "you {again}."
            )
        case Ending.IMAGE_MISSING if not job.image:
            template = noop(
                "The image of the {what} is missing on {where}; choose another one, or ask an administrator "
                "to distribute it."
            )
        case Ending.LOST if job.exit_code == Exit.BEGUN_BEFORE:
            template = noop("Slurm lost the {what} when it was restarted just as the {what} began; {again}.")
        case Ending.DIED | Ending.DIED_AT_START:
            template = _failure_template(job)
        case _:
            template = _SENTENCES[ending]
    return _filled(template, job, ending)


def _filled(template: str, job: JobRecord, ending: Ending) -> str:
    """The sentence of a template, with what is known of the job."""
    on_one_node = job.nodes <= 1 and job.node_list
    at_start = ending is Ending.DIED_AT_START and job.kind == "session"
    values = {
        "what": _kind_word(job),
        "again": _again(job),
        "where": _("node {node_list}", node_list=job.node_list) if on_one_node else _("one of its nodes"),
        "node": _failed_node(job),
        "limit": _(" of {limit}", limit=minutes_text(job.minutes_limit)) if job.minutes_limit else "",
        "memory": _memory(job),
        "other": job.preempted_by or _("one with a higher priority"),
        "image": job.image or "",
        "early": _(" before its server was ready") if at_start else "",
        "number": job.signal or job.exit_code or 0,
    }
    return _(template, **{name: value for name, value in values.items() if f"{{{name}}}" in template})


def _failed_node(job: JobRecord) -> str:
    return job.failed_node or (job.node_list if job.nodes <= 1 else "")


def _failure_template(job: JobRecord) -> str:
    """The template for a job that failed by itself."""
    if job.exit_code in _EXITS:
        return _EXITS[job.exit_code]
    if _was_never_launched(job):
        return noop(
            "Slurm could not launch the {what} on {where}; {again}, and tell an administrator if that fails "
            "too."
        )
    if job.state is JobState.CANCELLED:
        return _DEATHS["cancelled"]
    if job.signal:
        return _DEATHS["signal"]
    return _DEATHS["exit code" if job.exit_code else "end"]


_EXITS: dict[int, str] = {
    Exit.NO_APPTAINER: noop("Apptainer is not installed on {where}; tell an administrator, then {again}."),
    Exit.NO_COMMAND: noop("The {what}'s command cannot be run on {where}; correct the command and {again}."),
    Exit.NO_WORKDIR: noop(
        "The {what}'s working directory cannot be entered on {where}; choose another one and {again}."
    ),
    Exit.NOT_STAGED: noop(
        "The data of the {what} could not be copied to {where}; check its log for the reason, then {again}."
    ),
    Exit.IMAGE_CHANGED: noop(
        "The image {image} has changed since it was built, or you may not read it; choose "
        "another one, or build it again and {again}."
    ),
    Exit.FAILED: noop("The {what} could not be launched on {where}; its log says why, then {again}."),
}
_DEATHS = {
    "cancelled": noop("The {what} was cancelled{early}; check the log and fix the problem, then {again}."),
    "signal": noop(
        "The {what} was ended by signal {number}{early}; check the log and fix the problem, then {again}."
    ),
    "exit code": noop(
        "The {what} ended with exit code {number}{early}; check the log and fix the problem, then {again}."
    ),
    "end": noop("The {what} ended{early}; check the log and fix the problem, then {again}."),
}


def _memory(job: JobRecord) -> str:
    """What is known of its use, as a part of a sentence."""
    if not job.memory_mb:
        return ""
    limit = job.memory_mb // max(1, job.nodes)
    each = noop("{limit} MiB on each node") if job.nodes > 1 else noop("{limit} MiB")
    most = _(each, limit=limit)
    peak = job.peak_memory_mb
    if peak is None:
        return _(": it used more than its limit of {most}", most=most)
    if peak < limit * _NEAR_THE_LIMIT:
        return _(
            ": it went past its limit of {most} faster than Slurm measures, which last saw {peak} MiB",
            most=most,
            peak=peak,
        )
    return _(": its peak was {peak} MiB and its limit is {most}", peak=peak, most=most)


def last_lines(log: str) -> str:
    """The last lines of a log that a person reads, without what would move the cursor."""
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in log.split("\n")]
    return "\n".join([line.rstrip() for line in lines if line.strip()][-LOG_LINES:])[-LOG_LETTERS:]
