"""Slurm's output as our models. Pure functions.

Names and comments of jobs are their owners' free choice and may hold line ends and separators. So
records are told apart by a separator that is drawn anew for each call and cannot be guessed.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from carme.jobs import Cluster, Job, JobState, Licence, Node, Partition, Phase, Reservation, arrays
from carme.jobs.limits import Limits
from carme.jobs.nodes import expand
from carme.projects.models import ACCOUNT_PATTERN, ProjectAccount, Use
from carme.slurm.gateway import Aftermath, ExitStatus
from carme.slurm.label import Label

QUEUE_FIELDS = (
    *("A", "u", "a", "P", "T", "r", "D", "N", "b", "C", "m", "l", "V", "S", "e"),
    *("Q", "Y", "v", "q", "B", "F", "K", "j", "k"),
)
ACCOUNTING_FIELDS = (
    *("JobIDRaw", "User", "Account", "Partition", "State", "ExitCode", "NNodes", "NodeList", "ReqTRES"),
    *("AllocTRES", "TimelimitRaw", "Submit", "Start", "End", "Reason", "Reservation", "QOS", "UID"),
    *("JobID", "JobName", "Comment"),
)
AFTERMATH_FIELDS = ("JobIDRaw", "UID", "State", "MaxRSS")
ADMIN_COMMENT_FIELDS = ("JobIDRaw", "AdminComment")
FAILED_NODE_FIELDS = ("JobIDRaw", "FailedNode")

_MEMORY_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_UNUSABLE = {
    *("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "NOT_RESPONDING", "UNKNOWN"),
    *("POWERING_DOWN", "POWERED_DOWN", "REBOOT_ISSUED", "REBOOT", "INVAL", "INVALID_REG", "PLANNED_DOWN"),
}


def records(output: str, separator: str, count: int) -> Iterator[list[str]]:
    """Records of `count` fields, each field followed by the separator."""
    fields = output.split(separator)[:-1]
    for first in range(0, len(fields) - count + 1, count):
        record = fields[first : first + count]
        record[0] = record[0].lstrip("\n")
        yield record


def queue(output: str, separator: str) -> list[Job]:
    """Jobs in squeue's output with QUEUE_FIELDS."""
    jobs = []
    for record in records(output, separator, len(QUEUE_FIELDS)):
        field = dict(zip(QUEUE_FIELDS, record, strict=True))
        label = Label.read(field["k"])
        nodes = _count(field["D"])
        gpus, gpu_type = gres_per_node(field["b"])
        state = JobState.parse(field["T"])
        jobs.append(
            Job(
                id=int(field["A"]),
                key=label.key if label else None,
                kind=label.kind if label else "other",
                image=label.image if label else None,
                name=_text(field["j"]),
                user=field["u"],
                account=_text(field["a"]),
                partition=field["P"],
                state=state,
                reason=_text(field["r"]),
                nodes=nodes,
                node_list=_text(field["N"]),
                gpus=gpus * nodes,
                gpu_type=gpu_type,
                cpus=_count(field["C"]),
                memory_mb=memory(field["m"], _count(field["C"])) * nodes,
                minutes_limit=minutes(field["l"]),
                submitted=time(field["V"]),
                priority=int(field["Q"]) if field["Q"].isdecimal() else None,
                # While a job waits these are the scheduler's plan.
                planned_start=time(field["S"]) if state.phase is Phase.PENDING else None,
                planned_nodes=_text(field["Y"]) if state.phase is Phase.PENDING else "",
                reservation=_text(field["v"]),
                qos=_text(field["q"]),
                started=None if state.phase is Phase.PENDING else time(field["S"]),
                ended=time(field["e"]) if state.phase is Phase.OVER else None,
                failed_node=_gone(state, field["B"], field["N"]),
                **array_of(f"{field['F']}_{field['K']}"),
            )
        )
    return jobs


def array_of(text: str) -> dict[str, Any]:
    """The fields of a `Job` in an array: `12_3` is a task, `12_[4-9%2]` or `12_4-9%2` are some that wait."""
    match = re.fullmatch(r"(\d+)_\[?([\d,:-]+)(%\d+)?\]?", text)
    return arrays.fields(int(match[1]), match[2] + (match[3] or "")) if match else {}


def _gone(state: JobState, first: str, node_list: str) -> str:
    """The node on which a job's command runs or ran, if Slurm has taken it from the job because it failed."""
    known = _text(first) and _text(node_list) and (state is JobState.RUNNING or state.phase is Phase.OVER)
    return first if known and first not in expand(node_list) else ""  # while a job ends its list gets shorter


