"""The real broker on a real socket, over a Slurm with one node, this host, whose jobs are local processes.

Checks, records, sessions, notes, events and log tails are the real broker's, which polls this Slurm. A job
runs the command that a test has set, and is in the state that a test gives it. What can go wrong between hub
and broker is switched on here: answers that come late or not at all, a broker that is away or begins anew.
"""

import asyncio
import contextlib
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from carme.broker import protocol
from carme.broker import server as server_module
from carme.broker.peers import Peer
from carme.broker.server import Server
from carme.broker.service import Broker
from carme.config import Settings
from carme.errors import CarmeError, NotFound, SlurmError
from carme.jobs import Cluster, Job, JobState, Node, Partition, Reservation
from carme.jobs.access import Association
from carme.jobs.limits import Limits
from carme.sandbox.accounts import FIRST_UID, SandboxAccount
from carme.sessions import Ending, Session, SessionNote
from carme.slurm import Order, Slurm, UnixAccount
from carme.slurm.folder import job_folder, log_name, start_in_folder
from carme.slurm.gateway import ExitStatus, Outcome
from patience import HANG

__all__ = ["FAKE_SESSION", "LocalBroker", "broker_settings"]

FAKE_SESSION = [sys.executable, str(Path(__file__).with_name("fake_session.py"))]
HUB = Peer(os.getpid(), UnixAccount("carme-hub", 0, 0, "/"), trusted=True)
FIRST_JOB = 100


def broker_settings(folder: Path) -> dict[str, Any]:
    """The parts of a site's settings that its broker needs; makes the site's image `torch`."""
    images = folder / "images"
    images.mkdir()
    (images / "torch.sif").touch()
    manifest = {"name": "torch", "title": "PyTorch", "entry_points": {"lab": "JupyterLab"}}
    (images / "torch.json").write_text(json.dumps(manifest))
    return {
        "slurm": {"cluster": "test", "poll_seconds": 0.1},
        "broker": {
            "socket": str(folder / "broker.sock"),
            "audit_log": str(folder / "audit.jsonl"),
            "state_directory": str(folder / "broker"),
        },
        "images": {"directory": str(images)},
    }


