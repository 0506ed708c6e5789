"""slurmrestd's answers as our models. Pure functions.

A job is turned into the fields that squeue writes, so that one place says what they mean
(`carme.slurm.parsing`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from carme.jobs import Cluster, Job, Licence, Node, Partition, Reservation
from carme.jobs.access import Association
from carme.jobs.nodes import expand
from carme.slurm import parsing
from carme.slurm.gateway import ExitStatus
from carme.slurm.tres import allotted_of, gpus_used, gres, tres_of

Record = Mapping[str, Any]

#: Flags of a job's state that squeue shows instead of the state, the first of them that is there.
_FLAGS = (
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RECONFIG_FAIL", "SIGNALING"),
)


def queue(jobs: Iterable[Record]) -> list[Job]:
    """The answer to `jobs/`."""
    return [parsing.queued(_short(job), allotted_of(_long(job), _is_exclusive(job))) for job in jobs]


def _short(job: Record) -> dict[str, str]:
    """As in squeue's short form."""
    per_cpu = number(job["memory_per_cpu"])
    memory = number(job["memory_per_node"]) if per_cpu is None else per_cpu
    first = job["batch_host"] if job["batch_flag"] else job["allocating_node"]
    return {
        "A": str(job["job_id"]),
        "u": job["user_name"] or str(job["user_id"]),
        "a": job["account"],
        "P": job["partition"],
        "T": state_of(job["job_state"]),
        "r": job["state_description"] or job["state_reason"],
        "D": str(number(job["node_count"]) or 0),
        "N": job["nodes"],
        "b": job["tres_per_node"] or "N/A",
        "C": str(number(job["cpus"]) or 0),
        "m": f"{memory or 0}M{'c' if per_cpu is not None else ''}",
        "l": _limit(job["time_limit"]),
        "L": _left(job),
        "V": _moment(job["submit_time"]),
        "S": _moment(job["start_time"]),
        "e": _moment(job["end_time"]),
        "Q": str(number(job["priority"]) or 0),
        "Y": job["scheduled_nodes"],
        "v": job["resv_name"],
        "q": job["qos"],
        # Of what is not a batch job, where its command was given.
        "B": first,
        "F": str(number(job["array_job_id"]) or job["job_id"]),
        "K": job["array_task_string"] or _task(job["array_task_id"]),
        "j": job["name"],
        "k": job["comment"],
    }


def _long(job: Record) -> dict[str, str]:
    """As in squeue's long form."""
    return {
        "JobID": str(job["job_id"]),
        "RestartCnt": str(job["restart_cnt"]),
        "NumNodes": str(number(job["node_count"]) or 0),
        "NumTasks": str(number(job["tasks"]) or 0),
        "tres-alloc": job["tres_alloc_str"] or job["tres_req_str"],
        **{f"tres-per-{unit}": job[f"tres_per_{unit}"] for unit in ("job", "node", "socket", "task")},
    }


def _is_exclusive(job: Record) -> bool:
    return "none" in job["shared"]


def state_of(words: list[str]) -> str:
    """The one of these words for a job's state that Slurm's commands show."""
    return next((flag for flag in _FLAGS if flag in words), words[0] if words else "UNKNOWN")


def number(value: Any) -> int | None:
    """What Slurm writes as a number, or as `{"set": true, "infinite": false, "number": 3}`."""
    if isinstance(value, dict):
        return int(value["number"]) if value["set"] and not value["infinite"] else None
    return None if value is None else int(value)


def _limit(value: Record) -> str:
    minutes = number(value)
    return "UNLIMITED" if minutes is None else f"{minutes}:00"


def _left(job: Record) -> str:
    """What is left of a job that is suspended; of others nobody asks for it."""
    limit = number(job["time_limit"])
    if limit is None:
        return "UNLIMITED"
    minutes, seconds = divmod(max(0, limit * 60 - (number(job["pre_sus_time"]) or 0)), 60)
    return f"{minutes}:{seconds:02}"


def _moment(value: Any) -> str:
    return str(number(value) or 0)


def _task(value: Any) -> str:
    task = number(value)
    return "N/A" if task is None else str(task)


def exit_statuses(jobs: Iterable[Record], ids: Iterable[int]) -> dict[int, ExitStatus]:
    """How these of the jobs ended."""
    wanted = set(ids)
    return {
        job["job_id"]: ExitStatus(
            number(job["exit_code"]["return_code"]) or 0, number(job["exit_code"]["signal"]["id"]) or 0
        )
        for job in jobs
        if job["job_id"] in wanted
    }


