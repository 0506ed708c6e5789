"""Slurm's words for why a job waits, in plain words."""

import re

from carme.jobs.times import minutes_text

_WHEN_OTHERS_END = "it starts when other jobs under that limit end, so end one that you no longer need"
_WITH_NODES = "it starts when they are back, or choose another partition or other GPUs"
_NEVER = "it will never start, so cancel it and"

#: What a job waits for, and after the semicolon what its owner can do.
PENDING_REASONS: dict[str, str] = {
    "None": "The job has just been submitted and is waiting for the scheduler; this takes a moment.",
    "Resources": (
        "The job is next in line and waits for nodes, processors, memory or GPUs to become free; "
        "wait, or ask for less to start sooner."
    ),
    "Priority": (
        "Other jobs with a higher priority are waiting in front of this one; "
        "wait, or ask for less time or fewer GPUs to fit in between."
    ),
    "Dependency": "The job waits for another job that it depends on; it starts when that one has ended.",
    "DependencyNeverSatisfied": f"The job it depends on failed; {_NEVER} submit both again.",
    "BeginTime": "The earliest start time of the job has not come yet; it starts then, or cancel it.",
    "Cleaning": (
        "The job was put back into the queue and its nodes are still being cleaned up; it starts by itself."
    ),
    "Licenses": "The job waits for a licence to become free; it starts when another job gives one back.",
    "Prolog": "The nodes are being prepared for the job; this takes a moment.",
    "Reservation": (
        "The job waits for its booking and starts when the booking begins; to start now, choose no booking."
    ),
    "ReservationDeleted": (
        f"The reservation of the job was deleted; {_NEVER} start it without the reservation."
    ),
    "JobHeldUser": "The job is on hold; release it with 'scontrol release'.",
    "JobHeldAdmin": "An administrator put the job on hold; ask them when they will release it.",
    "JobHoldMaxRequeue": "The job was restarted too often and is on hold; cancel it and see its log.",
    "JobLaunchFailure": "The job could not be launched on its nodes; cancel it and tell an administrator.",
    "launch failed requeued held": (
        "The job could not be launched on its nodes and is on hold; cancel it and start it again."
    ),
    "BadConstraints": f"No set of nodes can ever fulfil what the job asks for; {_NEVER} ask for less.",
    "ReqNodeNotAvail": f"Nodes that the job needs are down, drained or reserved; {_WITH_NODES}.",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        f"Nodes that the job needs are down, drained or reserved for more important jobs; {_WITH_NODES}."
    ),
    "NodeDown": f"A node that the job needs is down; {_WITH_NODES}.",
    "FrontEndDown": "The front-end node of the cluster is down; it starts when that is up again.",
    "PartitionDown": (
        "The partition is down; jobs in it start when an administrator brings it up, "
        "or choose another partition."
    ),
    "PartitionInactive": (
        "The partition is inactive; jobs in it start when an administrator activates it, "
        "or choose another partition."
    ),
    "PartitionNodeLimit": (
        f"The job asks for more nodes than one job may have in its partition; {_NEVER} ask for fewer."
    ),
    "PartitionTimeLimit": (
        f"The job asks for more time than its partition allows; {_NEVER} ask for less time."
    ),
    "AccountNotAllowed": (
        f"The partition does not accept the job's account; {_NEVER} choose another partition or account."
    ),
    "QOSNotAllowed": (
        "The account or partition does not accept the job's quality of service; "
        f"{_NEVER} ask an administrator which one you may use."
    ),
    "InvalidAccount": (
        "The job's account does not exist or is not yours; "
        f"{_NEVER} ask an administrator which one you may use."
    ),
    "InvalidQOS": (
        "The job's quality of service does not exist or is not yours; "
        f"{_NEVER} ask an administrator which one you may use."
    ),
    "AssociationJobLimit": f"Your account has as many jobs as it may; {_WHEN_OTHERS_END}.",
    "AssociationResourceLimit": f"Your account uses as much as it may; {_WHEN_OTHERS_END}.",
    "AssociationTimeLimit": "Your account has used up its time; ask an administrator for more.",
    "QOSJobLimit": f"The quality of service has as many jobs as it may; {_WHEN_OTHERS_END}.",
    "QOSResourceLimit": f"The quality of service uses as much as it may; {_WHEN_OTHERS_END}.",
    "QOSTimeLimit": "The quality of service has used up its time; ask an administrator for more.",
    "QOSUsageThreshold": (
        "The usage of the quality of service is below its threshold; choose another quality of service."
    ),
    "JobArrayTaskLimit": (
        "As many tasks of the job array run as may run at a time; it starts when one of them ends."
    ),
    "SchedDefer": "The scheduler looks at this job in its next round; this takes a moment.",
    "BurstBufferResources": "The job waits for space in the burst buffer; it starts when there is enough.",
    "BurstBufferStageIn": "The data of the job is being staged in; it starts when they are there.",
    "FedJobLock": ("Another cluster of the federation is deciding where the job runs; this takes a moment."),
    "MaxRequeueExceeded": ("The job was restarted too often and is on hold; cancel it and check its log."),
}

