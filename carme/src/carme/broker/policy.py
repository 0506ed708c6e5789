"""Warns owners of jobs about which alerts fire, and, where the site wants it, stops what goes on.

Prometheus evaluates the rules; `[monitoring.policy]` says which of them count, for whom, and what follows. A
job is warned at once, then after each `every_minutes` in which an alert has gone on; one interval after its
last warning it is stopped, if one of its alerts is among `stop`. Without `stop` the record alone says what
would have been. The portal asks for the warnings and notifies the owners, as they chose. Where
Prometheus does not answer, nothing is counted; what was counted survives a restart of the broker.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from carme.broker.audit import AuditLog
from carme.broker.background import Rounds
from carme.broker.peers import Peer
from carme.broker.watch import Watch
from carme.config import Settings
from carme.config.settings import PolicySettings
from carme.errors import CarmeError
from carme.jobs import Job
from carme.reports import Advice, JobWarning
from carme.reports.prometheus import Prometheus
from carme.slurm import UnixAccount

__all__ = ["Alert", "Policy", "WarnedJob", "firing"]

_log = logging.getLogger("carme.broker")

POLL_SECONDS = 60.0
MOST_STOPS = 20  # in one look: a rule that went wrong must not end everything at once
FILE = "warnings.json"
STOPS_PUBLISHED = timedelta(days=1)  # a portal that was away learns of a stop all the same


class Alert(BaseModel, frozen=True):
    """An alert about a job that fires; `summary` and `advice` are the rule's own sentences."""

    name: str
    job_id: int
    user: str
    summary: str = ""
    advice: str = ""


class WarnedJob(BaseModel):
    """A job that was warned.

    Attributes:
        user, started: Whose job it is and since when: Slurm uses numbers again.
        count: How often, the last time at `last`; `quiet`: since when no alert has been there.
        suspended: It was suspended when it was last checked.
        stopped: It was stopped, or would have been; `ended`: when it really was.
    """

    user: str
    started: datetime
    count: int
    last: datetime
    quiet: datetime | None = None
    suspended: bool = False
    alerts: list[Alert]
    stopped: bool = False
    ended: datetime | None = None


_STORED = TypeAdapter(dict[int, WarnedJob])


def firing(answer: Any, names: Iterable[str]) -> dict[int, list[Alert]]:
    """Alerts of these names about users' jobs, by job, from Prometheus' `/api/v1/alerts`."""
    found: dict[int, list[Alert]] = {}
    wanted = set(names)
    for alert in answer["data"]["alerts"]:
        labels, message = alert["labels"], alert.get("annotations", {})
        job, name = str(labels.get("jobid", "")), labels.get("alertname", "")
        if alert.get("state") != "firing" or name not in wanted or not (job.isascii() and job.isdecimal()):
            continue
        about = found.setdefault(int(job), [])
        if name not in {each.name for each in about}:  # one for each of its GPUs says the same
            about.append(
                Alert(
                    name=name,
                    job_id=int(job),
                    user=labels.get("user", ""),
                    summary=message.get("summary", ""),
                    advice=message.get("advice", ""),
                )
            )
    return found


