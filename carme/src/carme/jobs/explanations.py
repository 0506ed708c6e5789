"""Slurm's words for why a job waits or has ended, in plain words."""

from carme.jobs.states import JobState, Phase

_LIMIT_REMEDY = "it starts when other jobs under that limit end"

# Our own reason for a job that vanished from the queue and is in no accounting.
FORGOTTEN = "Forgotten"

PENDING_REASONS: dict[str, str] = {
    "None": "The job has just been submitted and is waiting to be looked at.",
    "Resources": "The job is next in line and waits for nodes, processors, memory or GPUs to become free.",
    "Priority": "Other jobs with a higher priority are waiting in front of this one.",
    "Dependency": "The job waits for another job that it depends on.",
    "DependencyNeverSatisfied": "The job it depends on failed, so it will never start; cancel it.",
    "BeginTime": "The earliest start time of the job has not come yet.",
    "Cleaning": "The job was put back into the queue and its nodes are still being cleaned up.",
    "Licenses": "The job waits for a licence to become free.",
    "Prolog": "The nodes are being prepared for the job.",
    "Reservation": "The job waits for its reservation to begin.",
    "ReservationDeleted": "The reservation of the job was deleted, so it will never start; cancel it.",
    "JobHeldUser": "The job is on hold; release it with 'scontrol release'.",
    "JobHeldAdmin": "An administrator put the job on hold.",
    "JobHoldMaxRequeue": "The job was restarted too often and is on hold.",
    "JobLaunchFailure": "The job could not be launched on its nodes; an administrator should look at them.",
    "launch failed requeued held": "The job could not be launched on its nodes and is on hold.",
    "BadConstraints": "No set of nodes can ever fulfil what the job asks for; cancel it and ask for less.",
    "ReqNodeNotAvail": "Nodes that the job needs are down, drained or reserved.",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "Nodes that the job needs are down, drained or reserved for more important jobs."
    ),
    "NodeDown": "A node that the job needs is down.",
    "FrontEndDown": "The front-end node of the cluster is down.",
    "PartitionDown": "The partition is down; jobs in it start when an administrator brings it up.",
    "PartitionInactive": "The partition is inactive; jobs in it do not start.",
    "PartitionNodeLimit": "The job asks for more nodes than one job may have in its partition.",
    "PartitionTimeLimit": "The job asks for more time than its partition allows.",
    "AccountNotAllowed": "The partition does not accept the job's account.",
    "QOSNotAllowed": "The account or partition does not accept the job's quality of service.",
    "InvalidAccount": "The job's account does not exist or is not yours.",
    "InvalidQOS": "The job's quality of service does not exist or is not yours.",
    "AssociationJobLimit": f"Your account has as many jobs as it may; {_LIMIT_REMEDY}.",
    "AssociationResourceLimit": f"Your account uses as much as it may; {_LIMIT_REMEDY}.",
    "AssociationTimeLimit": "Your account has used up its time.",
    "QOSJobLimit": f"The quality of service has as many jobs as it may; {_LIMIT_REMEDY}.",
    "QOSResourceLimit": f"The quality of service uses as much as it may; {_LIMIT_REMEDY}.",
    "QOSTimeLimit": "The quality of service has used up its time.",
    "QOSUsageThreshold": "The usage of the quality of service is below its threshold.",
    "JobArrayTaskLimit": "As many tasks of the job array run as may run at a time.",
    "SchedDefer": "The scheduler looks at this job in its next round.",
    "NonZeroExitCode": "The job ended with an error.",
    "OutOfMemory": "The job used more memory than it had asked for.",
    "TimeLimit": "The job reached its time limit.",
    "SystemFailure": "Slurm or a node of the job failed.",
    "RaisedSignal": "The job was ended by a signal.",
    "BurstBufferResources": "The job waits for space in the burst buffer.",
    "BurstBufferStageIn": "The data of the job is being staged in.",
    "FedJobLock": "Another cluster of the federation is deciding where the job runs.",
    "MaxRequeueExceeded": "The job was restarted too often and is on hold.",
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

ENDINGS: dict[JobState, str] = {
    JobState.COMPLETED: "The job ended without an error.",
    JobState.CANCELLED: "The job was cancelled.",
    JobState.FAILED: "The job ended with an error; its log says more.",
    JobState.TIMEOUT: "The job reached its time limit and was ended; ask for more time.",
    JobState.DEADLINE: "The job could not end before its deadline.",
    JobState.NODE_FAIL: "A node of the job failed; start it again.",
    JobState.BOOT_FAIL: "A node of the job did not boot; start it again.",
    JobState.LAUNCH_FAILED: "The job could not be launched; an administrator should look at its nodes.",
    JobState.OUT_OF_MEMORY: "The job used more memory than it had asked for; ask for more.",
    JobState.PREEMPTED: "The job was ended in favour of a more important one; start it again.",
    JobState.REVOKED: "The job runs on another cluster of the federation.",
}


def explain(
    state: JobState, reason: str = "", exit_code: int | None = None, signal: int | None = None
) -> str:
    """One sentence on why a job waits or how it ended; empty for a running job."""
    if state.phase is Phase.OVER:
        if reason == FORGOTTEN:
            return "Slurm has forgotten the job, so how it ended is not known; its log may say more."
        if state is JobState.FAILED and signal:
            return f"The job was ended by signal {signal}; its log says more."
        if state is JobState.FAILED and exit_code:
            return f"The job ended with exit code {exit_code}; its log says more."
        return ENDINGS[state]
    if state is JobState.CONFIGURING:
        return "The nodes are being prepared for the job."
    if state.phase is not Phase.PENDING:
        return ""
    reason = reason.strip("()") or "None"
    word = reason.split(",")[0]  # ReqNodeNotAvail, UnavailableNodes:n1
    sentence = PENDING_REASONS.get(reason) or PENDING_REASONS.get(word) or _limit(word)
    return sentence or f"The job waits; Slurm says {reason!r}."


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
                return f"The job asks for less than {owner} demands: {thing}; cancel it and ask for more."
            return (
                f"The job would exceed the limit that {owner} has on {thing} for {over}; "
                "it starts when enough of them are free, or never if it asks for more than the limit."
            )
    return ""
