"""What the worker answers as our models. Pure functions.

A job is turned into the fields that squeue writes, so that one place says what they mean
(`carme.slurm.parsing`).
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from carme.jobs import Cluster, Job, Node, Partition, Reservation
from carme.jobs.nodes import expand
from carme.slurm import parsing
from carme.slurm.tres import allotted_of, gpus_used, gres, tres_of

Record = Mapping[str, Any]


def queue(jobs: Iterable[Record]) -> list[Job]:
    """The worker's answer to `jobs`."""
    return [parsing.queued(_short(job), allotted_of(_long(job), job["shared"] == "0")) for job in jobs]


def _short(job: Record) -> dict[str, str]:
    """As in squeue's short form."""
    return {
        "A": str(job["job_id"]),
        "u": job["user"],
        "a": job["account"] or "",
        "P": job["partition"] or "",
        "T": job["job_state"],
        "r": job["state_reason"] or "",
        "D": str(job["num_nodes"]),
        "N": job["nodes"] or "",
        "b": job["tres_per_node"] or "N/A",
        "C": str(job["num_cpus"]),
        "m": f"{job['pn_min_memory']}M{'c' if job['mem_per_cpu'] else ''}",
        "l": _minutes(job["time_limit"]),
        "L": _left(job["time_limit"], job["run_time"]),
        "V": str(job["submit_time"]),
        "S": str(job["start_time"]),
        "e": str(job["end_time"]),
        "Q": str(job["priority"]),
        "Y": job["sched_nodes"] or "",
        "v": job["resv_name"] or "",
        "q": job["qos"] or "",
        # Of what is not a batch job, where its command was given.
        "B": (job["batch_host"] if job["batch_flag"] else job["alloc_node"]) or "",
        "F": str(job["array_job_id"] or job["job_id"]),
        "K": str(next((job[key] for key in _TASKS if job[key] is not None), "N/A")),
        "j": job["name"] or "",
        "k": job["comment"] or "",
    }


_TASKS = ("array_task_str", "array_task_id")


def _long(job: Record) -> dict[str, str]:
    """As in squeue's long form."""
    return {
        "JobID": str(job["job_id"]),
        "RestartCnt": str(job["restart_cnt"]),
        "NumNodes": str(job["num_nodes"]),
        "NumTasks": str(job["num_tasks"]),
        "tres-alloc": job["tres_alloc_str"] or job["tres_req_str"] or "",
        **{f"tres-per-{unit}": job[f"tres_per_{unit}"] or "" for unit in ("job", "node", "socket", "task")},
    }


def _minutes(limit: int | str) -> str:
    return f"{limit}:00" if isinstance(limit, int) else limit


def _left(limit: int | str, used: int) -> str:
    if not isinstance(limit, int):
        return limit
    minutes, seconds = divmod(max(0, limit * 60 - used), 60)
    return f"{minutes}:{seconds:02}"


def cluster(answer: Mapping[str, list[Record]]) -> Cluster:
    """The worker's answer to `cluster`."""
    members: dict[str, list[str]] = {}
    for node in answer["nodes"]:
        for name in node["partitions"]:
            members.setdefault(name, []).append(node["name"])
    return Cluster(
        taken=datetime.now(UTC),
        nodes=[_node(node) for node in answer["nodes"]],
        partitions=[
            Partition(
                name=row["name"],
                state=row["state"],
                default=row["default"],
                hidden=row["hidden"],
                max_minutes=row["max_time"] if isinstance(row["max_time"], int) else None,
                node_names=members.get(row["name"], []),
                groups=_names_of(row["groups"]),
                accounts=_names_of(row["accounts"]),
                refused_accounts=_names_of(row["refused_accounts"]),
                qos=_names_of(row.get("qos")),
                refused_qos=_names_of(row.get("refused_qos")),
                suspends=bool({"SUSPEND", "GANG"} & set((row["preempt_mode"] or "").split(","))),
            )
            for row in answer["partitions"]
        ],
    )


def _node(row: Record) -> Node:
    # As scontrol reports of a node on which jobs have no processor, but memory: such as a suspended one.
    holds = row["allocated"] and not row["cpus_used"]
    state = re.sub(r"^IDLE\b", "MIXED", row["state"]) if holds else row["state"]
    return Node(
        name=row["name"],
        address=row["address"] if row["address"] not in (None, row["name"]) else "",
        state=state,
        cpus=row["cpus"],
        cpus_used=row["cpus_used"],
        memory_mb=row["memory_mb"],
        memory_used_mb=row["memory_used_mb"],
        gpus=gres(",".join(row["gres"] or [])),
        gpus_used=gpus_used(",".join(row["gres_used"] or [])),
        available=parsing.usable(state),
        reason=(row["reason"] or "").strip(),
        features=row["features"],
    )


def _names_of(names: Iterable[str] | None) -> list[str]:
    """The names of a list of a partition's; none where it means all, or nobody."""
    return [name for name in names or [] if name not in ("", "ALL")]


def reservations(rows: Iterable[Record]) -> list[Reservation]:
    """The worker's answer to `reservations`."""
    found = []
    for row in rows:
        tres = tres_of(",".join(row["tres_str"] or []))
        found.append(
            Reservation(
                name=row["name"],
                start=datetime.fromtimestamp(row["start_time"], UTC),
                end=datetime.fromtimestamp(row["end_time"], UTC),
                node_names=expand(row["node_list"] or ""),
                users=row["users"] or [],
                accounts=row["accounts"] or [],
                cpus=int(tres.get("cpu", 0)),
                gpus=int(tres.get("gres/gpu", 0)),
                maintenance="MAINT" in (row["flags"] or "").split(","),
            )
        )
    return found
