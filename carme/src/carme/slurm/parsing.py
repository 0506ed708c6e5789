"""Slurm's output as our models. Pure functions.

Names and comments of jobs are their owners' free choice and may hold line ends and separators. So
records are distinguished by a separator that cannot be guessed: one for each call where it is an argument,
which users may read; one for all looks at the queue, which squeue gets by its environment.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from carme.jobs import Cluster, Job, JobState, Licence, Node, Partition, Phase, Reservation, arrays
from carme.jobs.access import Association
from carme.jobs.limits import Limits
from carme.jobs.nodes import expand
from carme.jobs.states import Canceller
from carme.projects.models import ACCOUNT_PATTERN, ProjectAccount, Use
from carme.slurm.gateway import ExitStatus, Outcome
from carme.slurm.label import Label
from carme.slurm.tres import (
    MEMORY_UNITS,
    Allotted,
    gpus_counted,
    gpus_requested,
    gpus_used,
    gres,
    only_type,
    records,
    text_of,
    to_int,
    tres_of,
)

QUEUE_FIELDS = (
    *("A", "u", "a", "P", "T", "r", "D", "N", "b", "C", "m", "l", "L", "V", "S", "e"),
    *("Q", "Y", "v", "q", "B", "F", "K", "j", "k"),
)
ACCOUNTING_FIELDS = (
    *("JobIDRaw", "User", "Account", "Partition", "State", "ExitCode", "NNodes", "NodeList", "ReqTRES"),
    *("AllocTRES", "TimelimitRaw", "Submit", "Start", "End", "Reason", "Reservation", "QOS", "UID"),
    *("JobID", "JobName", "Comment"),
)
OUTCOME_FIELDS = ("JobIDRaw", "UID", "State", "MaxRSS")
ADMIN_COMMENT_FIELDS = ("JobIDRaw", "AdminComment")
FAILED_NODE_FIELDS = ("JobIDRaw", "FailedNode")

_NO_FIELDS: set[str] = set()  # of all jobs of the queue

# Not POWERED_DOWN: Slurm gives such nodes to jobs, and switches them on (slurm.conf(5), ResumeProgram).
_UNUSABLE = {
    *("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "MAINTENANCE"),
    *("NOT_RESPONDING", "UNKNOWN"),
    *("POWERING_DOWN", "REBOOT_ISSUED", "REBOOT", "INVAL", "INVALID_REG", "PLANNED_DOWN"),
}


def queue(output: str, separator: str, allotments: Mapping[int, Allotted] | None = None) -> list[Job]:
    """Jobs in squeue's output with QUEUE_FIELDS.

    Args:
        allotments: What the jobs have; of one that is missing here, what it asks for on each node.
    """
    rows = records(output, separator, len(QUEUE_FIELDS))
    fields = (dict(zip(QUEUE_FIELDS, record, strict=True)) for record in rows)
    return [queued(field, (allotments or {}).get(int(field["A"]))) for field in fields]


def queued(field: Mapping[str, str], has: Allotted | None) -> Job:
    """One job of the queue.

    Args:
        field: What squeue writes for each of QUEUE_FIELDS.
        has: What the job has; where that is not known, what it asks for on each node counts.
    """
    label = Label.read(field["k"])
    nodes = to_int(field["D"])
    if has is None:
        gpus = {kind: many * nodes for kind, many in gpus_requested(field["b"]).items()}
        has = Allotted(gpus=gpus)
    cpus = has.cpus or to_int(field["C"])
    memory_mb = memory(field["m"], to_int(field["C"])) * nodes if has.memory_mb is None else has.memory_mb
    state = JobState.parse(field["T"])
    limit = minutes(field["l"])
    job = Job(
        id=int(field["A"]),
        key=label.key if label else None,
        kind=label.kind if label else "other",
        image=label.image if label else None,
        name=text_of(field["j"]),
        user=field["u"],
        account=text_of(field["a"]),
        partition=field["P"],
        state=state,
        reason=text_of(field["r"]),
        nodes=nodes,
        node_list=text_of(field["N"]),
        gpus=sum(has.gpus.values()),
        gpu_type=only_type(has.gpus),
        whole_nodes=has.whole_nodes,
        cpus=cpus,
        memory_mb=memory_mb,
        minutes_limit=limit,
        submitted=time(field["V"]),
        restarts=has.restarts,
        priority=int(field["Q"]) if field["Q"].isdecimal() else None,
        # While a job waits these are the scheduler's plan.
        planned_start=time(field["S"]) if state.phase is Phase.PENDING else None,
        planned_nodes=text_of(field["Y"]) if state.phase is Phase.PENDING else "",
        reservation=text_of(field["v"]),
        qos=text_of(field["q"]),
        started=None if state.phase is Phase.PENDING else time(field["S"]),
        ended=time(field["e"]) if state.phase is Phase.OVER else None,
        # Without a limit Slurm reports an end in a year's time; of a suspended job the old one.
        planned_end=time(field["e"]) if _has_end(state) and limit is not None else None,
        seconds_left=seconds(field["L"]) if state is JobState.SUSPENDED else None,
        failed_node=_failed_node(state, field["B"], field["N"]),
        **({} if field["K"] == "N/A" else array_of(f"{field['F']}_{field['K']}")),
    )
    # Which fields were given matters to nobody, and pydantic's set of them is half of a job's memory.
    object.__setattr__(job, "__pydantic_fields_set__", _NO_FIELDS)
    return job


def array_of(text: str) -> dict[str, Any]:
    """The fields of a `Job` in an array: `12_3` is a task, `12_[4-9%2]` or `12_4-9%2` are some that wait."""
    match = re.fullmatch(r"(\d+)_\[?([\d,:-]+)(%\d+)?\]?", text)
    return arrays.fields(int(match[1]), match[2] + (match[3] or "")) if match else {}


def _failed_node(state: JobState, first: str, node_list: str) -> str:
    """The node on which a job's command runs or ran, if Slurm has taken it from the job because it failed."""
    known = text_of(first) and text_of(node_list) and (state is JobState.RUNNING or state.phase is Phase.OVER)
    return first if known and first not in expand(node_list) else ""  # while a job ends its list gets shorter


