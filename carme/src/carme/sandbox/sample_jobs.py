"""Sample jobs of two years, so that a sandbox's pages have something to show."""

import json
import random
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from carme.jobs import Job, JobRequest, JobState
from carme.sandbox.accounting import DEFAULT_ACCOUNT, Ledger
from carme.sandbox.accounts import SandboxAccount
from carme.sandbox.gateway import first_job
from carme.slurm.folder import job_folder, log_name

__all__ = ["write_sample_jobs"]

_NAMES = ("train-resnet", "finetune", "preprocess", "evaluate", "sweep", "export-onnx")
_ENDS = (
    *[(JobState.COMPLETED, 0)] * 7,
    (JobState.FAILED, 1),
    (JobState.TIMEOUT, 0),
    (JobState.CANCELLED, 0),
)
#: So many of the newest have a folder, with a log and what they were submitted with.
_WITH_LOG = 12
#: How the age of jobs grows from each to the next older one, as a power of their number: the last month has
#: most jobs, and every month has some.
_GROWTH = 2.0


def write_sample_jobs(folder: Path, accounts: list[SandboxAccount], days: int = 730, count: int = 240) -> int:
    """Write jobs that are over into a ledger that has none, the same ones each time; how many.

    Args:
        folder: The ledger's, of `SandboxSlurm`.
        accounts: Whose jobs they are, in turns.
        days: Over how many days, until now; the further back, the fewer on each.
        count: How many in all.
    """
    ledger = Ledger(folder)
    if ledger.jobs:
        return 0
    jobs = list(_jobs(first_job(folder), accounts, days, count))
    owners = {account.name: account for account in accounts}
    for job in jobs[-_WITH_LOG:]:
        _write_folder(job, owners[job.user])
    ledger.add(jobs)
    return len(jobs)


def _jobs(first: int, accounts: list[SandboxAccount], days: int, count: int) -> Iterator[Job]:
    choice = random.Random(1)
    now = datetime.now(UTC).replace(microsecond=0)
    for number in range(count):
        ended = now - timedelta(minutes=20) - timedelta(days=days) * ((count - 1 - number) / count) ** _GROWTH
        minutes = choice.choice((5, 25, 90, 240))
        started = ended - timedelta(minutes=minutes)
        state, code = choice.choice(_ENDS)
        gpus = choice.choice((0, 1, 1, 2, 4))
        yield Job(
            id=first + number,
            key=secrets.token_hex(16),
            kind="batch",
            name=choice.choice(_NAMES),
            user=accounts[number % len(accounts)].name,
            account=DEFAULT_ACCOUNT,
            partition="gpu",
            state=state,
            nodes=1,
            node_list=choice.choice(("n1", "n2")),
            gpus=gpus,
            cpus=max(1, 2 * gpus),
            memory_mb=8192 * max(1, gpus),
            minutes_limit=minutes if state is JobState.TIMEOUT else minutes * 2,
            submitted=started - timedelta(minutes=choice.choice((0, 1, 12))),
            started=started,
            ended=ended,
            exit_code=code,
            cancelled_by="owner" if state is JobState.CANCELLED else None,
        )


def _write_folder(job: Job, owner: SandboxAccount) -> None:
    assert job.key is not None
    folder = job_folder(owner, job.key)
    folder.mkdir(parents=True)
    request = JobRequest(
        name=job.name,
        kind="batch",
        command=["sh", "-c", f"echo {job.name} begins; sleep 5; echo {job.name} ends"],
        gpus_per_node=job.gpus,
        minutes=job.minutes_limit or 1,
    )
    (folder / "request.json").write_text(request.model_dump_json())
    (folder / "facts.json").write_text(json.dumps({"image": "", "digest": ""}))
    lines = [f"epoch {epoch}: loss {2.3 / (1 + epoch):.4f}" for epoch in range(1, 11)]
    if job.state is JobState.FAILED:
        lines += ["Traceback (most recent call last):", "FileNotFoundError: data/train.csv"]
    (folder / log_name(None)).write_text("\n".join([f"{job.name} begins", *lines]) + "\n")