class LocalSlurm:
    """The part of the gateway's interface that the broker needs for sessions.

    Args:
        home: Everybody's; jobs have their folders in it.

    Attributes:
        command: What the next jobs run; None: they wait.
        cancelled: The jobs that were cancelled, in order.
    """

    has_many_jobs = False

    def __init__(self, home: Path) -> None:
        self.home = home
        self.command: list[str] | None = FAKE_SESSION
        self.jobs: dict[int, Job] = {}
        self.requests: dict[int, protocol.Submit] = {}
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.cancelled: list[int] = []
        self.next = FIRST_JOB
        self._version = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what the broker asks

    async def pulse(self) -> str:
        return str(self._version)

    async def queue(self) -> list[Job]:
        return list(self.jobs.values())

    async def exit_statuses(self, ids: Any) -> dict[int, ExitStatus]:
        jobs = [self.jobs[job_id] for job_id in ids if job_id in self.jobs]
        return {job.id: ExitStatus(job.exit_code, 0) for job in jobs if job.exit_code is not None}

    async def outcomes(self, jobs: Any) -> dict[int, Outcome]:
        return {}

    async def accounted(self, job_id: int, task: int | None = None) -> Job | None:
        raise SlurmError("This Slurm has no accounting.", code="no-accounting")

    async def accounted_jobs(self, ids: Any) -> dict[int, Job]:
        raise SlurmError("This Slurm has no accounting.", code="no-accounting")

    async def cluster(self) -> Cluster:
        node = Node(name="localhost", cpus=64, memory_mb=64_000, gpus={"a100": 4})
        partition = Partition(name="gpu", default=True, node_names=["localhost"])
        return Cluster(taken=datetime.now(UTC), partitions=[partition], nodes=[node])

    async def associations(self, user: str) -> list[Association]:
        return []

    async def limits(self, users: Any) -> list[Limits]:
        return []

    async def reservations(self) -> list[Reservation]:
        return []

    async def set_limit(self, job: str, minutes: int) -> None:
        self.change(int(job), minutes_limit=minutes)

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        await start_in_folder(order, owner, sys.executable, ["true"], "")
        number, self.next = self.next, self.next + 1
        self.requests[number] = protocol.Submit(order.request, owner.name)
        self.jobs[number] = order.job(number, owner.name).model_copy(update={"reason": "Resources"})
        self._version += 1
        if self.command:
            await self.run(number, self.command)
        return number

    async def submit_again(self, job: Job, owner: UnixAccount, submission: int) -> int:
        number, self.next = self.next, self.next + 1
        self.requests[number] = self.requests.pop(job.id)
        self.jobs[number] = job.model_copy(update={"id": number})
        self._version += 1
        return number

    async def cancel(self, job: str, owner: UnixAccount) -> None:
        self.cancelled.append(int(job))
        self.finish(int(job), JobState.CANCELLED)

    async def close_lost(self) -> None:
        """Do nothing: this Slurm has no accounting."""

    # -- what a test does

    def change(self, job_id: int, **values: Any) -> None:
        """Change the values of a job."""
        self.jobs[job_id] = self.jobs[job_id].model_copy(update=values)
        self._version += 1

    def finish(self, job_id: int, state: JobState) -> None:
        """A job ends."""
        if self.jobs[job_id].is_active:
            self.change(job_id, state=state, ended=datetime.now(UTC))
        process = self.processes.get(job_id)
        if process and process.returncode is None:
            process.terminate()

    def lose(self, job_id: int, number: int) -> None:
        """Forget a job that waits; the next one gets this number."""
        del self.jobs[job_id]
        self.next = number
        self._version += 1

    def folder(self, job_id: int) -> Path:
        """The job's private folder."""
        job = self.jobs[job_id]
        assert job.key is not None
        return job_folder(account(job.user, self.home), job.key)

    async def run(self, job_id: int, command: list[str]) -> None:
        """Start a job's process on the only node, this host."""
        now = datetime.now(UTC)
        self.change(job_id, state=JobState.RUNNING, reason="", node_list="localhost", started=now)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(self.home),
            **self.requests[job_id].request.environment,
            "CARME_JOB_FOLDER": str(self.folder(job_id)),
        }
        with (self.folder(job_id) / log_name(None)).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=self.home, env=environment, stdout=log, stderr=asyncio.subprocess.STDOUT
            )
        self.processes[job_id] = process
        task = asyncio.create_task(self._wait(job_id, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait(self, job_id: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if job_id in self.jobs and self.jobs[job_id].is_active:
            state = JobState.FAILED if code else JobState.COMPLETED
            self.change(job_id, state=state, exit_code=code, ended=datetime.now(UTC))

    async def end_all(self) -> None:
        """Kill what runs."""
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


class LocalBroker:
    """The broker between `open` and `close`; its jobs live on while it is away, and so does what it knows.

    Attributes:
        notes: The notes that it got, each with the number of its job.
        meant: Jobs that were noted or cancelled, each with the session that was named.
        refuse: How a submission or more time is refused.
        refuse_once: How the next cancellation is refused.
        dies: "before" or "after" the next submission has reached Slurm the broker ends without an answer.
        blind: For so many questions about jobs it has not seen Slurm yet.
        answering: Cleared: it submits, and answers later.
        hearing: Cleared: it takes notes in later.
        unseen: Jobs that it does not list yet.
    """

    def __init__(self, settings: Settings) -> None:
        self.refuse: CarmeError | None = None
        self.refuse_once: CarmeError | None = None
        self.dies = ""
        self.blind = 0
        self.answering, self.hearing = asyncio.Event(), asyncio.Event()
        self.answering.set()
        self.hearing.set()
        self.unseen: set[int] = set()
        self._settings = settings
        self.socket = settings.broker.socket
        self.slurm = LocalSlurm(self.socket.parent)
        self.notes: list[tuple[int, SessionNote]] = []
        self.meant: list[tuple[int, str | None]] = []
        self.reported_before_cancel: Ending | None = None
        self._running: asyncio.Task[None] | None = None
        self._open = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Start; returns once it has seen Slurm."""
        async with contextlib.AsyncExitStack() as opened:
            named = patch.object(UnixAccount, "named", lambda name: account(name, self.socket.parent))
            opened.enter_context(named)
            opened.enter_context(patch.object(server_module, "identify", _identify))
            self._broker = Broker(self._settings, cast(Slurm, self.slurm))
            await self._broker.prepare()
            self._running = asyncio.create_task(self._broker.run())
            opened.push_async_callback(self._end_run)
            await self.refreshed()
            await opened.enter_async_context(Server(self._settings, cast(Broker, self)))
            self._open = opened.pop_all()

    async def close(self) -> None:
        """Close as a broker does that is being restarted; do nothing if it is closed."""
        await self._open.aclose()

    async def _end_run(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    async def answer(self, peer: Peer, line: bytes) -> Any:
        """Handle a request as the broker does, unless the test makes it fail."""
        request = protocol.request_adapter.validate_json(line)
        if self.refuse and isinstance(request, protocol.Submit | protocol.Extend):
            raise self.refuse
        if isinstance(request, protocol.Submit):
            return await self._submit(peer, line)
        if isinstance(request, protocol.GetJobs) and self.blind:
            self.blind -= 1
            raise SlurmError("The broker has just started.", code="slurm-away")
        if isinstance(request, protocol.Note):
            await self.hearing.wait()
        if isinstance(request, protocol.Note | protocol.Cancel):
            self.meant.append((request.job_id, request.session))
        if isinstance(request, protocol.Cancel):
            if (refused := self.refuse_once) is not None:
                self.refuse_once = None
                raise refused
            self.reported_before_cancel = self._entry(request.job_id).facts.ending
        found = await self._broker.answer(peer, line)
        if isinstance(request, protocol.Note):
            self.notes.append((request.job_id, request.note))
        if isinstance(request, protocol.GetJobs):
            return [job for job in found if job.id not in self.unseen]
        return found

    async def _submit(self, peer: Peer, line: bytes) -> Any:
        dies, self.dies = self.dies, ""
        if dies == "before":
            raise asyncio.CancelledError  # the connection ends
        found = await self._broker.answer(peer, line)
        await self.answering.wait()
        if dies == "after":
            raise asyncio.CancelledError
        return found

    async def refreshed(self) -> None:
        """Wait until the broker has seen Slurm as it is now; at once while it is away."""
        if self._running is None:
            return
        watch = self._broker._watch
        wanted = watch._polls + 1  # a poll that is under way may have read the queue already
        watch.poll_soon()
        async with asyncio.timeout(HANG), watch._polled:
            await watch._polled.wait_for(lambda: watch._finished >= wanted)

    def session(self, job_id: int) -> Session:
        """The session of a job, as the broker reports it."""
        return self._entry(job_id).session

    def log(self, job_id: int) -> str:
        """What a job has written."""
        return (self.folder(job_id) / log_name(None)).read_text()

    async def change(self, job_id: int, **values: Any) -> None:
        """Change the values of a job, and wait until the broker has read that."""
        self.slurm.change(job_id, **values)
        await self.refreshed()

    async def finish(self, job_id: int, state: JobState) -> None:
        """End a job, and wait until the broker has read that."""
        self.slurm.finish(job_id, state)
        await self.refreshed()

    async def run(self, job_id: int, command: list[str]) -> None:
        """Let a job that waits begin, and wait until the broker has read that."""
        await self.slurm.run(job_id, command)
        await self.refreshed()

    async def lose(self, job_id: int, number: int) -> None:
        """Slurm loses a job that waits; the broker submits it again, under another number."""
        self.slurm.lose(job_id, number)
        async with asyncio.timeout(HANG):
            while number not in self.slurm.jobs:
                await self.refreshed()
        await self.refreshed()

    def _entry(self, job_id: int) -> Any:
        entry = self._broker._context.book._entries.get(job_id)
        if entry is None:
            raise NotFound(f"There is no session of job {job_id}.")
        return entry

    @property
    def command(self) -> list[str] | None:
        """What the next jobs run; None: they wait."""
        return self.slurm.command

    @command.setter
    def command(self, command: list[str] | None) -> None:
        self.slurm.command = command

    @property
    def jobs(self) -> dict[int, Job]:
        """Slurm's."""
        return self.slurm.jobs

    @property
    def requests(self) -> dict[int, protocol.Submit]:
        """What jobs were submitted with."""
        return self.slurm.requests

    @property
    def processes(self) -> dict[int, asyncio.subprocess.Process]:
        """Those of jobs."""
        return self.slurm.processes

    @property
    def cancelled(self) -> list[int]:
        """The jobs that were cancelled, in order."""
        return self.slurm.cancelled

    def folder(self, job_id: int) -> Path:
        """The job's private folder."""
        return self.slurm.folder(job_id)

    async def end_all(self) -> None:
        """Kill what runs."""
        await self.slurm.end_all()


def account(name: str, home: Path) -> SandboxAccount:
    """Everybody has an account, and all share one home."""
    return SandboxAccount(name, FIRST_UID, FIRST_UID, str(home))


async def _identify(*_: object) -> Peer:
    return HUB
