"""The accounting's jobs, as slurmrestd reports them, as our models. Pure functions.

A job is turned into the fields that sacct writes, so that one place says what they mean
(`carme.slurm.parsing`).
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from carme.jobs import Job
from carme.slurm import parsing
from carme.slurm.gateway import Outcome
from carme.slurm.rest.records import Record, number, state_of
from carme.slurm.rest.server import Query

#: As sacct asks: of a job that was started again, the last time. A flag is needed, or Slurm takes its own.
_AS_SACCT = {"disable_truncate_usage_time": "true"}


def between(user: str | None, since: datetime, until: datetime | None) -> Query:
    """The query for the jobs of a user, or of all, that were there between two moments."""
    times = {"start_time": since, "end_time": until or datetime.now(UTC)}
    # v0.0.41 takes a number of seconds for a date, without what stands before it here.
    query = {key: f"uts{int(time.timestamp())}" for key, time in times.items()}
    return {**query, **({"users": user} if user else {}), **_AS_SACCT, "skip_steps": "true"}


def of_jobs(ids: Iterable[int], *, with_steps: bool = False) -> Query:
    """The query for these jobs, or the tasks of these arrays.

    One parameter for each: slurmrestd 24.11 takes no list in one.
    """
    steps = {} if with_steps else {"skip_steps": "true"}
    return {"step": [str(number) for number in ids], **_AS_SACCT, **steps}


def jobs(rows: Iterable[Record]) -> list[Job]:
    """The answer to `jobs/` of the accounting."""
    return parsing.accounted(_fields(row) for row in rows)


def outcomes(rows: Iterable[Record], failed: set[int]) -> dict[int, Outcome]:
    """How jobs ended.

    Args:
        failed: Those of them whose failed node is reported.
    """
    rows = list(rows)
    found = parsing.outcomes_of(record for row in rows for record in _ends(row))
    for row in rows:
        if row["job_id"] in failed and row["failed_node"]:
            found[row["job_id"]] = found[row["job_id"]]._replace(failed_node=row["failed_node"])
    return found


def admin_comments(rows: Iterable[Record], ids: Iterable[int]) -> dict[int, str]:
    """What administrators noted about these of the jobs."""
    wanted = set(ids)
    return {row["job_id"]: row["comment"]["administrator"] for row in rows if row["job_id"] in wanted}


def _ends(row: Record) -> Iterator[tuple[str, str, str, str]]:
    """A job's record with OUTCOME_FIELDS, and those of its steps."""
    yield str(row["job_id"]), row["user"], _state(row), ""
    for step in row["steps"]:
        used = step["tres"]["requested"]["max"]  # by its name; what is in it was used
        peak = max((number(item["count"]) or 0 for item in used if item["type"] == "mem"), default=0)
        name = step["step"]["name"] if step["step"]["name"] in ("batch", "extern") else "0"
        yield f"{row['job_id']}.{name}", "", "", str(peak)


def _fields(row: Record) -> dict[str, str]:
    """A job as sacct writes it, with ACCOUNTING_FIELDS."""
    code, time = row["exit_code"], row["time"]
    allocated, requested = (_tres(row["tres"][kind]) for kind in ("allocated", "requested"))
    return {
        "JobIDRaw": str(row["job_id"]),
        "User": row["user"],
        "Account": row["account"],
        "Partition": row["partition"],
        "State": _state(row),
        "ExitCode": f"{number(code['return_code']) or 0}:{number(code['signal']['id']) or 0}",
        "NNodes": str(_nodes(row)),
        "NodeList": row["nodes"],
        "ReqTRES": requested,
        "AllocTRES": allocated,
        "TimelimitRaw": str(number(time["limit"]) if number(time["limit"]) is not None else "UNLIMITED"),
        "Submit": _moment(time["submission"]),
        "Start": _moment(time["start"]),
        "End": _moment(time["end"]),
        "Reason": row["state"]["reason"],
        "Reservation": row["reservation"]["name"],
        "QOS": row["qos"],
        "UID": row["user"],
        "JobID": _in_array(row),
        "JobName": row["name"],
        "Comment": row["comment"]["job"],
    }


def _state(row: Record) -> str:
    state = state_of(row["state"]["current"])
    killer = row["kill_request_user"]
    return f"CANCELLED by {killer}" if state == "CANCELLED" and killer else state


def _tres(items: Iterable[Mapping[str, Any]]) -> str:
    """As in `cpu=2,mem=500M,gres/gpu:a100=1`."""
    return ",".join(
        f"{item['type']}{'/' if item['name'] else ''}{item['name']}={item['count']}"
        f"{'M' if item['type'] == 'mem' else ''}"
        for item in items
    )


def _nodes(row: Record) -> int:
    for kind in ("allocated", "requested"):
        for item in row["tres"][kind]:
            if item["type"] == "node":
                return int(item["count"])
    return int(row["allocation_nodes"])


def _in_array(row: Record) -> str:
    array = row["array"]
    if not array["job_id"]:
        return str(row["job_id"])
    task = number(array["task_id"])
    return f"{array['job_id']}_{array['task'] if task is None else task}"


def _moment(value: Any) -> str:
    return str(number(value) or 0)
