"""The gateway's interface over processes of this computer: the queue, and what starts when."""

import asyncio
import contextlib
import json
import logging
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from carme.errors import CarmeError, NotFound
from carme.jobs import Cluster, Job, JobState, Node, Partition, Phase, StartEstimate, arrays
from carme.launch.spec import JobSpec
from carme.sandbox.accounting import Accounting
from carme.sandbox.processes import KILL_WAIT, JobProcess
from carme.sandbox.reservations import Reservations
from carme.slurm.account import UnixAccount
from carme.slurm.commands import order_of
from carme.slurm.folder import job_folder, log_name, start_in_folder
from carme.slurm.gateway import ExitStatus, Order
from carme.slurm.refusals import refusal

__all__ = ["SandboxSlurm", "first_job"]

_log = logging.getLogger("carme.sandbox")

#: The least number of a first job.
_FIRST_JOB = 1001
#: Seconds for which a job that is over stays in the queue, as Slurm's MinJobAge.
REMEMBERED_SECONDS = 300.0
#: The notebooks that images have in /opt/carme/examples; where this is not a checkout there are none.
EXAMPLES = Path(__file__).parents[4] / "containers/images/examples"
#: Seconds between two checks of what the clock alone changes.
POLL_SECONDS = 0.5


def first_job(folder: Path) -> int:
    """The number of the first job of a sandbox whose state lies in a folder.

    Jobs of all sandboxes of a computer have folders in /tmp by their numbers, so each has numbers of its own.
    """
    return _FIRST_JOB + 1000 * (zlib.crc32(str(folder).encode()) % 1000)


@dataclass
class _Entry:
    """A job of the queue.

    Attributes:
        places: The numbers of its GPUs on each of its nodes; empty while it waits.
        end_state: What it will be once its processes have ended, if they were ended.
        over: When it was over (`time.monotonic`).
    """

    job: Job
    order: Order
    owner: UnixAccount
    submission: int = 1
    places: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    process: JobProcess | None = None
    end_state: JobState | None = None
    over: float | None = None
    end: datetime | None = None