def _has_end(state: JobState) -> bool:
    return state.phase is Phase.RUNNING and state is not JobState.SUSPENDED


def exit_statuses(output: str) -> dict[int, ExitStatus]:
    """How jobs ended, by id: squeue shows `CODE:SIGNAL` (24.11) or the plain wait status (22.05)."""
    found = {}
    for line in output.splitlines():
        match = re.fullmatch(r"(\d+)\s+(\d+)(?::(\d+))?", line.strip())
        if match:
            job, value, signal = match.groups()
            status = int(value)
            found[int(job)] = (
                ExitStatus(status >> 8 & 0xFF, status & 0x7F)
                if signal is None
                else ExitStatus(status, int(signal))
            )
    return found


def accounting(output: str, separator: str) -> list[Job]:
    """Jobs in sacct's output with ACCOUNTING_FIELDS."""
    rows = records(output, separator, len(ACCOUNTING_FIELDS))
    return accounted(dict(zip(ACCOUNTING_FIELDS, row, strict=True)) for row in rows)


def accounted(rows: Iterable[Mapping[str, str]]) -> list[Job]:
    """Jobs of the accounting, from rows with what sacct writes for each of ACCOUNTING_FIELDS."""
    jobs = []
    first_starts: dict[
        tuple[str, str], str
    ] = {}  # jobs that have lost a node have a record for the time before, too
    for field in rows:
        if not field["JobIDRaw"].isdecimal():
            continue  # a step
        label = Label.read(field["Comment"])
        state = JobState.parse(field["State"])
        which = (field["JobIDRaw"], field["Submit"])
        if state is JobState.RESIZING:
            first_starts.setdefault(which, field["Start"])
            continue
        tres = tres_of(field["AllocTRES"] or field["ReqTRES"])
        exit_code, _, signal = field["ExitCode"].partition(":")
        over = state.phase is Phase.OVER
        gpus = gpus_counted(tres)
        jobs.append(
            Job(
                id=int(field["JobIDRaw"]),
                key=label.key if label else None,
                kind=label.kind if label else "other",
                image=label.image if label else None,
                name=field["JobName"],
                user=field["User"],
                account=field["Account"],
                partition=field["Partition"],
                state=state,
                reason=text_of(field["Reason"]),
                reservation=field["Reservation"],
                qos=field["QOS"],
                nodes=to_int(field["NNodes"]),
                node_list="" if field["NodeList"] == "None assigned" else field["NodeList"],
                gpus=sum(gpus.values()),
                gpu_type=only_type(gpus),
                cpus=int(tres.get("cpu", 0)),
                memory_mb=int(tres.get("mem", 0)),
                minutes_limit=int(field["TimelimitRaw"]) if field["TimelimitRaw"].isdecimal() else None,
                submitted=time(field["Submit"]),
                started=time(first_starts.get(which, field["Start"])),
                ended=time(field["End"]),
                exit_code=int(exit_code) if over and exit_code.isdecimal() else None,
                signal=(int(signal) or None) if over and signal.isdecimal() else None,
                cancelled_by=_cancelled_by(field["State"], field["UID"]),
                **array_of(field["JobID"]),
            )
        )
    return jobs


