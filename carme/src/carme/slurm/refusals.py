"""What Slurm's programs complain about, in plain words."""

import re

from carme.errors import InvalidRequest, NotFound, SlurmError
from carme.translation import message as _

# (what Slurm writes, field of the request, message, remedy)
_REFUSALS: list[tuple[str, str | None, str, str]] = [
    (
        r"not permitted on individual component of heterogeneous job",
        None,
        _("Slurm ends a heterogeneous job that waits only as a whole."),
        _("Cancel its first component."),
    ),
    (
        r"Requested nodes are busy|overlaps with another reservation",
        "start",
        _("Other jobs or bookings have these nodes at that time."),
        _("Choose another time, or fewer nodes."),
    ),
    (
        r"Reservation already started",
        "start",
        _("The booking has begun, so its start cannot change any more."),
        _("Change its end, or delete it and book anew."),
    ),
    (
        r"Access denied to requested reservation",
        "reservation",
        _("You may not use this booking."),
        _("Choose one of your own bookings, or none."),
    ),
    (
        r"Requested reservation is invalid",
        "reservation",
        _("There is no such booking (any more), or it is not for this partition."),
        _("Choose one of your bookings that is not over, or none."),
    ),
    (
        r"[Ii]nvalid account|account or account/partition|InvalidAccount",
        "account",
        _("Slurm does not let you use this account in this partition."),
        _(
            "Choose another account or partition, or ask an administrator to add you with "
            "'sacctmgr add user'."
        ),
    ),
    (
        r"[Ii]nvalid (partition|user id)|[Ii]nvalid partition name",
        "partition",
        _("Slurm does not know this partition or does not know you in it."),
        _(
            "Choose another partition, or ask an administrator whether the account exists on the compute "
            "nodes."
        ),
    ),
    (
        r"Job violates accounting/QOS policy|QOS.*[Ll]imit|Assoc.*[Ll]imit",
        None,
        _("The job would exceed a limit of your account or quality of service."),
        _("Ask for less, or wait until some of your other jobs have ended."),
    ),
    (
        r"[Ii]nvalid job array specification",
        "array",
        _("The array has more tasks, or higher numbers of tasks, than Slurm allows here (MaxArraySize)."),
        _("Ask for fewer tasks in one array, or have each do more."),
    ),
    (
        r"[Ii]nvalid qos",
        None,
        _("Slurm does not let you use this quality of service."),
        _("Ask an administrator which one you may use."),
    ),
    (
        r"[Tt]ime limit",
        "minutes",
        _("The job asks for more time than its partition allows."),
        _("Ask for less time."),
    ),
    (
        r"Requested node configuration is not available|[Mm]ore processors requested|[Nn]ode count",
        None,
        _("No set of nodes of this partition can ever give what the job asks for."),
        _("Ask for fewer nodes, GPUs, processors or less memory."),
    ),
    (
        r"[Ii]nvalid generic resource|[Ii]nvalid GRES|Invalid Trackable RESource",
        "gpu_type",
        _("Slurm does not know this kind of GPU."),
        _("Leave the GPU type open, or choose another one."),
    ),
    (
        r"partition(-| is )(down|inactive)|Required partition not available",
        "partition",
        _("The partition takes no jobs at the moment."),
        _("Choose another partition, or wait until an administrator brings it up."),
    ),
    (
        r"Access/permission denied|Access denied",
        None,
        _("Slurm denied access."),
        _("Ask an administrator whether you may run jobs on this cluster."),
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


def away(program: str, text: str) -> SlurmError:
    """The error for a Slurm that does not answer, with what a program says about that."""
    return SlurmError(
        _("Slurm does not answer: {program} says {text!r}.", program=program, text=text),
        _("Running jobs go on; try again in a moment, or tell an administrator."),
        code="slurm-away",
    )


def refusal(program: str, output: str) -> SlurmError | NotFound | InvalidRequest:
    """The error that stands for what a program of Slurm wrote before it failed."""
    text = " ".join(
        re.sub(r"^(\w+: )?(error: |fatal: )?", "", line).strip() for line in output.splitlines()
    ).strip()
    text = text[:300] or "nothing"
    if _GONE.search(output):
        return NotFound(
            _("Slurm does not know this job (any more)."), _("It may have ended; look into the job history.")
        )
    if _NO_ACCOUNTING.search(output):
        return SlurmError(
            _("This cluster has no accounting, so Carme does not know jobs that left the queue."),
            _("Ask an administrator to set up slurmdbd."),
            code="no-accounting",
        )
    if _AWAY.search(output):
        return away(program, text)
    if _RESERVATION_IN_USE.search(output):
        return SlurmError(
            _("Jobs wait or run in this booking."),
            _("End them first, or wait until they have ended."),
            code="reservation-in-use",
        )
    if _MEMBER_HAS_JOBS.search(output):
        return SlurmError(
            _("A member who leaves still has jobs in this account."),
            _("End them, or wait until they have ended."),
            code="member-has-jobs",
        )
    for pattern, field, message, remedy in _REFUSALS:
        if re.search(pattern, output):
            return SlurmError(_("{message} (Slurm: {text})", message=message, text=text), remedy, field=field)
    return SlurmError(
        _("Slurm refused: {program} says {text!r}.", program=program, text=text),
        _("Correct the request, or tell an administrator."),
    )
