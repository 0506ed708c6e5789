"""Slurm's words for why a job waits, in plain words."""

import re

from carme.jobs.times import minutes_text
from carme.translation import message as _
from carme.translation import noop

#: What a job waits for, what else is known about that, and after the semicolon what its owner can do.
PENDING_REASONS: dict[str, str] = {
    "None": noop(
        "The job has just been submitted and is waiting for the scheduler{detail}; this takes a moment."
    ),
    "Resources": noop(
        "The job is next in line and waits for nodes, processors, memory or GPUs to "
        "become free{detail}; wait, or ask for less to start sooner."
    ),
    "Priority": noop(
        "Other jobs with a higher priority are waiting in front of this one{detail}; "
        "wait, or ask for less time or fewer GPUs to fit in between."
    ),
    "Dependency": noop(
        "The job waits for another job that it depends on{detail}; it starts when that one has ended."
    ),
    "DependencyNeverSatisfied": noop(
        "The job it depends on failed{detail}; it will never start, so cancel it and submit both again."
    ),
    "BeginTime": noop(
        "The earliest start time of the job has not come yet{detail}; it starts then, or cancel it."
    ),
    "Cleaning": noop(
        "The job was put back into the queue and its nodes are still being cleaned "
        "up{detail}; it starts automatically."
    ),
    "Licenses": noop(
        "The job waits for a licence to become free{detail}; it starts when another job gives one back."
    ),
    "Prolog": noop("The nodes are being prepared for the job{detail}; this takes a moment."),
    "Reservation": noop(
        "The job waits for its booking and starts when the booking begins{detail}; to "
        "start now, choose no booking."
    ),
    "ReservationDeleted": noop(
        "The reservation of the job was deleted{detail}; it will never start, "
        "so cancel it and start it without the reservation."
    ),
    "JobHeldUser": noop("The job is on hold{detail}; release it with 'scontrol release'."),
    "JobHeldAdmin": noop("An administrator put the job on hold{detail}; ask them when they will release it."),
    "JobHoldMaxRequeue": noop(
        "The job was restarted too often and is on hold{detail}; cancel it and see its log."
    ),
    "JobLaunchFailure": noop(
        "The job could not be launched on its nodes{detail}; cancel it and tell an administrator."
    ),
    "launch failed requeued held": noop(
        "The job could not be launched on its nodes and is on hold{detail}; cancel it and start it again."
    ),
    "BadConstraints": noop(
        "No set of nodes can ever fulfil what the job asks for{detail}; it will "
        "never start, so cancel it and ask for less."
    ),
    "ReqNodeNotAvail": noop(
        "Nodes that the job needs are down, drained or reserved{detail}; it starts "
        "when they are back, or choose another partition or other GPUs."
    ),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": noop(
        "Nodes "
        "that "
        "the "
        "job "
        "needs "
        "are "
        "down, "
        "drained "
        "or "
        "reserved "
        "for "
        "more "
        "important "
        "jobs{detail}; "
        "it "
        "starts "
        "when "
        "they "
        "are "
        "back, "
        "or "
        "choose "
        "another "
        "partition "
        "or "
        "other "
        "GPUs."
    ),
    "NodeDown": noop(
        "A node that the job needs is down{detail}; it starts when they are back, or "
        "choose another partition or other GPUs."
    ),
    "FrontEndDown": noop(
        "The front-end node of the cluster is down{detail}; it starts when that is up again."
    ),
    "PartitionDown": noop(
        "The partition is down{detail}; jobs in it start when an administrator "
        "brings it up, or choose another partition."
    ),
    "PartitionInactive": noop(
        "The partition is inactive{detail}; jobs in it start when an "
        "administrator activates it, or choose another partition."
    ),
    "PartitionNodeLimit": noop(
        "The job asks for more nodes than one job may have in its "
        "partition{detail}; it will never start, so cancel it and ask for "
        "fewer."
    ),
    "PartitionTimeLimit": noop(
        "The job asks for more time than its partition allows{detail}; it will "
        "never start, so cancel it and ask for less time."
    ),
    "AccountNotAllowed": noop(
        "The partition does not accept the job's account{detail}; it will never "
        "start, so cancel it and choose another partition or account."
    ),
    "QOSNotAllowed": noop(
        "The account or partition does not accept the job's quality of "
        "service{detail}; it will never start, so cancel it and ask an administrator "
        "which one you may use."
    ),
    "InvalidAccount": noop(
        "The job's account does not exist or is not yours{detail}; it will never "
        "start, so cancel it and ask an administrator which one you may use."
    ),
    "InvalidQOS": noop(
        "The job's quality of service does not exist or is not yours{detail}; it will "
        "never start, so cancel it and ask an administrator which one you may use."
    ),
    "AssociationJobLimit": noop(
        "Your account has reached its limit on jobs{detail}; the job starts when other jobs "
        "under that limit end, so end one that you no longer need."
    ),
    "AssociationResourceLimit": noop(
        "Your account has reached its limit on resources{detail}; the job starts when other "
        "jobs under that limit end, so end one that you no longer need."
    ),
    "AssociationTimeLimit": noop("Your account has used up its time{detail}; ask an administrator for more."),
    "QOSJobLimit": noop(
        "The quality of service has reached its limit on jobs{detail}; the job starts when "
        "other jobs under that limit end, so end one that you no longer need."
    ),
    "QOSResourceLimit": noop(
        "The quality of service has reached its limit on resources{detail}; the job starts "
        "when other jobs under that limit end, so end one that you no longer need."
    ),
    "QOSTimeLimit": noop(
        "The quality of service has used up its time{detail}; ask an administrator for more."
    ),
    "QOSUsageThreshold": noop(
        "The usage of the quality of service is below its threshold{detail}; "
        "choose another quality of service."
    ),
    "JobArrayTaskLimit": noop(
        "The job array already runs as many tasks as it may at a time{detail}; the next one "
        "starts when one of them ends."
    ),
    "SchedDefer": noop("The scheduler looks at this job in its next round{detail}; this takes a moment."),
    "BurstBufferResources": noop(
        "The job waits for space in the burst buffer{detail}; it starts when there is enough."
    ),
    "BurstBufferStageIn": noop(
        "The job's data is being staged in{detail}; the job starts when all of it is there."
    ),
    "FedJobLock": noop(
        "Another cluster of the federation is deciding where the job runs{detail}; this takes a moment."
    ),
    "MaxRequeueExceeded": noop(
        "The job was restarted too often and is on hold{detail}; cancel it and check its log."
    ),
}

