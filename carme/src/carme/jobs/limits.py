"""Limits that Slurm's accounting sets on accounts, their users and qualities of service."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from carme.jobs.status import Job
from carme.jobs.times import minutes_text
from carme.translation import message as _
from carme.wording import number

__all__ = ["Limits", "limit_detail", "limits_of", "longest_minutes"]

_UNITS = {"gres/gpu": "GPU", "cpu": "processor", "node": "node"}
_KINDS = {"GRES": "gres/", "Cpu": "cpu", "CPU": "cpu", "Mem": "mem", "Node": "node"}


@dataclass(frozen=True)
class Limits:
    """The limits of one holder: a user in an account, an account (`user` is empty), or a quality of service.

    Attributes:
        parent: The account that this one belongs to, whose limits hold as well.
        resources: What all of its jobs together may use, and use now, by Slurm's name.
        each: What one job may use.
        jobs: How many jobs may run at a time, and run now.
        minutes: How long one job may run.
    """

    account: str = ""
    user: str = ""
    parent: str = ""
    qos: str = ""
    resources: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    each: dict[str, int] = field(default_factory=dict[str, int])
    jobs: tuple[int, int] | None = None
    minutes: int | None = None

    @property
    def holder(self) -> str:
        return self.user or (
            _("account {account}", account=self.account)
            if self.account
            else _("quality of service {qos}", qos=self.qos)
        )


def limit_detail(job: Job, limits: Iterable[Limits]) -> str:
    """The value of the limit that holds a job back, whose it is, and its use; empty when it is not known."""
    match = re.fullmatch(r"(Assoc|QOS)(Grp|Max)(.*)", job.reason)
    if match is None:
        return ""
    holder, scope, rest = match.groups()
    if "Minutes" in rest:
        return ""
    kind = next((name for word, name in _KINDS.items() if rest.startswith(word)), None)
    for each in _chain(job, holder, list(limits)):
        if rest.startswith("WallDuration") and each.minutes is not None:
            return _(
                "{holder}: at most {most} for one job", holder=each.holder, most=minutes_text(each.minutes)
            )
        if rest.startswith("Jobs") and each.jobs:
            return _(
                "{holder}: at most {most} running at a time, {now} now",
                holder=each.holder,
                most=each.jobs[0],
                now=each.jobs[1],
            )
        for name, (most, used) in each.resources.items():
            if scope == "Grp" and kind and name.startswith(kind):
                return _(
                    "{holder}: at most {most} at a time, {used} in use",
                    holder=each.holder,
                    most=_amount(most, name),
                    used=used,
                )
        for name, most in each.each.items():
            if scope == "Max" and kind and name.startswith(kind):
                return _("{holder}: at most {most} for one job", holder=each.holder, most=_amount(most, name))
    return ""


def longest_minutes(job: Job, limits: Iterable[Limits]) -> tuple[int, str] | None:
    """How long the accounting lets a job run, and whose limit that is; a quality of service comes first."""
    limits = list(limits)
    for holder in ("QOS", "Assoc"):
        for each in _chain(job, holder, limits):
            if each.minutes is not None:
                return each.minutes, each.holder
    return None


def _chain(job: Job, holder: str, limits: list[Limits]) -> Iterable[Limits]:
    """Whose limits hold for a job: its quality of service, or its owner, account and the accounts above."""
    if holder == "QOS":
        return limits_of("", "", job.qos, limits)
    return limits_of(job.user, job.account, "", limits)


def limits_of(user: str, account: str, qos: str, limits: Iterable[Limits]) -> Iterable[Limits]:
    """The limits for a user's jobs in an account, the one that counts first: those of the quality of service,
    of the user, of the account, and of the accounts above it."""
    limits = list(limits)
    yield from (limit for limit in limits if limit.qos and limit.qos == qos)
    yield from (limit for limit in limits if limit.user and (limit.account, limit.user) == (account, user))
    accounts = {limit.account: limit for limit in limits if limit.account and not limit.user}
    found = accounts.pop(account, None)
    while found:
        yield found
        found = accounts.pop(found.parent, None)


def _amount(most: int, name: str) -> str:
    if name == "mem":
        return _("{most} MiB of memory", most=most)
    return number(most, _UNITS.get(name) or f"{name.removeprefix('gres/gpu:')} GPU")