class Policy:
    """Looks every minute.

    Args:
        settings: Says whether there is a policy, and which.
        watch: Knows the jobs.
        audit: Where every warning and stop goes.
        stop: Stops a job. Raises CarmeError.
    """

    def __init__(
        self, settings: Settings, watch: Watch, audit: AuditLog, stop: Callable[[Job], Awaitable[None]]
    ) -> None:
        place = settings.monitoring
        self._policy = place.policy
        self._prometheus = Prometheus(place.prometheus, place.certificates) if place.prometheus else None
        self._watch, self._audit, self._stop = watch, audit, stop
        self._file = settings.broker.state_directory / FILE
        self._warned: dict[int, WarnedJob] = {}
        self._troubled = False

    async def run(self) -> None:
        """Look until cancelled."""
        if self._prometheus is None or not self._policy.alerts:
            return
        self.remember()
        rounds = Rounds("The policy about jobs")
        while True:
            await rounds.attempt(self._poll(self._prometheus))
            await asyncio.sleep(POLL_SECONDS)

    async def _poll(self, prometheus: Prometheus) -> None:
        try:
            answer = await asyncio.to_thread(prometheus.ask, "/api/v1/alerts", ())
            await self.evaluate(firing(answer, self._policy.alerts), datetime.now(UTC))
            self._troubled = False
        except (CarmeError, OSError, KeyError, TypeError, ValidationError) as error:
            if not self._troubled:
                _log.warning("The policy about jobs cannot be followed: %s", error)
            self._troubled = True

    def remember(self) -> None:
        """Take up what was counted before a restart."""
        self._warned = _read(self._file)

    def notices(self, job: Job) -> list[Advice]:
        """What the job's owner is to know."""
        known = self._warned.get(job.id)
        if known is None or not _matches(known, job) or job.is_over:
            return []
        return [
            Advice(
                topic="policy", text=f"{alert.summary} {self._follows(known)}".strip(), change=alert.advice
            )
            for alert in known.alerts
        ]

    def warnings(self) -> list[JobWarning]:
        """The last warning of each job that has one, and for a day what was stopped."""
        return [
            JobWarning(
                job_id=job_id,
                user=known.user,
                started=known.started,
                count=known.count,
                most=self._policy.warnings,
                what=[
                    Advice(topic=alert.name, text=alert.summary, change=alert.advice)
                    for alert in known.alerts
                ],
                ends=self._end_of(known),
                stopped=known.ended,
            )
            for job_id, known in sorted(self._warned.items())
        ]

    def _end_of(self, known: WarnedJob) -> datetime | None:
        """When it is stopped unless that changes."""
        policy = self._policy
        if known.stopped or known.suspended or not _stops(policy, known.alerts):
            return None
        return known.last + (policy.warnings - known.count + 1) * timedelta(minutes=policy.every_minutes)

    def _follows(self, known: WarnedJob) -> str:
        text = f"This is warning {known.count} of {self._policy.warnings}"
        end = self._end_of(known)
        if end is None:
            return f"{text}."
        return f"{text}: unless that changes, the job is stopped at {end:%Y-%m-%d %H:%M} UTC."

    async def evaluate(self, alerts: Mapping[int, list[Alert]], now: datetime) -> None:
        """Warn and stop by what fires now."""
        every = timedelta(minutes=self._policy.every_minutes)
        before = _STORED.dump_json(self._warned)
        jobs = {job.id: job for job in self._watch.jobs() if job.is_running}
        for job_id, known in list(self._warned.items()):
            if known.ended is not None and now - known.ended < STOPS_PUBLISHED:
                continue
            job = jobs.get(job_id)
            is_over = job is None or not _matches(known, job)
            if job is not None and not is_over and job.is_suspended:
                # It cannot use its GPUs. The time until the next warning begins anew when it goes on.
                known.suspended, known.quiet = True, None
                continue
            if known.suspended:
                known.suspended, known.last = False, now
            known.quiet = None if job_id in alerts else known.quiet or now
            # After an interval of quiet all is forgotten.
            if is_over or (known.quiet and now - known.quiet >= every):
                del self._warned[job_id]
        stops = 0
        for job_id, about in sorted(alerts.items()):
            job = jobs.get(job_id)
            relevant = [alert for alert in about if job and alert.user == job.user]
            if job is None or job.started is None or job.is_suspended:
                continue
            if not relevant or _is_exempt(job, self._policy):
                continue
            known = self._warned.get(job_id)
            if known is None or not _matches(known, job):
                known = self._warned[job_id] = WarnedJob(
                    user=job.user, started=job.started, count=0, last=now - every, alerts=relevant
                )
            if _stops(self._policy, relevant) and not _stops(self._policy, known.alerts):
                known.count = 0  # of what can end the job nobody has been warned
            known.alerts = relevant
            if known.stopped or now - known.last < every:
                continue
            if known.count < self._policy.warnings:
                known.count, known.last = known.count + 1, now
                self._record("warn", job, "ok", known)
            elif stops < MOST_STOPS and (_stops(self._policy, relevant) or not self._policy.stop):
                stops += 1
                await self._end(job, known, now)
        if _STORED.dump_json(self._warned) != before:
            await asyncio.to_thread(_write, self._file, self._warned)

    async def _end(self, job: Job, known: WarnedJob, now: datetime) -> None:
        if not self._policy.stop:
            known.stopped = True
            self._record("stop", job, "dry_run", known)
            return
        try:
            await self._stop(job)
        except CarmeError as error:
            self._record("stop", job, error.code, known)  # tried again at the next poll
            return
        known.stopped, known.ended = True, now
        self._record("stop", job, "ok", known)

    def _record(self, action: str, job: Job, result: str, known: WarnedJob) -> None:
        names = sorted(alert.name for alert in known.alerts)
        about = {"job_id": job.id, "alerts": names, "warnings": known.count}
        self._audit.record(broker_peer(), f"policy_{action}", job.user, result, **about)


def broker_peer() -> Peer:
    """The broker, as the one who acts."""
    return Peer(os.getpid(), UnixAccount.numbered(os.geteuid()), trusted=True)


def _matches(known: WarnedJob, job: Job) -> bool:
    return known.user == job.user and known.started == job.started


def _stops(policy: PolicySettings, alerts: Iterable[Alert]) -> bool:
    """Whether one of the alerts ends a job after its warnings."""
    return not {alert.name for alert in alerts}.isdisjoint(policy.stops_by)


def _is_exempt(job: Job, policy: PolicySettings) -> bool:
    return (
        job.user in policy.exempt_users
        or job.account in policy.exempt_accounts
        or job.partition in policy.exempt_partitions
    )


def _read(file: Path) -> dict[int, WarnedJob]:
    try:
        return _STORED.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        _log.warning("The warnings in %s cannot be read, so counting begins anew: %s", file, error)
        return {}


def _write(file: Path, warned: dict[int, WarnedJob]) -> None:
    draft = file.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        json.dump(_STORED.dump_python(warned, mode="json"), opened)
    draft.replace(file)