# Slurm makes one word for each limit: whose (QOS or Assoc), for whom (Grp, Max), of what.
_HOLDERS = {"QOS": _("the quality of service"), "Assoc": _("your account")}
_SCOPES = {
    "Grp": _("all jobs together"),
    "Max": _("one job or one user"),
    "Min": _("one job at the least"),
}
_RESOURCES = {
    "GRES": _("GPUs"),
    "Cpu": _("processors"),
    "CPU": _("processors"),
    "Memory": _("memory"),
    "Mem": _("memory"),
    "Node": _("nodes"),
    "Jobs": _("jobs"),
    "Submit": _("submitted jobs"),
    "WallDuration": _("time"),
    "Wall": _("time"),
    "License": _("licences"),
    "Billing": _("billing units"),
    "Energy": _("energy"),
    "BB": _("burst buffer space"),
}

#: How a detail begins to name a reservation that keeps nodes from the job.
RESERVED = "kept for the reservation"

#: The detail of a suspended job in a partition in which Slurm itself suspends jobs.
BY_SLURM = "slurm"

_SUSPENDED = {
    (True, True): noop(
        "Slurm suspended the session in favour of others, or an administrator did: it keeps its memory and "
        "GPUs, and its time limit is paused; it resumes automatically{then}."
    ),
    (True, False): noop(
        "An administrator suspended the session: it keeps its memory and GPUs, and its time limit is "
        "paused; it resumes automatically{then}."
    ),
    (False, True): noop(
        "Slurm suspended the job in favour of others, or an administrator did: it keeps its memory and "
        "GPUs, and its time limit is paused; it resumes automatically{then}."
    ),
    (False, False): noop(
        "An administrator suspended the job: it keeps its memory and GPUs, and its time limit is "
        "paused; it resumes automatically{then}."
    ),
}