def endings(output: str) -> dict[int, ExitStatus]:
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
    jobs = []
    begun: dict[
        tuple[str, str], str
    ] = {}  # jobs that have lost a node have a record for the time before, too
    for record in records(output, separator, len(ACCOUNTING_FIELDS)):
        field = dict(zip(ACCOUNTING_FIELDS, record, strict=True))
        if not field["JobIDRaw"].isdecimal():
            continue  # a step
        label = Label.read(field["Comment"])
        state = JobState.parse(field["State"])
        which = (field["JobIDRaw"], field["Submit"])
        if state is JobState.RESIZING:
            begun.setdefault(which, field["Start"])
            continue
        tres = tres_of(field["AllocTRES"] or field["ReqTRES"])
        exit_code, _, signal = field["ExitCode"].partition(":")
        over = state.phase is Phase.OVER
        gpu_types = [name.removeprefix("gres/gpu:") for name in tres if name.startswith("gres/gpu:")]
        gpus = tres.get("gres/gpu") or sum(tres[f"gres/gpu:{kind}"] for kind in gpu_types)
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
                reason=_text(field["Reason"]),
                reservation=field["Reservation"],
                qos=field["QOS"],
                nodes=_count(field["NNodes"]),
                node_list="" if field["NodeList"] == "None assigned" else field["NodeList"],
                gpus=int(gpus),
                gpu_type=gpu_types[0] if len(gpu_types) == 1 else None,
                cpus=int(tres.get("cpu", 0)),
                memory_mb=int(tres.get("mem", 0)),
                minutes_limit=int(field["TimelimitRaw"]) if field["TimelimitRaw"].isdecimal() else None,
                submitted=time(field["Submit"]),
                started=time(begun.get(which, field["Start"])),
                ended=time(field["End"]),
                exit_code=int(exit_code) if over and exit_code.isdecimal() else None,
                signal=(int(signal) or None) if over and signal.isdecimal() else None,
                cancelled_by=_cancelled_by(field["State"], field["UID"]),
                **array_of(field["JobID"]),
            )
        )
    return jobs


def aftermath(output: str, separator: str) -> dict[int, Aftermath]:
    """What sacct's output with AFTERMATH_FIELDS, steps included, says about each job."""
    found: dict[int, Aftermath] = {}
    for job, uid, state, peak in records(output, separator, len(AFTERMATH_FIELDS)):
        number, _, step = job.partition(".")
        if not number.isdecimal():
            continue
        known = found.get(int(number), Aftermath())
        if not step:
            known = known._replace(cancelled_by=_cancelled_by(state, uid))
        elif peak := _mebibytes(peak):
            known = known._replace(peak_memory_mb=max(peak, known.peak_memory_mb or 0))
        found[int(number)] = known
    return found


def failed_nodes(output: str, separator: str) -> dict[int, str]:
    """The node whose failure ended each job, in sacct's output with `JobIDRaw` and `FailedNode`."""
    return {
        int(job): node
        for job, node in records(output, separator, len(FAILED_NODE_FIELDS))
        if job.isdecimal() and _text(node)
    }


def admin_comments(output: str, separator: str) -> dict[int, str]:
    """What administrators noted about each job, in sacct's output with ADMIN_COMMENT_FIELDS."""
    return {
        int(job): text
        for job, text in records(output, separator, len(ADMIN_COMMENT_FIELDS))
        if job.isdecimal()
    }


def _cancelled_by(state: str, uid: str) -> Literal["owner", "other"] | None:
    match = re.fullmatch(r"CANCELLED by (\d+)", state)
    if match is None:
        return None
    return "owner" if match[1] == uid else "other"


def _mebibytes(size: str) -> int:
    """MiB, rounded, of a size in bytes or with a unit."""
    match = re.fullmatch(r"([0-9.]+)([KMGTP]?)", size)
    if match is None:
        return 0
    return round(float(match[1]) * _MEMORY_UNITS[match[2]] if match[2] else float(match[1]) / 2**20)


def _allowed(line: str, key: str) -> list[str]:
    """The names of a list of a partition's; none where it is said of all, or of nobody."""
    return [name for name in _value(line, key).split(",") if name not in ("", "ALL", "(null)")]