def outcomes(output: str, separator: str) -> dict[int, Outcome]:
    """What sacct's output with OUTCOME_FIELDS, steps included, says about each job."""
    return outcomes_of(records(output, separator, len(OUTCOME_FIELDS)))


def outcomes_of(rows: Iterable[Sequence[str]]) -> dict[int, Outcome]:
    """What these records of jobs and steps, each with OUTCOME_FIELDS, say about each job.

    Root cancels as an administrator, or because slurmctld gave a launch up: then no batch step ever was.
    """
    found: dict[int, Outcome] = {}
    launched: set[int] = set()
    for job, uid, state, peak in rows:
        number, _, step = job.partition(".")
        if not number.isdecimal():
            continue
        known = found.get(int(number), Outcome())
        if not step:
            known = known._replace(cancelled_by=_cancelled_by(state, uid))
        elif peak := _mebibytes(peak):
            known = known._replace(peak_memory_mb=max(peak, known.peak_memory_mb or 0))
        if step == "batch":
            launched.add(int(number))
        found[int(number)] = known
    return {
        job: known._replace(cancelled_by="other" if job in launched else "slurm")
        if known.cancelled_by == "root"
        else known
        for job, known in found.items()
    }


def failed_nodes(output: str, separator: str) -> dict[int, str]:
    """The node whose failure ended each job, in sacct's output with `JobIDRaw` and `FailedNode`."""
    return {
        int(job): node
        for job, node in records(output, separator, len(FAILED_NODE_FIELDS))
        if job.isdecimal() and text_of(node)
    }


def admin_comments(output: str, separator: str) -> dict[int, str]:
    """What administrators noted about each job, in sacct's output with ADMIN_COMMENT_FIELDS."""
    return {
        int(job): text
        for job, text in records(output, separator, len(ADMIN_COMMENT_FIELDS))
        if job.isdecimal()
    }


def _cancelled_by(state: str, uid: str) -> Canceller | None:
    # sacct says who by a number, slurmrestd by a name.
    match = re.fullmatch(r"CANCELLED by (\S+)", state)
    if match is None:
        return None
    if match[1] == uid:
        return "owner"
    return "root" if match[1] in ("0", "root") else "other"


def _mebibytes(size: str) -> int:
    """MiB, rounded, of a size in bytes or with a unit."""
    match = re.fullmatch(r"([0-9.]+)([KMGTP]?)", size)
    if match is None:
        return 0
    return round(float(match[1]) * MEMORY_UNITS[match[2]] if match[2] else float(match[1]) / 2**20)


def _allowed(line: str, key: str) -> list[str]:
    """The names of a list of a partition's; none where it means all, or nobody."""
    return [name for name in _value(line, key).split(",") if name not in ("", "ALL", "(null)")]