_UNAVAILABLE = re.compile(r"UnavailableNodes:([^,;\s\[]+(?:\[[^]]*\])?)")


def waiting_for(reason: str, detail: str = "") -> str:
    """One sentence on what a job waits for and what its owner can do.

    Args:
        reason: Slurm's word for it, as squeue shows it.
        detail: What else is known about it: a limit and its use, when a booking begins.
    """
    reason, head, text = _split_reason(reason)
    word = head.split(",")[0].strip()  # ReqNodeNotAvail, UnavailableNodes:n1
    detail = detail or text
    if word == "Resources" and detail:
        return _(
            "The job is next in line and waits ({detail}); wait, or ask for less to start sooner.",
            detail=detail,
        )
    if (match := _UNAVAILABLE.search(reason)) and RESERVED not in detail:
        detail = match[1]
    # What is known belongs to the cause, which ends where the next step begins.
    shown = _(" ({detail})", detail=detail) if detail else ""
    if template := PENDING_REASONS.get(head) or PENDING_REASONS.get(word):
        return _(template, detail=shown)
    return _limit(word, shown) or _(
        "The job waits; Slurm says {reason!r}, ask an administrator what that means.", reason=reason
    )


def _split_reason(reason: str) -> tuple[str, str, str]:
    """The reason as it is, what of it Slurm knows, and the free text in brackets that follows it.

    squeue puts the whole into brackets in one of its columns. Inside there may be more: nodes that are away
    (`ReqNodeNotAvail, UnavailableNodes:n1`) or what somebody wrote (`JobHeldAdmin (broken (again))`).
    """
    reason = reason.strip()
    if reason.startswith("(") and reason.endswith(")"):
        reason = reason[1:-1]
    head, bracket, text = reason.partition("(")
    head = head.replace("_", " ").strip() or "None"
    text = text.removesuffix(")").strip()
    whole = f"{head} ({text})" if bracket else head
    return whole, head, text


def suspended(session: bool, by_slurm: bool, seconds_left: int | None) -> str:
    """One sentence on a job that is suspended: by whom, and that its time stands still.

    Args:
        session: It is a session's.
        by_slurm: Slurm may have done it, in favour of others.
        seconds_left: What is left of its time.
    """
    left = max(1, seconds_left // 60) if seconds_left is not None else None
    then = _(" with {left} left", left=minutes_text(left)) if left is not None else ""
    return _(_SUSPENDED[session, by_slurm], then=then)


def _limit(word: str, detail: str) -> str:
    for holder, owner in _HOLDERS.items():
        for scope, over in _SCOPES.items():
            if not word.startswith(holder + scope):
                continue
            rest = word.removeprefix(holder + scope)
            resource = next((name for key, name in _RESOURCES.items() if key in rest), _("resources"))
            if "RunMinutes" in rest or "Minutes" in rest:
                resource = _("{thing} over time", thing=resource)
            if scope == "Min":
                return _(
                    "The job asks for less {thing} than {owner} demands{detail}; cancel it and ask for more.",
                    thing=resource,
                    owner=owner,
                    detail=detail,
                )
            return _(
                "The job would exceed the limit that {owner} has on {thing} for {over}{detail}; it starts "
                "when your other jobs under it have ended, or never if it asks for more than the limit, so "
                "end one of them or ask for less.",
                owner=owner,
                thing=resource,
                over=over,
                detail=detail,
            )
    return ""
