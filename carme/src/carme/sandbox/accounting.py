"""The sandbox's accounting: jobs that are over, and accounts of projects, kept in one folder."""

import asyncio
import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from carme.errors import SlurmError
from carme.jobs import Job, Licence
from carme.jobs.access import Association
from carme.jobs.limits import Limits
from carme.projects.models import ProjectAccount, Use
from carme.slurm.account import UnixAccount
from carme.slurm.gateway import Outcome
from carme.slurm.refusals import refusal

__all__ = ["DEFAULT_ACCOUNT", "Accounting", "Ledger"]

#: The account of anyone who has no other one.
DEFAULT_ACCOUNT = "users"
_GPUS = "gres/gpu"


class Ledger:
    """What is over, as a file with one job a line.

    Args:
        folder: Where it lies; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._jobs_file, self._accounts_file = folder / "accounting.jsonl", folder / "accounts.json"
        lines = self._jobs_file.read_text().splitlines() if self._jobs_file.exists() else []
        found = [Job.model_validate_json(line) for line in lines]
        self.jobs = {job.id: job for job in found}
        self.accounts: dict[str, dict[str, Any]] = {}
        if self._accounts_file.exists():
            self.accounts = json.loads(self._accounts_file.read_text())

    def add(self, jobs: Iterable[Job]) -> None:
        """Remember jobs that are over."""
        jobs = list(jobs)
        self.jobs |= {job.id: job for job in jobs}
        with self._jobs_file.open("a") as file:
            file.writelines(f"{job.model_dump_json()}\n" for job in jobs)

    def save_accounts(self) -> None:
        """Write the accounts down."""
        self._accounts_file.write_text(json.dumps(self.accounts))


class Accounting:
    """The part of the gateway's interface that asks and changes Slurm's database."""

    def __init__(self, folder: Path) -> None:
        self._ledger = Ledger(folder)
        self._comments: dict[int, str] = {}

    def _active(self) -> list[Job]:
        """Jobs that are not over."""
        raise NotImplementedError

    async def outcomes(self, jobs: Iterable[Job]) -> dict[int, Outcome]:
        known = {job.id: self._ledger.jobs[job.id] for job in jobs if job.id in self._ledger.jobs}
        return {job_id: Outcome(cancelled_by=job.cancelled_by) for job_id, job in known.items()}

    async def history(
        self, user: str | None, since: datetime, limit: int, until: datetime | None = None
    ) -> list[Job]:
        found = [
            job
            for job in (*self._ledger.jobs.values(), *self._active())
            if (user is None or job.user == user)
            and (job.ended is None or job.ended >= since)
            and (until is None or job.submitted is None or job.submitted <= until)
        ]
        found.sort(key=lambda job: (job.submitted or since, job.id), reverse=True)
        return found[:limit]

    async def accounted(self, job_id: int, task: int | None = None) -> Job | None:
        jobs = [*self._active(), *self._ledger.jobs.values()]
        if task is None:
            return next((job for job in jobs if job.id == job_id), None)
        found = [job for job in jobs if job.has_task(job_id, task)]
        return next((job for job in found if job.task == task), found[0] if found else None)

    async def accounted_jobs(self, ids: Iterable[int]) -> dict[int, Job]:
        known = {**self._ledger.jobs, **{job.id: job for job in self._active()}}
        return {job_id: known[job_id] for job_id in ids if job_id in known}

    async def admin_comments(self, ids: Iterable[int]) -> dict[int, str]:
        return {job_id: self._comments[job_id] for job_id in ids if job_id in self._comments}

    async def set_admin_comment(self, job_id: int, text: str) -> None:
        self._comments[job_id] = text

    async def close_lost(self) -> None:
        """Nothing: the sandbox loses no jobs."""

    async def visible_partitions(self, account: UnixAccount) -> set[str]:
        raise NotImplementedError

    async def licences(self) -> list[Licence]:
        return []

    async def limits(self, users: Iterable[str]) -> list[Limits]:
        return []

    async def enforcement(self) -> list[str]:
        return ["associations"]

    async def has_association(self, user: str) -> bool:
        return any(await self.associations(user))

    async def associations(self, user: str) -> list[Association]:
        projects = [
            Association(account=name, partition=partition, stopped=user in account["stopped"])
            for name, account in sorted(self._ledger.accounts.items())
            for partition in account["members"].get(user, [])
        ]
        return [Association(account=DEFAULT_ACCOUNT, default=True), *projects]

    async def project_accounts(self) -> dict[str, ProjectAccount]:
        return {name: self._project(name) for name in self._ledger.accounts}

    def _project(self, name: str) -> ProjectAccount:
        account = self._ledger.accounts[name]
        running = [job for job in self._active() if job.account == name and not job.is_pending]
        ended = [job for job in self._ledger.jobs.values() if job.account == name]
        seconds = sum(
            job.gpus * (job.ended - job.started).total_seconds() for job in ended if job.started and job.ended
        )
        use = Use(
            gpus=sum(job.gpus for job in running),
            nodes=sum(job.nodes for job in running),
            jobs=len(running),
            gpu_hours=seconds / 3600,
        )
        return ProjectAccount(account=name, use=use, **account)

    async def account_exists(self, account: str) -> bool:
        return account == DEFAULT_ACCOUNT or account in self._ledger.accounts

    async def make_account(self, account: str) -> None:
        self._ledger.accounts.setdefault(account, {"members": {}, "stopped": [], "resources": {}})
        await self._save()

    async def limit_account(self, account: str, values: dict[str, str]) -> None:
        known = self._account(account)
        for pair in filter(None, values.get("GrpTRES", "").split(",")):
            name, _, most = pair.partition("=")
            known["resources"].pop(name, None)
            if int(most) >= 0:
                known["resources"][name] = int(most)
        fields = {"GrpJobs": "jobs", "MaxWall": "minutes"}
        found = {fields[name]: text for name, text in values.items() if name in fields}
        if minutes := values.get("GrpTRESMins"):
            found["gpu_minutes"] = minutes.partition("=")[2]
        known.update({name: None if int(text) < 0 else int(text) for name, text in found.items()})
        await self._save()

    async def add_member(self, account: str, user: str, partition: str = "") -> None:
        if account == DEFAULT_ACCOUNT:
            return  # everybody is in it
        parts = self._account(account)["members"].setdefault(user, [])
        if partition not in parts:
            parts.append(partition)
        await self._save()

    async def stop_member(self, account: str, user: str, *, stopped: bool) -> None:
        known = self._account(account)
        known["stopped"] = sorted({*known["stopped"], user} if stopped else {*known["stopped"]} - {user})
        await self._save()

    async def remove_member(self, account: str, user: str, partition: str = "") -> None:
        known = self._account(account)
        if any(job.account == account and job.user == user for job in self._active()):
            raise refusal("sacctmgr", "Job(s) active, cancel job(s) before remove")
        parts = known["members"].get(user, [])
        if partition in parts:
            parts.remove(partition)
        if not parts:
            known["members"].pop(user, None)
            known["stopped"] = sorted({*known["stopped"]} - {user})
        await self._save()

    async def coordinated_accounts(self, user: str) -> list[str]:
        return []

    def _limit_reason(self, job: Job) -> str:
        """Slurm's reason why a limit of its account keeps a job from starting; empty: none does."""
        if job.account not in self._ledger.accounts:
            return ""
        project = self._project(job.account)
        if project.jobs is not None and project.use.jobs >= project.jobs:
            return "AssocGrpJobsLimit"
        if project.use.gpus + job.gpus > project.resources.get(_GPUS, job.gpus + project.use.gpus):
            return "AssocGrpGRES"
        if project.use.nodes + job.nodes > project.resources.get("node", job.nodes + project.use.nodes):
            return "AssocGrpNodeLimit"
        return ""

    def _account(self, account: str) -> dict[str, Any]:
        if account not in self._ledger.accounts:
            raise SlurmError(f"There is no account {account!r}.", "Create the project first.")
        return self._ledger.accounts[account]

    async def _save(self) -> None:
        await asyncio.to_thread(self._ledger.save_accounts)