#: Nodes by the line that they were read of, with their partitions.
KnownNodes = dict[str, tuple[Node, list[str]]]


def cluster(nodes: str, partitions: str, known: KnownNodes | None = None) -> Cluster:
    """`scontrol -d -o show node` and `scontrol -o show partition`.

    Args:
        known: The nodes of the last poll, which are replaced by those of this one: of thousands few change.
    """
    members: dict[str, list[str]] = {}
    lines: KnownNodes = {}
    for line in nodes.splitlines():
        if not line.startswith("NodeName="):
            continue
        before = known.get(line) if known else None
        node, names = before or (
            _node(line),
            [name for name in _value(line, "Partitions").split(",") if name],
        )
        lines[line] = node, names
        for name in names:
            members.setdefault(name, []).append(node.name)
    if known is not None:
        known.clear()
        known.update(lines)
    return Cluster(
        taken=datetime.now(UTC),
        nodes=[node for node, _ in lines.values()],
        partitions=[
            Partition(
                name=(name := _value(line, "PartitionName")),
                state=_value(line, "State") or "UP",
                default=_value(line, "Default") == "YES",
                max_minutes=minutes(_value(line, "MaxTime")),
                node_names=members.get(name, []),
                groups=_allowed(line, "AllowGroups"),
                accounts=_allowed(line, "AllowAccounts"),
                refused_accounts=_allowed(line, "DenyAccounts"),
                qos=_allowed(line, "AllowQos"),
                refused_qos=_allowed(line, "DenyQos"),
                hidden=_value(line, "Hidden") == "YES",
                suspends=bool({"SUSPEND", "GANG"} & set(_value(line, "PreemptMode").split(","))),
            )
            for line in partitions.splitlines()
            if line.startswith("PartitionName=")
        ],
    )


def reservations(output: str) -> list[Reservation]:
    """`scontrol -o show reservation`; without any it is one line that says so."""
    found = []
    for line in output.splitlines():
        start, end = time(_value(line, "StartTime")), time(_value(line, "EndTime"))
        if not line.startswith("ReservationName=") or start is None or end is None:
            continue
        tres = tres_of(_value(line, "TRES"))
        found.append(
            Reservation(
                name=_value(line, "ReservationName"),
                start=start,
                end=end,
                node_names=expand(_value(line, "Nodes")),
                users=[user for user in _value(line, "Users").split(",") if user],
                accounts=[account for account in _value(line, "Accounts").split(",") if account],
                cpus=int(tres.get("cpu", 0)),
                gpus=int(tres.get("gres/gpu", 0)),
                maintenance="MAINT" in _value(line, "Flags").split(","),
            )
        )
    return found


def licences(output: str) -> list[Licence]:
    """`scontrol -o show licenses`; without any it is one line that says so."""
    return [
        Licence(
            name=_value(line, "LicenseName"),
            total=to_int(_value(line, "Total")),
            used=to_int(_value(line, "Used")),
            reserved=to_int(_value(line, "Reserved")),
        )
        for line in output.splitlines()
        if line.startswith("LicenseName=")
    ]


def limits(output: str) -> list[Limits]:
    """`scontrol -o show assoc_mgr flags=assoc,qos`."""
    found = []
    for line in output.splitlines():
        qos = re.match(r"QOS=(.+?)\(\d+\) ", line)
        if not qos and not line.startswith("ClusterName="):
            continue
        own = line.partition(" Account Limits=")[0]  # what follows is of each account within the quality
        wall = _value(own, "MaxWallPJ")
        found.append(
            Limits(
                account=_value(own, "Account"),
                user=_value(own, "UserName").partition("(")[0],
                parent=_value(own, "ParentAccount").partition("(")[0],
                qos=qos[1] if qos else "",
                resources={
                    name: (int(most), int(used))
                    for name, most, used in re.findall(r"([^=,]+)=(\d+)\((\d+)\)", _value(own, "GrpTRES"))
                },
                each={
                    name: int(most) for name, most in re.findall(r"([^=,]+)=(\d+)", _value(own, "MaxTRESPJ"))
                },
                jobs=_limited(_value(own, "GrpJobs")) or _limited(_value(own, "MaxJobs")),
                minutes=int(wall) if wall.isdecimal() else None,
            )
        )
    return found


