"""The ends of failed sessions' logs, as the broker reads them while homes may hang."""

import asyncio
from typing import Any

import pytest

from carme.jobs import Job
from patience import HANG

from .session_records import JOB, STARTED


async def test_a_home_that_hangs_delays_the_log_of_no_other_session(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = asyncio.Event()

    async def log_tail(_files: object, job: Job) -> str:
        if job.user == "ada":  # her home does not answer
            hanging.set()
            await asyncio.Event().wait()
        return "ModuleNotFoundError: no jupyterhub\n"

    monkeypatch.setattr("carme.broker.files.JobFiles.log_tail", log_tail)
    failed = {"T": "FAILED", "exit": 1 << 8, "N": "n1", "S": STARTED}
    site.slurm.jobs = [JOB | failed]
    async with asyncio.timeout(HANG):
        await hanging.wait()
    site.slurm.jobs = [JOB | failed, JOB | failed | {"A": 8, "u": "bob", "j": "session-s2"}]
    site.act("hub", trusted=True)
    async with asyncio.timeout(HANG):
        batch = await site.client.events()
        while not any("ModuleNotFoundError" in session.sentence for session in batch.sessions):
            batch = await site.client.events(batch.cursor, wait=30)
    assert (await site.client.session("s1", user="ada")).log_pending
