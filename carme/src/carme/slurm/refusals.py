"""What Slurm's programs complain about, in plain words."""

import re

from carme.errors import InvalidRequest, NotFound, SlurmError

_ASK = "Ask an administrator"

# (what Slurm writes, field of the request, message, remedy)
_REFUSALS: list[tuple[str, str | None, str, str]] = [
    (
        r"not permitted on individual component of heterogeneous job",
        None,
        "Slurm ends a heterogeneous job that waits only as a whole.",
        "Cancel its first component.",
    ),
    (
        r"Requested nodes are busy|overlaps with another reservation",
        "start",
        "Other jobs or bookings have these nodes at that time.",
        "Choose another time, or fewer nodes.",
    ),
    (
        r"Reservation already started",
        "start",
        "The booking has begun, so its start cannot change any more.",
        "Change its end, or delete it and book anew.",
    ),
    (
        r"Access denied to requested reservation",
        "reservation",
        "You are not among those who may use this booking.",
        "Choose one of your own bookings, or none.",
    ),
    (
        r"Requested reservation is invalid",
        "reservation",
        "There is no such booking (any more), or it is not for this partition.",
        "Choose one of your bookings that is not over, or none.",
    ),
    (
        r"[Ii]nvalid account|account or account/partition|InvalidAccount",
        "account",
        "Slurm does not let you use this account in this partition.",
        f"Choose another account or partition, or {_ASK.lower()} to add you with 'sacctmgr add user'.",
    ),
    (
        r"[Ii]nvalid (partition|user id)|[Ii]nvalid partition name",
        "partition",
        "Slurm does not know this partition or does not know you in it.",
        f"Choose another partition, or {_ASK.lower()} whether the account exists on the compute nodes.",
    ),
    (
        r"Job violates accounting/QOS policy|QOS.*[Ll]imit|Assoc.*[Ll]imit",
        None,
        "The job would exceed a limit of your account or quality of service.",
        "Ask for less, or wait until some of your other jobs have ended.",
    ),
    (
        r"[Ii]nvalid job array specification",
        "array",
        "The array has more tasks, or higher numbers of tasks, than Slurm allows here (MaxArraySize).",
        "Ask for fewer tasks in one array, or have each do more.",
    ),
    (
        r"[Ii]nvalid qos",
        None,
        "Slurm does not let you use this quality of service.",
        f"{_ASK} which one you may use.",
    ),
    (
        r"[Tt]ime limit",
        "minutes",
        "The job asks for more time than its partition allows.",
        "Ask for less time.",
    ),
    (
        r"Requested node configuration is not available|[Mm]ore processors requested|[Nn]ode count",
        None,
        "No set of nodes of this partition can ever give what the job asks for.",
        "Ask for fewer nodes, GPUs, processors or less memory.",
    ),
    (
        r"[Ii]nvalid generic resource|[Ii]nvalid GRES|Invalid Trackable RESource",
        "gpu_type",
        "Slurm does not know this kind of GPU.",
        "Leave the GPU type open, or choose another one.",
    ),
    (
        r"partition(-| is )(down|inactive)|Required partition not available",
        "partition",
        "The partition takes no jobs at the moment.",
        "Choose another partition, or wait until an administrator brings it up.",
    ),
    (
        r"Access/permission denied|Access denied",
        None,
        "Slurm denied access.",
        f"{_ASK} whether you may run jobs on this cluster.",
    ),
]
_AWAY = re.compile(
    r"[Uu]nable to contact slurm controller|[Cc]onnection refused|[Cc]ommunication (failure|connection)|"
    r"slurm_persist_conn|Zero Bytes were transmitted|[Tt]imed out|[Tt]ime out|Socket timed out|"
    r"Protocol authentication error|munge"
)
_NO_ACCOUNTING = re.compile(r"[Aa]ccounting storage is disabled")
_RESERVATION_IN_USE = re.compile(r"Requested reservation is in use")
_MEMBER_HAS_JOBS = re.compile(r"Job\(s\) active, cancel job\(s\) before remove")
_GONE = re.compile(r"[Ii]nvalid job id|[Jj]ob has already finished|already completing or completed")


def refusal(program: str, output: str) -> SlurmError | NotFound | InvalidRequest:
    """The error that stands for what a program of Slurm wrote before it failed."""
    text = " ".join(
        re.sub(r"^(\w+: )?(error: |fatal: )?", "", line).strip() for line in output.splitlines()
    ).strip()
    text = text[:300] or "nothing"
    if _GONE.search(output):
        return NotFound(
            "Slurm does not know this job (any more).", "It may have ended; look into the job history."
        )
    if _NO_ACCOUNTING.search(output):
        return SlurmError(
            "This cluster keeps no accounting, so jobs that left the queue are not known.",
            f"{_ASK} to set up slurmdbd.",
            code="no-accounting",
        )
    if _AWAY.search(output):
        return SlurmError(
            f"Slurm does not answer: {program} says {text!r}.",
            "Running jobs go on; try again in a moment, or tell an administrator.",
            code="slurm-away",
        )
    if _RESERVATION_IN_USE.search(output):
        return SlurmError(
            "Jobs wait or run in this booking.",
            "End them first, or wait until they have ended.",
            code="reservation-in-use",
        )
    if _MEMBER_HAS_JOBS.search(output):
        return SlurmError(
            "A member who leaves still has jobs in this account.",
            "End them, or wait until they have ended.",
            code="member-has-jobs",
        )
    for pattern, field, message, remedy in _REFUSALS:
        if re.search(pattern, output):
            return SlurmError(f"{message} (Slurm: {text})", remedy, field=field)
    return SlurmError(
        f"Slurm refused: {program} says {text!r}.", "Correct the request, or tell an administrator."
    )