ASSOCIATION_FIELDS = (
    *("account", "user", "partition", "maxsubmitjobs", "grptres", "grpjobs", "maxwall", "grptresmins"),
)


def accounts_of(output: str, organisation: str) -> list[str]:
    """`sacctmgr show account`: those of an organisation whose names are Carme's."""
    rows = (line.split("|") for line in output.splitlines())
    return [
        row[0]
        for row in rows
        if len(row) == 2 and row[1] == organisation and re.fullmatch(ACCOUNT_PATTERN, row[0])
    ]


def project_accounts(associations: str, use: str) -> dict[str, ProjectAccount]:
    """`sacctmgr show association` of Carme's accounts, and `scontrol -o show assoc_mgr` for their use."""
    found: dict[str, dict[str, Any]] = {}
    for line in associations.splitlines():
        if len(values := line.split("|")) != len(ASSOCIATION_FIELDS):
            continue
        row = dict(zip(ASSOCIATION_FIELDS, values, strict=True))
        entry = found.setdefault(
            row["account"], {"account": row["account"], "members": {}, "stopped": [], "use": Use()}
        )
        if row["user"]:
            entry["members"].setdefault(row["user"], []).append(row["partition"])
            if row["maxsubmitjobs"] == "0" and row["user"] not in entry["stopped"]:
                entry["stopped"].append(row["user"])
            continue
        minutes_of = _limits_in(row["grptresmins"])
        entry |= {
            "resources": _limits_in(row["grptres"]),
            "jobs": int(row["grpjobs"]) if row["grpjobs"].isdecimal() else None,
            "minutes": minutes(row["maxwall"]),
            "gpu_minutes": minutes_of.get("gres/gpu"),
        }
    for line in use.splitlines():
        account = _value(line, "Account")
        if line.startswith("ClusterName=") and account in found and not _value(line, "UserName"):
            now, past = _used_in(_value(line, "GrpTRES")), _used_in(_value(line, "GrpTRESMins"))
            jobs = re.fullmatch(r"\w+\((\d+)\)", _value(line, "GrpJobs"))
            found[account]["use"] = Use(
                gpus=now.get("gres/gpu", 0),
                nodes=now.get("node", 0),
                jobs=int(jobs[1]) if jobs else 0,
                gpu_hours=past.get("gres/gpu", 0) / 60,
            )
    return {name: ProjectAccount(**entry) for name, entry in found.items()}


USER_FIELDS = ("user", "defaultaccount", "account", "partition", "qos", "defaultqos", "maxsubmitjobs")


def associations(output: str, user: str) -> list[Association]:
    """`sacctmgr show user withassoc` with USER_FIELDS: those of a user."""
    found = []
    for line in output.splitlines():
        if len(values := line.split("|")) != len(USER_FIELDS):
            continue
        row = dict(zip(USER_FIELDS, values, strict=True))
        if row["user"] != user or not row["account"]:
            continue
        found.append(
            Association(
                account=row["account"],
                partition=row["partition"],
                qos=[name for name in row["qos"].split(",") if name],
                default_qos=row["defaultqos"],
                default=row["account"] == row["defaultaccount"],
                stopped=row["maxsubmitjobs"] == "0",
            )
        )
    return found


def enforcement(output: str) -> list[str]:
    """What of the accounting Slurm enforces, in `scontrol show config`."""
    match = re.search(r"^AccountingStorageEnforce\s*=\s*(\S+)", output, re.MULTILINE)
    words = match[1].split(",") if match else []
    return [word for word in words if word not in ("none", "(null)")]


def _limits_in(text: str) -> dict[str, int]:
    """Limits in `gres/gpu=2,node=3`."""
    return {name: int(count) for name, count in re.findall(r"([^=,]+)=(\d+)", text)}