class SandboxSlurm(Accounting, Reservations):
    """A cluster of pretended nodes whose jobs are processes of this computer.

    Args:
        state: A folder for the accounting, which outlives it.
        nodes: How many nodes there are, n1 and so on, all in the partition `gpu`.
        gpus, cpus, memory_mb: What each has; GPUs are of type `a100`.
        python: The interpreter of the program that makes jobs' folders.
        kill_wait: Seconds between SIGTERM and SIGKILL.
        minute: Seconds of a minute of a job's time limit; less makes tests quick.
    """

    def __init__(
        self,
        state: Path,
        *,
        nodes: int = 2,
        gpus: int = 4,
        cpus: int = 8,
        memory_mb: int = 32_768,
        python: str = sys.executable,
        kill_wait: float = KILL_WAIT,
        minute: float = 60.0,
    ) -> None:
        Accounting.__init__(self, state)
        Reservations.__init__(self)
        self._python = python
        self._kill_wait = kill_wait
        self._minute = minute
        self._nodes = [
            Node(name=f"n{number + 1}", cpus=cpus, memory_mb=memory_mb, gpus={"a100": gpus} if gpus else {})
            for number in range(nodes)
        ]
        self._entries: dict[int, _Entry] = {}
        self._next = max([first_job(state) - 1, *self._ledger.jobs]) + 1
        self._version = 0
        self._running: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator["SandboxSlurm"]:
        """Run jobs for as long as this is entered; those that are left then are ended."""
        clock = asyncio.create_task(self._follow_clock())
        try:
            yield self
        finally:
            clock.cancel()
            await self._close()

    # -- what there is

    @property
    def has_many_jobs(self) -> bool:
        return False  # a look at them costs nothing

    async def pulse(self) -> str:
        return str(self._version)

    async def queue(self) -> list[Job]:
        return [entry.job for entry in self._entries.values()]

    async def exit_statuses(self, ids: Iterable[int]) -> dict[int, ExitStatus]:
        jobs = {job_id: self._entries[job_id].job for job_id in ids if job_id in self._entries}
        return {
            job_id: ExitStatus(job.exit_code, job.signal or 0)
            for job_id, job in jobs.items()
            if job.exit_code is not None
        }

    async def visible_jobs(self, ids: Iterable[int], account: UnixAccount) -> set[int]:
        return set(ids) & set(self._entries)

    async def visible_partitions(self, account: UnixAccount) -> set[str]:
        return {"gpu"}

    async def cluster(self) -> Cluster:
        partition = Partition(name="gpu", default=True, node_names=[node.name for node in self._nodes])
        return Cluster(
            taken=datetime.now(UTC),
            partitions=[partition],
            nodes=[self._with_usage(node) for node in self._nodes],
        )

    def _with_usage(self, node: Node) -> Node:
        """A node with what its jobs have of it."""
        entries = self._entries_on(node.name)
        gpus = sum(len(entry.places[node.name]) for entry in entries)
        drained = not node.available
        return node.model_copy(
            update={
                "state": f"{'MIXED' if entries else 'IDLE'}{'+DRAIN' if drained else ''}",
                "cpus_used": sum(entry.order.share.cpus for entry in entries),
                "memory_used_mb": sum(entry.order.share.memory_mb for entry in entries),
                "gpus_used": dict.fromkeys(node.gpus, gpus) if gpus else {},
            }
        )

    def _active(self) -> list[Job]:
        return [entry.job for entry in self._entries.values() if entry.job.is_active]

    def _entries_on(self, node: str, at: datetime | None = None) -> list[_Entry]:
        """Who holds something of a node, now or, as far as their limits show, at a moment."""
        return [
            entry
            for entry in self._entries.values()
            if node in entry.places and (at is None or entry.end is None or entry.end > at)
        ]

    # -- what users do

    async def submit(self, order: Order, owner: UnixAccount) -> int:
        order = self._without_empty_image(order)
        self._check(order, owner)
        # `true` takes the job: only its folder is to be made.
        done = await start_in_folder(order, owner, self._python, ["true"], "")
        if done.code != 0:
            raise refusal("sbatch", done.errors)
        return self._enqueue(order, owner)

    async def submit_again(self, job: Job, owner: UnixAccount, submission: int) -> int:
        assert job.key is not None
        text = await asyncio.to_thread((job_folder(owner, job.key) / "spec.json").read_text)
        order = replace(order_of(job), spec=JobSpec.load(json.loads(text)))
        return self._enqueue(order, owner, submission)

    async def estimate(self, order: Order, owner: UnixAccount) -> StartEstimate:
        self._check(order, owner)
        start, nodes = self._planned(order, owner.name)
        return StartEstimate(start=start, nodes=",".join(nodes), message="By the limits of what runs now.")

    async def cancel(self, job: str, owner: UnixAccount) -> None:
        name, _, tasks = job.partition("_")
        number = int(name)
        wanted = set(arrays.numbers(tasks.strip("[]"))) if tasks else None
        found = [
            entry
            for entry in list(self._entries.values())
            if entry.job.user == owner.name
            and entry.job.is_active
            and (entry.job.array_id == number or (wanted is None and entry.job.id == number))
        ]
        if not found:
            raise NotFound(
                "Slurm does not know this job (any more).", "It may have ended; look into the job history."
            )
        for entry in found:
            self._cancel(entry, wanted)
        self._schedule()

    async def set_limit(self, job: str, minutes: int) -> None:
        entry = next((each for each in self._entries.values() if each.job.slurm_name == job), None)
        if entry is None or entry.job.is_over:
            raise refusal("scontrol", "Invalid job id specified")
        self._change(entry, minutes_limit=minutes)
        if entry.job.started:
            entry.end = entry.job.started + minutes * timedelta(seconds=self._minute)
            self._change(entry, planned_end=entry.end)

    async def leave_reservation(self, job_id: int) -> None:
        self._change(self._entries[job_id], reservation="")
        self._schedule()

    async def set_preference(self, job_id: int, features: str) -> None:
        """Nothing: all nodes are this computer."""

    # -- what administrators do

    async def drain_node(self, name: str, reason: str) -> None:
        self._set_node(name, available=False, reason=reason)

    async def resume_node(self, name: str) -> None:
        self._set_node(name, available=True, reason="")
        self._schedule()

    async def add_features(self, node: str, features: Iterable[str]) -> None:
        known = next(each.features for each in self._nodes if each.name == node)
        self._set_node(node, features=[*known, *(feature for feature in features if feature not in known)])

    def _set_node(self, name: str, **values: Any) -> None:
        if name not in {node.name for node in self._nodes}:
            raise refusal("scontrol", "Invalid node name specified")
        self._nodes = [node.model_copy(update=values) if node.name == name else node for node in self._nodes]
        self._changed()

    # -- the queue

    def _without_empty_image(self, order: Order) -> Order:
        """The order without its image where that stands for this computer: an empty file."""
        image = order.spec.image
        if image is None or not Path(image).is_file() or Path(image).stat().st_size:
            return order
        return replace(order, spec=order.spec._replace(image=None))

    def _check(self, order: Order, owner: UnixAccount) -> None:
        """Refuse what Slurm refuses at once."""
        name = order.request.reservation
        if name and not self._found(name).admits(owner.name, order.account):
            raise refusal("sbatch", "Access denied to requested reservation")
        if order.account in self._ledger.accounts:
            account = self._ledger.accounts[order.account]
            if owner.name not in account["members"] or owner.name in account["stopped"]:
                raise refusal("sbatch", "Invalid account or account/partition combination specified")
            if account.get("minutes") is not None and order.request.minutes > account["minutes"]:
                raise refusal("sbatch", "Job violates accounting/QOS policy")

    def _enqueue(self, order: Order, owner: UnixAccount, submission: int = 1) -> int:
        number = self._next
        self._next += 1
        job = order.job(number, owner.name)
        values = {
            "account": job.account or "users",
            "qos": job.qos or "normal",
            "reason": "Priority",
            "priority": max(1, 1_000_000 - number),
        }
        job = job.model_copy(update=values)
        self._entries[number] = _Entry(job, order, owner, submission)
        self._changed()
        self._schedule()
        return number

    def _changed(self) -> None:
        self._version += 1

    def _change(self, entry: _Entry, **values: Any) -> None:
        changed = entry.job.model_copy(update=values)
        if changed != entry.job:
            entry.job = changed
            self._changed()

    def _schedule(self) -> None:
        """Start what can start, in the order of submission; smaller jobs may overtake the first."""
        first = True
        for entry in [each for each in self._entries.values() if each.job.is_pending]:
            reason = self._waits_for(entry)
            while not reason:
                places = self._places(entry.order, entry.job.reservation, datetime.now(UTC))
                if places is None:
                    reason = "Resources" if first else "Priority"
                    break
                if not self._begin(entry, places):
                    break  # the last of its tasks
                reason = self._waits_for(entry)
            if entry.job.is_pending:
                start, nodes = self._planned(entry.order, entry.owner.name)
                self._change(entry, reason=reason, planned_start=start, planned_nodes=",".join(nodes))
                first = False

    def _waits_for(self, entry: _Entry) -> str:
        """Slurm's reason why a job waits whatever is free; empty: there is none."""
        after = self._entries.get(entry.order.after or 0)
        if after is not None and after.job.is_active:
            return "Dependency"
        reservation = self._reserved.get(entry.job.reservation)
        if reservation is not None and reservation.start > datetime.now(UTC):
            return "Reservation"
        if entry.job.tasks and self._tasks_running(entry.job) >= _tasks_at_once(entry.job.tasks):
            return "JobArrayTaskLimit"
        return self._limit_reason(entry.job)

    def _tasks_running(self, job: Job) -> int:
        return sum(
            each.array_id == job.array_id and each.task is not None and not each.is_pending
            for each in self._active()
        )

    def _places(self, order: Order, reservation: str, at: datetime) -> dict[str, list[int]] | None:
        """The nodes that a job would get at a moment, with its GPUs on each; None: there are too few."""
        found: dict[str, list[int]] = {}
        end = at + order.request.minutes * timedelta(seconds=self._minute)
        for node in self._nodes:
            gpus = self._free_gpus(node, order, at)
            reserved = [
                each
                for each in self._reserved.values()
                if node.name in each.node_names and each.overlaps(at, end)
            ]
            if gpus is None or any(each.name != reservation for each in reserved):
                continue
            if reservation and not any(each.name == reservation for each in reserved):
                continue
            if order.node_names and node.name not in order.node_names:
                continue
            found[node.name] = gpus
            if len(found) == order.request.nodes:
                return found
        return None

    def _free_gpus(self, node: Node, order: Order, at: datetime) -> list[int] | None:
        """The GPUs that a job would get of a node; None: the node has no room for it."""
        present = self._entries_on(node.name, at)
        request = order.request
        total = sum(node.gpus.values())
        taken = {number for entry in present for number in entry.places[node.name]}
        free = [number for number in range(total) if number not in taken][: request.gpus_per_node]
        fits = (
            node.available
            and len(free) == request.gpus_per_node
            and sum(each.order.share.cpus for each in present) + order.share.cpus <= node.cpus
            and sum(each.order.share.memory_mb for each in present) + order.share.memory_mb <= node.memory_mb
            and not (order.constraint and (present or order.constraint not in node.features))
            and not any(each.order.constraint for each in present)
        )
        return free if fits else None

    def _planned(self, order: Order, user: str) -> tuple[datetime | None, list[str]]:
        """When a job would start, and where, if nothing else came and all took their whole time."""
        now = datetime.now(UTC).replace(microsecond=0)
        name = order.request.reservation or ""
        reservation = self._reserved.get(name)
        begin = max(now, reservation.start) if reservation else now
        ends = [entry.end for entry in self._entries.values() if entry.end and entry.places]
        moments = sorted(
            {begin, *(end for end in [*ends, *(r.end for r in self._reserved.values())] if end > begin)}
        )
        for moment in moments:
            if (places := self._places(order, name, moment)) is not None:
                return moment, list(places)
        return None, []

    # -- running

    def _begin(self, entry: _Entry, places: dict[str, list[int]]) -> bool:
        """Start a job, or the first of the tasks that it stands for; whether others are left."""
        left, running = False, entry
        if entry.job.tasks:
            first, *later = arrays.numbers(entry.job.tasks)
            assert entry.job.array_id is not None
            left = bool(later)
            if left:
                rest = arrays.limited(arrays.listed(later), entry.job.tasks)
                task = entry.job.model_copy(update={"id": self._next, "task": first, "tasks": ""})
                self._next += 1
                running = _Entry(task, entry.order, entry.owner)
                self._entries[task.id] = running
                self._change(entry, **{"task": None, "tasks": rest})
            else:
                self._change(entry, task=first, tasks="")
        now = datetime.now(UTC).replace(microsecond=0)
        running.places = places
        running.end = now + (running.job.minutes_limit or 1) * timedelta(seconds=self._minute)
        self._change(
            running,
            state=JobState.RUNNING,
            reason="",
            node_list=",".join(places),
            started=now,
            planned_start=None,
            planned_nodes="",
            planned_end=running.end,
        )
        task_of = asyncio.create_task(self._run(running))
        self._running.add(task_of)
        task_of.add_done_callback(self._running.discard)
        return left

    async def _run(self, entry: _Entry) -> None:
        job = entry.job
        folder = job_folder(entry.owner, entry.order.key)
        entry.process = JobProcess(
            folder, folder / log_name(job.task), self._environment(entry), entry.owner, entry.submission
        )
        if entry.end_state is not None:
            entry.process.end(self._kill_wait)  # it was ended before it had begun
        try:
            code, number = await entry.process.run()
        except OSError as error:
            _log.warning("Job %s cannot be started: %s", job.id, error)
            code, number = 1, 0
        state = entry.end_state or (JobState.COMPLETED if (code, number) == (0, 0) else JobState.FAILED)
        self._finish(entry, state, exit_code=code, signal=number or None)
        self._schedule()

    def _environment(self, entry: _Entry) -> Mapping[str, str]:
        """What Slurm sets on a job's first node."""
        job, first = entry.job, next(iter(entry.places))
        gpus = ",".join(map(str, entry.places[first]))
        values = {
            "SLURM_JOB_ID": str(job.id),
            "SLURM_JOB_NAME": job.name,
            "SLURM_JOB_PARTITION": job.partition,
            "SLURM_JOB_ACCOUNT": job.account,
            "SLURM_JOB_NUM_NODES": str(job.nodes),
            "SLURM_JOB_NODELIST": job.node_list,
            "SLURM_CPUS_PER_TASK": str(entry.order.share.cpus),
            "SLURM_CPUS_ON_NODE": str(entry.order.share.cpus),
            "SLURM_MEM_PER_NODE": str(entry.order.share.memory_mb),
            "SLURMD_NODENAME": first,
            "CARME_EXAMPLES": str(EXAMPLES),
        }
        if gpus:
            values |= {"SLURM_JOB_GPUS": gpus, "CUDA_VISIBLE_DEVICES": gpus}
        if job.task is not None:
            values |= {"SLURM_ARRAY_JOB_ID": str(job.array_id), "SLURM_ARRAY_TASK_ID": str(job.task)}
        return values

    def _cancel(self, entry: _Entry, tasks: set[int] | None) -> None:
        """Cancel a job, or some of the tasks that it is or stands for."""
        job = entry.job
        if tasks is not None and job.task is None and job.tasks:
            rest = [number for number in arrays.numbers(job.tasks) if number not in tasks]
            if rest:
                assert job.array_id is not None
                self._change(entry, tasks=arrays.limited(arrays.listed(rest), job.tasks))
                return
        elif tasks is not None and job.task not in tasks:
            return
        self._end(entry, JobState.CANCELLED, cancelled_by="owner")

    def _end(self, entry: _Entry, state: JobState, **values: Any) -> None:
        """End a job: at once while it waits, else with its processes."""
        if entry.job.is_pending:
            self._finish(entry, state, **values)
        elif entry.end_state is None:
            entry.end_state = state
            self._change(entry, state=JobState.COMPLETING, **values)
            if entry.process is not None:
                entry.process.end(self._kill_wait)

    def _finish(self, entry: _Entry, state: JobState, **values: Any) -> None:
        entry.places, entry.end, entry.over = {}, None, time.monotonic()
        ended = datetime.now(UTC).replace(microsecond=0)
        exit_code = {"exit_code": 0} | values
        self._change(
            entry, state=state, reason="", planned_start=None, planned_end=None, ended=ended, **exit_code
        )
        assert entry.job.state.phase is Phase.OVER
        self._ledger.add([entry.job])

    async def _follow_clock(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self._check_clock()
            except CarmeError:
                _log.exception("Reading the clock failed.")

    def _check_clock(self) -> None:
        """End what has no time left, forget what was over long ago, start what may start now."""
        now = datetime.now(UTC)
        over = self._expire()
        for entry in list(self._entries.values()):
            if entry.over is not None and time.monotonic() > entry.over + REMEMBERED_SECONDS:
                del self._entries[entry.job.id]
                self._changed()
            elif entry.job.is_pending and entry.job.reservation in over:
                self._change(entry, reservation="")
            elif entry.process and (
                entry.job.reservation in over or (entry.end is not None and entry.end <= now)
            ):
                self._end(entry, JobState.TIMEOUT)
        self._schedule()

    async def _close(self) -> None:
        """End all jobs, and wait for their ends."""
        for entry in list(self._entries.values()):
            if entry.job.is_active:
                self._end(entry, JobState.CANCELLED, cancelled_by="root")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._kill_wait + 5):
                while self._running:
                    await asyncio.wait(self._running)


def _tasks_at_once(tasks: str) -> int:
    _, percent, most = tasks.partition("%")
    return int(most) if percent else sys.maxsize
