"""Reconcile an account of Slurm with what its project is granted: what to change. Pure functions.

The grant is the desired state, the account the actual one. Each call compares both anew, so it does not
matter which service was away, nor for how long.
"""

from dataclasses import dataclass
from typing import Literal

from carme.projects.models import Grant, ProjectAccount

__all__ = ["Change", "changes"]

GPUS = "gres/gpu"


@dataclass(frozen=True)
class Change:
    """One thing to do.

    Attributes:
        kind: `create` the account, `limit` it, `add`, `remove` or `resume` a member.
        user: The member.
        partition: Where the member is added or removed; empty: everywhere.
        values: The limits as Slurm reads them; -1 takes one away.
    """

    kind: Literal["create", "limit", "add", "remove", "resume"]
    user: str = ""
    partition: str = ""
    values: tuple[tuple[str, str], ...] = ()


def changes(grant: Grant, there: ProjectAccount | None) -> list[Change]:
    """What makes `there` (None: there is no such account) what is granted; nothing when they are equal.

    Limits come before members, so that nobody runs without them, and leaving members before new ones.
    """
    found = [Change("create")] if there is None else []
    there = there or ProjectAccount(account=grant.account)
    if values := _limits(grant, there):
        found.append(Change("limit", values=tuple(values.items())))
    wanted = {(user, part) for user in grant.members for part in grant.partitions or [""]}
    known = {(user, part) for user, parts in there.members.items() for part in parts}
    found += [Change("remove", *each) for each in sorted(known - wanted)]
    found += [Change("add", *each) for each in sorted(wanted - known)]
    found += [Change("resume", user) for user in sorted(set(there.stopped) & set(grant.members))]
    return found


def _limits(grant: Grant, there: ProjectAccount) -> dict[str, str]:
    """The limits that differ."""
    wanted: dict[str, int | None] = {GPUS: grant.gpus, "node": grant.nodes}
    wanted |= {f"{GPUS}:{kind}": count for kind, count in grant.gpu_types.items()}
    wanted = dict.fromkeys(there.resources) | wanted
    resources = [
        f"{name}={-1 if count is None else count}"
        for name, count in sorted(wanted.items())
        if there.resources.get(name) != count
    ]
    values: dict[str, str] = {}
    if resources:
        values["GrpTRES"] = ",".join(resources)
    if grant.jobs != there.jobs:
        values["GrpJobs"] = str(-1 if grant.jobs is None else grant.jobs)
    if grant.minutes != there.minutes:
        values["MaxWall"] = str(-1 if grant.minutes is None else grant.minutes)
    minutes = None if grant.gpu_hours is None else grant.gpu_hours * 60
    if minutes != there.gpu_minutes:
        values["GrpTRESMins"] = f"{GPUS}={-1 if minutes is None else minutes}"
    return values