def cluster(nodes: str, partitions: str) -> Cluster:
    """`scontrol -d -o show node` and `scontrol -o show partition`."""
    members: dict[str, list[str]] = {}
    found = []
    for line in nodes.splitlines():
        if not line.startswith("NodeName="):
            continue
        node = _node(line)
        found.append(node)
        for name in filter(None, _value(line, "Partitions").split(",")):
            members.setdefault(name, []).append(node.name)
    return Cluster(
        taken=datetime.now(UTC),
        nodes=found,
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
            total=_count(_value(line, "Total")),
            used=_count(_value(line, "Used")),
            reserved=_count(_value(line, "Reserved")),
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
        minutes_of = _whole(row["grptresmins"])
        entry |= {
            "resources": _whole(row["grptres"]),
            "jobs": int(row["grpjobs"]) if row["grpjobs"].isdecimal() else None,
            "minutes": minutes(row["maxwall"]),
            "gpu_minutes": minutes_of.get("gres/gpu"),
        }
    for line in use.splitlines():
        account = _value(line, "Account")
        if line.startswith("ClusterName=") and account in found and not _value(line, "UserName"):
            now, past = _used(_value(line, "GrpTRES")), _used(_value(line, "GrpTRESMins"))
            jobs = re.fullmatch(r"\w+\((\d+)\)", _value(line, "GrpJobs"))
            found[account]["use"] = Use(
                gpus=now.get("gres/gpu", 0),
                nodes=now.get("node", 0),
                jobs=int(jobs[1]) if jobs else 0,
                gpu_hours=past.get("gres/gpu", 0) / 60,
            )
    return {name: ProjectAccount(**entry) for name, entry in found.items()}


def _whole(text: str) -> dict[str, int]:
    """Limits in `gres/gpu=2,node=3`."""
    return {name: int(count) for name, count in re.findall(r"([^=,]+)=(\d+)", text)}


def _used(text: str) -> dict[str, int]:
    """What is used in `gres/gpu=2(1),node=N(3)`."""
    return {name: int(count) for name, count in re.findall(r"([^=,]+)=\w+\((\d+)\)", text)}


def _limited(text: str) -> tuple[int, int] | None:
    """The limit and its use in `4(1)`; `N(1)` is no limit."""
    match = re.fullmatch(r"(\d+)\((\d+)\)", text)
    return (int(match[1]), int(match[2])) if match else None


def _node(line: str) -> Node:
    state = _value(line, "State")
    words = {word.rstrip("*~#!%$@^-") for word in state.split("+")}
    reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?(?: Comment=.*)?$", line)
    return Node(
        name=_value(line, "NodeName"),
        state=state,
        cpus=_count(_value(line, "CPUEfctv") or _value(line, "CPUTot")),
        cpus_used=_count(_value(line, "CPUAlloc")),
        memory_mb=_count(_value(line, "RealMemory")),
        memory_used_mb=_count(_value(line, "AllocMem")),
        gpus=gres(_value(line, "Gres")),
        gpus_used={kind: count for kind, count in gres(_value(line, "GresUsed")).items() if count},
        available="*" not in state and not words & _UNUSABLE,
        reason=reason[1].strip() if reason else "",
        features=node_features(line),
    )


def node_features(line: str) -> list[str]:
    """The features in `scontrol -o show node`."""
    return [word for word in _value(line, "AvailableFeatures").split(",") if word]


def _value(line: str, key: str) -> str:
    match = re.search(rf"(?:^| ){re.escape(key)}=(\S*)", line)
    return _text(match[1]) if match else ""


def gres(text: str) -> dict[str, int]:
    """GPUs by type in `gpu:a100:4(S:0-1),gpu:v100:2` or `gpu:2(IDX:0-1)`."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = part.split(":")
        if name != "gpu":
            continue
        kind = rest[0] if rest and not rest[0].isdecimal() else "gpu"
        count = int(rest[-1]) if rest and rest[-1].isdecimal() else 1
        found[kind] = found.get(kind, 0) + count
    return found


def gres_per_node(text: str) -> tuple[int, str | None]:
    """Number and type in `gres:gpu:a100:2` (up to 23.02) or `gres/gpu:a100:2` (after)."""
    found = gres(re.sub(r"gres[:/]", "", text))
    kinds = [kind for kind in found if kind != "gpu"]
    return sum(found.values()), kinds[0] if len(kinds) == 1 else None


def tres_of(text: str) -> dict[str, float]:
    """`cpu=2,mem=4000M,gres/gpu:a100=2` as numbers, memory in MiB."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if match := re.fullmatch(r"([0-9.]+)([KMGTP]?)", value):
            unit = _MEMORY_UNITS[match[2]] if name == "mem" else 1.0
            found[name] = float(match[1]) * unit
    return found


def memory(text: str, cpus: int = 1) -> int:
    """MiB in `100M`, `2.50G` or, for each processor, `100Mc`."""
    match = re.fullmatch(r"([0-9.]+)([KMGTP]?)([cn]?)", text)
    if match is None:
        return 0
    amount = float(match[1]) * _MEMORY_UNITS[match[2]]
    return int(amount * cpus if match[3] == "c" else amount)


def minutes(text: str) -> int | None:
    """Minutes of `1-02:03:04`, `1:30:00`, `30:00`; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, mins, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + mins


def time(text: str) -> datetime | None:
    """A moment in seconds since 1970 or, by commands that know no format, as UTC text."""
    if text.isdecimal():
        return datetime.fromtimestamp(int(text), UTC) if int(text) else None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None  # N/A, Unknown, None


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _text(text: str) -> str:
    return "" if text in ("(null)", "N/A", "None") else text


def accounts_led(output: str, user: str) -> list[str]:
    """The accounts that name the user among their coordinators, as Slurm hands them down."""
    rows = (line.partition("|") for line in output.splitlines())
    return sorted({account for account, _, leaders in rows if user in leaders.split(",")})