def _used_in(text: str) -> dict[str, int]:
    """What is used in `gres/gpu=2(1),node=N(3)`."""
    return {name: int(count) for name, count in re.findall(r"([^=,]+)=\w+\((\d+)\)", text)}


def _limited(text: str) -> tuple[int, int] | None:
    """The limit and its use in `4(1)`; `N(1)` is no limit."""
    match = re.fullmatch(r"(\d+)\((\d+)\)", text)
    return (int(match[1]), int(match[2])) if match else None


def _node(line: str) -> Node:
    name, address, state = _value(line, "NodeName"), _value(line, "NodeAddr"), _value(line, "State")
    reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?(?: Comment=.*)?$", line)
    return Node(
        name=name,
        address=address if address != name else "",
        state=state,
        cpus=to_int(_value(line, "CPUEfctv") or _value(line, "CPUTot")),
        cpus_used=to_int(_value(line, "CPUAlloc")),
        memory_mb=to_int(_value(line, "RealMemory")),
        memory_used_mb=to_int(_value(line, "AllocMem")),
        gpus=gres(_value(line, "Gres")),
        gpus_used=gpus_used(_value(line, "GresUsed")),
        available=usable(state),
        reason=reason[1].strip() if reason else "",
        features=node_features(line),
    )


def usable(state: str) -> bool:
    """Whether jobs may begin on a node in this state, such as `IDLE+DRAIN`."""
    words = _state_words(state)
    if "POWERING_UP" in words:
        words.discard("NOT_RESPONDING")  # it cannot yet; after ResumeTimeout Slurm takes it down
    return not words & _UNUSABLE


def unheard(state: str) -> bool:
    """Whether Slurm does not hear a node in this state and has not given it up, as after a start of Slurm."""
    words = _state_words(state)
    return "DOWN" not in words and bool(words & {"UNKNOWN", "NOT_RESPONDING"})


def _state_words(state: str) -> set[str]:
    """The base and the flags of a node's state; an asterisk says that the node does not respond."""
    words = {word.rstrip("*~#!%$@^-") for word in state.split("+")}
    return words | {"NOT_RESPONDING"} if "*" in state else words


def node_features(line: str) -> list[str]:
    """The features in `scontrol -o show node`."""
    return [word for word in _value(line, "AvailableFeatures").split(",") if word]


def _value(line: str, key: str) -> str:
    match = re.search(rf"(?:^| ){re.escape(key)}=(\S*)", line)
    return text_of(match[1]) if match else ""


@functools.lru_cache(maxsize=1 << 12)  # as few of them are different in a queue of tens of thousands of jobs
def memory(text: str, cpus: int = 1) -> int:
    """MiB in `100M`, `2.50G` or, for each processor, `100Mc`."""
    match = re.fullmatch(r"([0-9.]+)([KMGTP]?)([cn]?)", text)
    if match is None:
        return 0
    amount = float(match[1]) * MEMORY_UNITS[match[2]]
    return int(amount * cpus if match[3] == "c" else amount)


def minutes(text: str) -> int | None:
    """Minutes of `1-02:03:04`, `1:30:00`, `30:00`; None for UNLIMITED and the like."""
    whole = seconds(text)
    return None if whole is None else whole // 60


@functools.lru_cache(maxsize=1 << 12)
def seconds(text: str) -> int | None:
    """Seconds of the same."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, mins, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + mins) * 60 + rest


def time(text: str) -> datetime | None:
    """A moment in seconds since 1970 or, by commands that know no format, as UTC text."""
    if text.isdecimal():
        return datetime.fromtimestamp(int(text), UTC) if int(text) else None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None  # N/A, Unknown, None


def coordinated_accounts(output: str, user: str) -> list[str]:
    """The accounts that name the user among their coordinators, as Slurm hands them down."""
    rows = (line.partition("|") for line in output.splitlines())
    return sorted({account for account, _, leaders in rows if user in leaders.split(",")})
