"""An order as slurmrestd takes it. Pure functions."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from carme.bookings.models import ReservationSpec, Window
from carme.slurm.account import UnixAccount
from carme.slurm.folder import log_name
from carme.slurm.gateway import Order, ReservationChanges
from carme.slurm.label import Label


def description(order: Order, owner: UnixAccount, folder: Path, script: str) -> dict[str, Any]:
    """The body of `job/submit`: what `sbatch` would be given as options, and its script.

    Args:
        order: What is submitted.
        owner: As whom it runs; their clean environment is what the job begins with.
        folder: Where the job runs and writes.
        script: Its script.
    """
    request = order.request
    # %j and the like are replaced in the names of output files; %a is the number of a task.
    log = f"{str(folder).replace('%', '%%')}/{log_name('%a' if request.array else None)}"
    job: dict[str, Any] = {
        "script": script,
        "requeue": False,  # a second start could make a second server
        "environment": [f"{name}={value}" for name, value in owner.environment().items()],
        "name": request.name,
        "comment": str(Label(request.kind, request.image, order.key)),
        "partition": order.partition,
        "minimum_nodes": request.nodes,
        "maximum_nodes": request.nodes,
        "tasks": request.nodes,
        "tasks_per_node": 1,
        "cpus_per_task": order.share.cpus,
        "memory_per_node": _number(order.share.memory_mb),
        "time_limit": _number(request.minutes),
        "standard_output": log,
        "standard_error": log,
        "open_mode": ["APPEND"],
        "current_working_directory": str(folder),
    }
    if request.image and request.nodes > 1:
        # As for sbatch: when a node fails the job knows how to go on.
        job["kill_on_node_fail"] = False
    optional = {
        "array": request.array,
        "account": order.account,
        "qos": request.qos,
        "reservation": request.reservation,
        "dependency": f"afterany:{order.after}" if order.after is not None else None,
        "required_nodes": list(order.node_names),
        "prefer": order.prefer,
        "constraints": order.constraint,
        "shared": ["none"] if order.constraint else None,
    }
    if request.gpus_per_node:
        names = ["gres/gpu", request.gpu_type, str(request.gpus_per_node)]
        optional["tres_per_node"] = ":".join(filter(None, names))
    return {"job": job | {name: value for name, value in optional.items() if value}}


def reservation(spec: ReservationSpec) -> dict[str, Any]:
    """The body that makes a reservation; from now where its start has passed."""
    # Slurm would want both of a job, were both named.
    holders = {"accounts": list(spec.accounts)} if spec.accounts else {"users": list(spec.users)}
    return {
        **_period(spec.name, max(spec.start, datetime.now(UTC)), spec.end),
        "partition": spec.partition,
        "node_list": list(spec.node_names),
        **holders,
        # Jobs that still wait for it at its end wait like all others then; else Slurm would hold them.
        "flags": ["NO_HOLD_JOBS_AFTER_END"],
    }


def maintenance(window: Window) -> dict[str, Any]:
    """The body that makes a reservation of nodes for the operators, over whatever there is."""
    return {
        **_period(window.name, max(window.start, datetime.now(UTC)), window.end),
        "node_list": list(window.node_names),
        "users": ["root"],
        "flags": ["MAINT", "IGNORE_JOBS"],
    }


def changed_reservation(name: str, **changes: Unpack[ReservationChanges]) -> dict[str, Any]:
    """The body that changes what is given of a reservation."""
    lists = {"node_list": list(changes.get("node_names", ())), "users": list(changes.get("users", ()))}
    period = _period(name, changes.get("start"), changes.get("end"))
    return {**period, **{key: names for key, names in lists.items() if names}}


def _period(name: str, start: datetime | None, end: datetime | None) -> dict[str, Any]:
    times = {"start_time": start, "end_time": end}
    return {"name": name, **{key: _number(int(time.timestamp())) for key, time in times.items() if time}}


def _number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}
