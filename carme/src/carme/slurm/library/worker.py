"""The child that asks Slurm's library, and nothing else.

Runs as a program of its own, and imports nothing of ours: Slurm's library ends its process when its
configuration is wrong, a bug in it would take the broker along, and it holds the interpreter's lock while
it waits for Slurm. So the broker talks to it through a pipe, one question after the other, each a line of
JSON. An answer is its length in 8 bytes and JSON again: `answer`, or `refused` with what Slurm says, or
`failed` with why Slurm's answer cannot be read.
"""

import hashlib
import json
import marshal
import os
import pwd
import secrets
import sys
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

# What is read of each record, as pyslurm 24.11 names it.
JOB_FIELDS = (
    *("job_id", "user_id", "account", "partition", "job_state", "state_reason", "num_nodes", "nodes"),
    *("num_cpus", "num_tasks", "pn_min_memory", "mem_per_cpu", "time_limit", "run_time", "submit_time"),
    *("start_time", "end_time", "priority", "sched_nodes", "resv_name", "qos", "batch_flag", "batch_host"),
    *("alloc_node", "array_job_id", "array_task_id", "array_task_str", "name", "comment", "restart_cnt"),
    *("shared", "tres_alloc_str", "tres_req_str"),
    *("tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task"),
)
RESERVATION_FIELDS = ("start_time", "end_time", "node_list", "users", "accounts", "tres_str", "flags")
# Changes by itself, although nothing has happened to the job.
PASSING = {"run_time", "run_time_str", "last_sched_eval"}


def pulse(pyslurm: Any) -> str:
    """A text that differs whenever a job does."""
    found = pyslurm.job().get()
    for job in found.values():
        for field in PASSING:
            job.pop(field, None)
    # In a version without references, equal values have equal bytes.
    return hashlib.sha256(marshal.dumps(found, 2)).hexdigest()


def jobs(pyslurm: Any) -> list[dict[str, Any]]:
    """Every job that the controller remembers."""
    found = pyslurm.job().get()
    rows = [{field: job[field] for field in JOB_FIELDS} for job in found.values()]
    # That interface puts underscores for blanks into reasons; this one leaves them as they are.
    if any("_" in (row["state_reason"] or "") for row in rows):
        reasons = {job.id: job.state_reason for job in pyslurm.Jobs.load().values()}
        for row in rows:
            row["state_reason"] = reasons.get(row["job_id"], row["state_reason"])
    names = {uid: _name(uid) for uid in {row["user_id"] for row in rows}}
    return [row | {"user": names[row["user_id"]]} for row in rows]


_sent: dict[str, Any] = {"serial": "", "hashes": {}}


def changes(pyslurm: Any, known: str = "") -> dict[str, Any]:
    """The numbers of all jobs, and the records of those that differ from what was sent before.

    Args:
        known: The `serial` of the answer that the asker has; with another one all records are sent.
    """
    rows = jobs(pyslurm)
    before = _sent["hashes"] if known and known == _sent["serial"] else {}
    hashes = {row["job_id"]: _hash(row) for row in rows}
    changed = [row for row in rows if before.get(row["job_id"]) != hashes[row["job_id"]]]
    _sent.update(serial=secrets.token_hex(8), hashes=hashes)
    return {"serial": _sent["serial"], "ids": list(hashes), "changed": changed}


def _hash(row: dict[str, Any]) -> int:
    """Of a job's record; how long it has run is read of suspended jobs alone."""
    if row["job_state"] != "SUSPENDED":
        row = row | {"run_time": 0}
    return hash(marshal.dumps(row, 2))


def cluster(pyslurm: Any) -> dict[str, Any]:
    """Nodes and partitions."""
    # Only this interface knows the whole state and the processors that jobs get, only the other one GPUs.
    nodes = pyslurm.Nodes.load()
    resources = pyslurm.node().get()
    return {
        "nodes": [_node(node, resources.get(node.name, {})) for node in nodes.values()],
        "partitions": [_partition(partition) for partition in pyslurm.Partitions.load().values()],
    }


def _node(node: Any, resources: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": node.name,
        "address": node.address,
        "state": node.state,
        "allocated": bool(node.allocated_tres),
        "cpus": node.effective_cpus or node.total_cpus,
        "cpus_used": node.allocated_cpus,
        "memory_mb": node.real_memory or 0,
        "memory_used_mb": node.allocated_memory,
        "gres": resources.get("gres"),
        "gres_used": resources.get("gres_used"),
        "reason": node.reason,
        "features": node.available_features,
        "partitions": node.partitions,
    }


def _partition(partition: Any) -> dict[str, Any]:
    return {
        "name": partition.name,
        "state": partition.state,
        "default": partition.is_default,
        "hidden": partition.is_hidden,
        "max_time": partition.max_time,
        "groups": partition.allowed_groups,
        "accounts": partition.allowed_accounts,
        "refused_accounts": partition.denied_accounts,
        "qos": partition.allowed_qos,
        "refused_qos": partition.denied_qos,
        "preempt_mode": partition.preempt_mode,
    }


def reservations(pyslurm: Any) -> list[dict[str, Any]]:
    """Reservations that have not ended."""
    found = pyslurm.reservation().get()
    return [
        {"name": name} | {field: row[field] for field in RESERVATION_FIELDS} for name, row in found.items()
    ]


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


QUESTIONS: dict[str, Callable[..., Any]] = {
    "pulse": pulse,
    "changes": changes,
    "cluster": cluster,
    "reservations": reservations,
}
# What the questions need of the library.
NAMES = ("job", "node", "reservation", "Jobs", "Nodes", "Partitions", "RPCError")


def probe() -> None:
    """Say which Slurm the library is made for and linked with, and what we need and it has not."""
    import pyslurm  # pyright: ignore[reportMissingImports]

    missing = [name for name in NAMES if not hasattr(pyslurm, name)]
    linked = ".".join(map(str, pyslurm.slurm_api_version()[:2]))
    print(json.dumps({"version": pyslurm.__version__, "linked": linked, "missing": missing}))


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until nobody asks any more."""
    import pyslurm  # pyright: ignore[reportMissingImports]

    for line in questions:
        question = json.loads(line)
        _send(answers, answer(pyslurm, question["ask"], question.get("about", {})))


def answer(pyslurm: Any, ask: str, about: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question."""
    try:
        return {"answer": QUESTIONS[ask](pyslurm, **about)}
    except pyslurm.RPCError as error:
        return {"refused": str(error)}
    except ValueError as error:
        # The older interface's way to say that Slurm refused: its words, and its number.
        if type(error) is ValueError and len(error.args) == 2 and isinstance(error.args[1], int):
            return {"refused": str(error.args[0])}
        return {"failed": f"{type(error).__name__}: {error}"}
    except Exception as error:  # whatever it is, it is the broker's to decide what follows
        return {"failed": f"{type(error).__name__}: {error}"}


def _send(answers: BinaryIO, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    answers.write(len(text).to_bytes(8) + text)
    answers.flush()


def main(arguments: Iterable[str]) -> None:
    """The program."""
    if "--probe" in arguments:
        probe()
        return
    # The library may print: not into the answers.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