def cluster(nodes: list[Record], partitions: Iterable[Record], default: str = "") -> Cluster:
    """The answers to `nodes/` and `partitions/`.

    Args:
        default: The partition of jobs that name none: slurmrestd does not say which one it is.
    """
    members: dict[str, list[str]] = {}
    for node in nodes:
        for name in node["partitions"]:
            members.setdefault(name, []).append(node["name"])
    return Cluster(
        taken=datetime.now(UTC),
        nodes=[_node(node) for node in nodes],
        partitions=[_partition(row, members, default) for row in partitions],
    )


def _partition(row: Record, members: Mapping[str, list[str]], default: str) -> Partition:
    return Partition(
        name=row["name"],
        state=(row["partition"]["state"] or ["UP"])[0],
        default=row["name"] == default,
        max_minutes=number(row["maximums"]["time"]),
        node_names=members.get(row["name"], []),
        groups=_names_of(row["groups"]["allowed"]),
        accounts=_names_of(row["accounts"]["allowed"]),
        refused_accounts=_names_of(row["accounts"]["deny"]),
        qos=_names_of(row["qos"]["allowed"]),
        refused_qos=_names_of(row["qos"]["deny"]),
    )


def _node(row: Record) -> Node:
    base, *flags = row["state"]
    # As scontrol reports of a node on which jobs have no processor, but memory: such as a suspended one.
    if base == "IDLE" and (row["alloc_cpus"] or row["alloc_memory"]):
        base = "MIXED"
    state = "+".join([base, *sorted(flags)])  # scontrol's order
    return Node(
        name=row["name"],
        address=row["address"] if row["address"] != row["name"] else "",
        state=state,
        cpus=row["effective_cpus"] or row["cpus"],
        cpus_used=row["alloc_cpus"],
        memory_mb=row["real_memory"],
        memory_used_mb=row["alloc_memory"],
        gpus=gres(row["gres"]),
        gpus_used=gpus_used(row["gres_used"]),
        available=parsing.usable(state),
        reason=row["reason"].strip(),
        features=list(row["features"]),
    )


def _names_of(names: str) -> list[str]:
    """The names of a list of a partition's; none where it means all, or nobody."""
    return [name for name in names.split(",") if name not in ("", "ALL", "(null)")]


def reservations(rows: Iterable[Record]) -> list[Reservation]:
    """The answer to `reservations/`."""
    found = []
    for row in rows:
        tres = tres_of(row["tres"])
        start, end = number(row["start_time"]), number(row["end_time"])
        if start is None or end is None:
            continue
        found.append(
            Reservation(
                name=row["name"],
                start=datetime.fromtimestamp(start, UTC),
                end=datetime.fromtimestamp(end, UTC),
                node_names=expand(row["node_list"]),
                users=_names_of(row["users"]),
                accounts=_names_of(row["accounts"]),
                cpus=int(tres.get("cpu", 0)),
                gpus=int(tres.get("gres/gpu", 0)),
                maintenance="MAINT" in row["flags"],
            )
        )
    return found


def associations(rows: Iterable[Record], user: str) -> list[Association]:
    """The answer to `associations/` of the accounting: those of a user."""
    own = [row for row in rows if row["user"] == user]
    defaults = {row["account"] for row in own if row["is_default"]}
    return [
        Association(
            account=row["account"],
            partition=row["partition"],
            qos=list(row["qos"]),
            default_qos=row["default"]["qos"],
            default=row["account"] in defaults,
            stopped=number(row["max"]["jobs"]["total"]) == 0,
        )
        for row in own
    ]


def licences(rows: Iterable[Record]) -> list[Licence]:
    """The answer to `licenses/`."""
    return [
        Licence(name=row["LicenseName"], total=row["Total"], used=row["Used"], reserved=row["Reserved"])
        for row in rows
    ]


#: What differs in the answer to `jobs/` although nothing has happened to a job.
_PASSING = ("last_sched_evaluation",)


def pulse(jobs: Iterable[Record]) -> str:
    """A text that differs whenever one of these jobs does."""
    rows = [{key: value for key, value in job.items() if key not in _PASSING} for job in jobs]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def submitted(answer: Record) -> int:
    """The number of a job that was submitted. Raises KeyError, TypeError or ValueError without one."""
    number = int(answer["job_id"])
    if number <= 0:
        raise ValueError(f"job_id is {number}")
    return number


def refused(rows: Iterable[Record]) -> str:
    """What Slurm says about the jobs that it would not end; empty: it ended all."""
    return "\n".join(row["error"]["message"] for row in rows if row["error"]["code"])