# Slurm makes one word for each limit: whose (QOS or Assoc), for whom (Grp, Max), of what.
_HOLDERS = {"QOS": "the quality of service", "Assoc": "your account"}
_SCOPES = {
    "Grp": "all jobs together",
    "Max": "one job or one user",
    "Min": "one job at the least",
}
_RESOURCES = {
    "GRES": "GPUs",
    "Cpu": "processors",
    "CPU": "processors",
    "Memory": "memory",
    "Mem": "memory",
    "Node": "nodes",
    "Jobs": "jobs",
    "Submit": "submitted jobs",
    "WallDuration": "time",
    "Wall": "time",
    "License": "licences",
    "Billing": "billing units",
    "Energy": "energy",
    "BB": "burst buffer space",
}

#: How a detail begins to name a reservation that keeps nodes from the job.
KEPT = "kept for the reservation"

#: The detail of a suspended job in a partition in which Slurm itself suspends jobs.
BY_SLURM = "slurm"

_UNAVAILABLE = re.compile(r"UnavailableNodes:([^,;\s\[]+(?:\[[^]]*\])?)")


def waiting_for(reason: str, detail: str = "") -> str:
    """One sentence on what a job waits for and what its owner can do.

    Args:
        reason: Slurm's word for it, as squeue shows it.
        detail: What else is known about it: a limit and its use, when a booking begins.
    """
    reason, head, text = _taken_apart(reason)
    word = head.split(",")[0].strip()  # ReqNodeNotAvail, UnavailableNodes:n1
    sentence = PENDING_REASONS.get(head) or PENDING_REASONS.get(word) or _limit(word)
    detail = detail or text
    if not sentence:
        return f"The job waits; Slurm says {reason!r}, ask an administrator what that means."
    if word == "Resources" and detail:
        return f"The job is next in line and waits ({detail}); wait, or ask for less to start sooner."
    if (match := _UNAVAILABLE.search(reason)) and KEPT not in detail:
        detail = match[1]
    # What is known belongs to the cause, which ends where the next step begins.
    cause, mark, step = sentence.partition("; ")
    return f"{cause.rstrip('.')} ({detail}){mark or '.'}{step}" if detail else sentence


def _taken_apart(reason: str) -> tuple[str, str, str]:
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
    what = "session" if session else "job"
    who = f"Slurm suspended the {what} in favour of others, or an administrator did"
    if not by_slurm:
        who = f"An administrator suspended the {what}"
    left = max(1, seconds_left // 60) if seconds_left is not None else None
    then = f" with {minutes_text(left)} left" if left is not None else ""
    return f"{who}: it keeps its memory and GPUs, and its time stands still; it goes on by itself{then}."


def _limit(word: str) -> str:
    for holder, owner in _HOLDERS.items():
        for scope, over in _SCOPES.items():
            if not word.startswith(holder + scope):
                continue
            rest = word.removeprefix(holder + scope)
            thing = next((name for key, name in _RESOURCES.items() if key in rest), "resources")
            if "RunMinutes" in rest or "Minutes" in rest:
                thing += " over time"
            if scope == "Min":
                return f"The job asks for less {thing} than {owner} demands; cancel it and ask for more."
            return (
                f"The job would exceed the limit that {owner} has on {thing} for {over}; "
                "it starts when your other jobs under it have ended, or never if it asks for more than "
                "the limit, so end one of them or ask for less."
            )
    return ""
