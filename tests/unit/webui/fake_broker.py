"""The real broker on a real socket, over a Slurm in memory that the tests write.

Requests and their checks, nodes, the forecast, jobs, logs, results, scripts, arrays, submissions, stage-in
jobs, reservations, accounts of projects, what users may use, sessions, events, reports, warnings and the
program of files are the real broker's. Programs that it runs as users run as the account that runs the tests,
as in the sandbox. Only the broker's polling of Slurm is off: tests put jobs into its snapshot, and sessions
into its book, as a page is tested with a job in a certain state, such as one whose node was lost last year.
Tests write what Prometheus has, too: what jobs used, and alerts that fire.
"""

import asyncio
import itertools
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

from django.conf import settings

from carme.broker import protocol
from carme.broker import server as server_module
from carme.broker.dispatch import HandOver
from carme.broker.files import NET_NAME
from carme.broker.peers import Peer
from carme.broker.policy import Alert
from carme.broker.server import Server
from carme.broker.service import Broker
from carme.broker.sessions import _Entry
from carme.broker.store import Changes, Store
from carme.broker.watch import CLUSTER_AT_MOST_EVERY, Watch
from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import Access, Cluster, Job, JobRequest, JobState, Node, Partition
from carme.launch import facts
from carme.launch.preparation import TASKS
from carme.reports import Curve, Usage
from carme.reports.metrics import Metrics
from carme.sandbox.accounts import FIRST_UID, SandboxAccount
from carme.sessions import Mark, Session, SessionState, Step
from carme.sessions.facts import Facts
from carme.slurm import Slurm, UnixAccount
from carme.slurm.folder import job_folder, log_name

from .memory_slurm import NOW, MemorySlurm

T = TypeVar("T")


def make_job(job_id: int, user: str = "alice", state: str = "RUNNING", **fields: Any) -> Job:
    """A job; the fields not named are ordinary ones. Tasks of an array share its folder."""
    values: dict[str, Any] = {
        "id": job_id, "key": f"{fields.get('array_id') or job_id:032x}", "name": f"job {job_id}",
        "user": user, "state": JobState(state), "partition": "gpu", "nodes": 1, "node_list": "n1",
        "gpus": 1, "gpu_type": "a100", "cpus": 4, "memory_mb": 8192, "submitted": NOW, "minutes_limit": 60,
    }  # fmt: skip
    return Job(**(values | fields))


def make_session(name: str, state: str = "ready", steps: int = 0, **fields: Any) -> Session:
    """What the broker says of a session; it has reached that many steps, one each second."""
    marks = tuple(
        Mark(step=step, at=NOW + timedelta(seconds=number)) for number, step in enumerate(list(Step)[:steps])
    )
    values: dict[str, Any] = {
        "name": name, "owner": "alice", "job_id": 7, "image": "torch", "state": SessionState(state),
        "marks": marks, "partition": "gpu",
    }  # fmt: skip
    return Session(**(values | fields))


CLUSTER = Cluster(
    taken=NOW,
    partitions=[
        Partition(name="gpu", default=True, max_minutes=480, node_names=["n1", "n2"]),
        Partition(name="cpu", node_names=["n3"]),
    ],
    nodes=[
        Node(name="n1", cpus=16, memory_mb=64_000, gpus={"a100": 4}, gpus_used={"a100": 1}),
        Node(name="n2", cpus=16, memory_mb=64_000, gpus={"a100": 4}, available=False, state="DOWN"),
        Node(name="n3", cpus=16, memory_mb=64_000),
    ],
)

#: What is refused while a test has set `refusal`.
REFUSED = (
    protocol.Enrol,
    protocol.Extend,
    protocol.Maintain,
    protocol.PutGrant,
    protocol.Reserve,
    protocol.SetNode,
    protocol.StageIn,
    protocol.Submit,
    protocol.TestStart,
)


class _SiteOfNow:
    """The site's settings, as the test has them at that moment."""

    def __getattr__(self, name: str) -> Any:
        return getattr(settings.SITE, name)


class _Unsaved(Store):
    """Saves nothing: no broker of a test has to come back after its end."""

    async def write(self, changes: Changes) -> bool:
        return True


@dataclass(frozen=True)
class _Account(SandboxAccount):
    """A user of the tests; the programs that run as the user see the home that the test has made."""

    in_groups: tuple[str, ...] = ()
    more: dict[str, str] = field(default_factory=dict, compare=False)

    def groups(self) -> list[str]:
        return list(self.in_groups)

    def environment(self) -> dict[str, str]:
        return super().environment() | self.more


class _Measurements:
    """What Prometheus has of jobs, as their reports read it (`carme.reports.metrics.Metrics`).

    Args:
        measured: What each job used, and the curves of that, by its number.
    """

    def __init__(self, measured: dict[int, tuple[Usage, list[Curve]]]) -> None:
        self._measured = measured

    async def usage(self, job_id: int, begin: datetime, end: datetime) -> tuple[Usage | None, list[Curve]]:
        return self._measured.get(job_id, (None, []))


class _Queue(MutableMapping[int, Job]):
    """The jobs in the broker's snapshot; a change has a number, as one that the broker sees in Slurm."""

    def __init__(self, site: "FakeBroker") -> None:
        self._site = site

    def __getitem__(self, job_id: int) -> Job:
        job = self._site.watch.job(job_id)
        if job is None:
            raise KeyError(job_id)
        return job

    def __setitem__(self, job_id: int, job: Job) -> None:
        self._site.change(lambda: self._site.watch._put(job, 0))

    def __delitem__(self, job_id: int) -> None:
        self[job_id]  # raises KeyError
        self._site.change(lambda: self._site.watch._drop(job_id))

    def __iter__(self) -> Iterator[int]:
        return iter([job.id for job in self._site.watch.jobs()])

    def __len__(self) -> int:
        return len(self._site.watch.jobs())


class _Sessions(MutableMapping[str, Session]):
    """The sessions in the broker's book, by name; no event says that one was put here or taken away."""

    def __init__(self, site: "FakeBroker") -> None:
        self._site = site

    @property
    def _entries(self) -> dict[int, _Entry]:
        return self._site._broker._context.book._entries

    def __getitem__(self, name: str) -> Session:
        for session in self.values_now():
            if session.name == name:
                return session
        raise KeyError(name)

    def __setitem__(self, name: str, session: Session) -> None:
        self._site.change(lambda: self.put(session, 0))

    def __delitem__(self, name: str) -> None:
        self[name]  # raises KeyError
        self._site.change(lambda: self._drop(name))

    def __iter__(self) -> Iterator[str]:
        return iter([session.name for session in self.values_now()])

    def __len__(self) -> int:
        return len(self._entries)

    def values_now(self) -> list[Session]:
        """The sessions, in a list of its own."""
        return [entry.session for entry in self._entries.values()]

    def put(self, session: Session, changed: int) -> None:
        """Enter the session as it is, in place of the one of this name; the change has this number."""
        self._drop(session.name)
        job = self._site.queue.get(session.job_id) or make_job(
            session.job_id, session.owner, name=f"session-{session.name}", kind="session"
        )
        self._entries[session.job_id] = _Entry(Facts(job=job, state=session.state), session, changed)

    def _drop(self, name: str) -> None:
        for job_id in [number for number, entry in self._entries.items() if entry.session.name == name]:
            del self._entries[job_id]


class FakeBroker:
    """`queue`: what Slurm has; `archive`: what only accounting has; `published`: sessions; `requests`: all.

    `refusal` is how it answers who asks for more time, a reservation, a start or a job; `reservations`: by
    name; `accesses`: what Slurm lets users use; `leads`: accounts that users lead; `starts`: when a
    request would begin, at once without it;
    `wanted`: what jobs were submitted with; `logs` and `results`: what they left; `facts`: where they began;
    `nets`: what their Petri nets draw;
    `scripts`: by user and path; `granted`: the accounts of projects; `measured`: what Prometheus has of jobs.

    Args:
        address: Its socket.
        remembers: It remembers what it saw in Slurm as long as on a site, where jobs begin all the time.
    """

    def __init__(self, address: Path, *, remembers: bool = False) -> None:
        self.socket = address
        self._remembers = remembers
        self.home = address.parent / "home"
        #: Of these are the folders of jobs, and scripts.
        self.homes = address.parent / "homes"
        #: What the programs that run as the user have besides.
        self.environment: dict[str, str] = {}
        #: A program that starts them, with its arguments.
        self.wrapper: list[str] = []
        self.queue = _Queue(self)
        self._slurm = MemorySlurm(self.queue, CLUSTER)
        self.archive = self._slurm.archive
        self.reservations = self._slurm.reserved
        self.granted = self._slurm.granted
        self.accesses: dict[str, Access] = self._slurm.accesses
        self.leads = self._slurm.leads
        self.wanted = self._slurm.wanted
        self.logs: dict[int, bytes] = {}
        self.results: dict[int, bytes] = {}
        self.facts: dict[int, protocol.JobFacts] = {}
        self.nets: dict[int, protocol.NetPicture] = {}
        self.scripts: dict[tuple[str, str], str] = {}
        self.measured: dict[int, tuple[Usage, list[Curve]]] = {}
        #: Without Prometheus reports are from the exporters of the jobs' nodes, if the site has any.
        self.has_prometheus = True
        self.requests: list[protocol.Request] = []
        self.published = _Sessions(self)
        self.refusal: CarmeError | None = None
        self._uids: dict[str, int] = {}
        #: Two threads may meet new users at the same time.
        self._numbers = itertools.count(FIRST_UID)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broker = self._new_broker()

    @property
    def watch(self) -> Watch:
        """The broker's snapshot of Slurm."""
        return self._broker._watch

    @property
    def cluster(self) -> Cluster:
        """The nodes and partitions."""
        return self._slurm.nodes

    @cluster.setter
    def cluster(self, cluster: Cluster) -> None:
        self._slurm.nodes = self.watch._cluster = cluster

    @property
    def starts(self) -> Callable[[JobRequest], datetime] | None:
        """When a request would begin."""
        return self._slurm.starts

    @starts.setter
    def starts(self, starts: Callable[[JobRequest], datetime]) -> None:
        self._slurm.starts = starts

    def put(self, job: Job) -> Job:
        """The job appears or changes in the queue."""
        self.queue[job.id] = job
        return job

    def publish(self, session: Session) -> Session:
        """The session appears or changes."""
        self.change(lambda: self.published.put(session, self._broker._context.feed.number()))
        return session

    def leave(self, job: Job) -> Job:
        """The job is only in accounting from now on, and no event says so."""
        self.queue.pop(job.id, None)
        self.archive[job.id] = job
        return job

    def fire(self, alerts: list[Alert], at: datetime) -> None:
        """These alerts about jobs fire at a time, when the site's policy looks at them."""
        by_job: defaultdict[int, list[Alert]] = defaultdict(list)
        for alert in alerts:
            by_job[alert.job_id].append(alert)
        self._await(self._broker._policy.evaluate(by_job, at))

    def restart(self) -> None:
        """All cursors become unknown."""
        self.change(self._restart)

    def requests_of(self, method: str) -> list[Any]:
        """The requests of one method."""
        return [request for request in self.requests if request.method == method]

    def carry_out(self, request: protocol.Request) -> Any:
        """What the portal would get, without the socket. Raises what the broker refuses with."""
        return self._await(self.answer(PORTAL, protocol.request_adapter.dump_json(request)))

    async def answer(self, peer: Peer, line: bytes) -> Any:
        """As the broker's: the result of one request line. Raises the error that the peer gets."""
        request = protocol.request_adapter.validate_json(line)
        self.requests.append(request)
        if self.refusal is not None and isinstance(request, REFUSED):
            if isinstance(request, protocol.Extend):
                await self._broker._jobs.find(peer, request.job_id, request.user)  # it must be theirs
            raise self.refusal
        await self._poll()
        self._leave_files()
        measurements = cast(Metrics, _Measurements(self.measured))
        self._broker._reports._metrics = measurements if self.has_prometheus else None
        found = await self._broker.answer(peer, line)
        if isinstance(request, protocol.Cancel) and request.session is not None:
            await self._show_end(request.job_id)
        if isinstance(found, HandOver):
            return found._replace(arguments=[*self.wrapper, *found.arguments])
        return found

    async def _poll(self) -> None:
        """Let the broker poll Slurm again: a test may have changed what it caches for some seconds."""
        broker = self._broker
        if self._remembers:
            if time.monotonic() >= self.watch._cluster_seen + CLUSTER_AT_MOST_EVERY:
                await self.watch.poll_nodes()
            return
        broker._context.accesses.forget()
        forecasts = broker._cluster._forecasts
        forecasts._latest = forecasts._reserved = None
        forecasts._rests_until = 0.0
        broker._bookings._seen_at = -math.inf
        await self.watch.poll_nodes()

    async def _show_end(self, job_id: int) -> None:
        """Show what the next poll of Slurm would show of a session whose job was cancelled."""
        if job := self.archive.get(job_id):
            self._broker._context.book.observe([job], self.cluster)
            await self._broker._context.feed.notify()

    def _leave_files(self) -> None:
        """Write what jobs have left, and scripts, where the broker reads them as their owners."""
        for job_id, log in self.logs.items():
            self._leave(job_id, lambda job: log_name(job.task), log)
        for job_id, result in self.results.items():
            self._leave(job_id, lambda job: _own(job, "result"), result)
        for job_id, known in self.facts.items():
            self._leave(job_id, lambda job: _own(job, facts.NAME), known.model_dump_json().encode())
        for job_id, net in self.nets.items():
            self._leave(job_id, lambda job: _own(job, NET_NAME), net.model_dump_json().encode())
        for job_id, request in self.wanted.items():
            self._leave(job_id, lambda job: "request.json", request.model_dump_json().encode())
        for (user, path), text in self.scripts.items():
            _write(Path(self._account(user).home) / path, text.encode())

    def _leave(self, job_id: int, name: Callable[[Job], str], data: bytes) -> None:
        job = self.queue.get(job_id) or self.archive.get(job_id)
        if job is not None and job.key is not None:
            _write(job_folder(self._account(job.user), job.key) / name(job), data)

    def _account(self, name: str) -> _Account:
        """Everybody has an account."""
        home = self.homes / name
        home.mkdir(parents=True, exist_ok=True)
        uid = self._uids.setdefault(name, next(self._numbers))
        groups = tuple(self.accesses.get(name, Access(user=name)).groups)
        return _Account(
            name, uid, uid, str(home), in_groups=groups, more={"HOME": str(self.home), **self.environment}
        )

    def _new_broker(self) -> Broker:
        broker = Broker(cast(Settings, _SiteOfNow()), cast(Slurm, self._slurm))
        broker._context.book._store = _Unsaved(self.homes)
        broker._watch._cluster, broker._watch._seen = self.cluster, True
        return broker

    def _restart(self) -> None:
        jobs, sessions = self.watch.jobs(), self.published.values_now()
        self._broker = self._new_broker()
        for job in jobs:
            self.watch._put(job, 0)
        for session in sessions:
            self.published.put(session, 0)

    def change(self, change: Callable[[], object]) -> None:
        """Change what the broker knows, between two of its steps, and wake those who wait for that."""
        if self._loop is None or threading.current_thread() is self._thread:
            change()
            return

        async def within() -> None:
            change()
            await self._broker._context.feed.notify()

        self._await(within())

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "the broker does not run"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> "FakeBroker":
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="broker", daemon=True)
        self._thread.start()
        self._patches = [
            patch.object(UnixAccount, "named", self._account),
            patch.object(server_module, "identify", _identify),
        ]
        for patched in self._patches:
            patched.start()
        self._server = Server(cast(Settings, _SiteOfNow()), cast(Broker, self))
        self._await(self._server.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._await(self._server.__aexit__())
        for patched in self._patches:
            patched.stop()
        self._await(self._finish())
        self._await(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    async def _finish(self) -> None:
        """Let what still runs come to its end, connections that were accepted last among it."""
        left = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


PORTAL = Peer(os.getpid(), UnixAccount("portal", 0, 0, "/"), trusted=True, observer=True)


async def _identify(*_: object) -> Peer:
    return PORTAL


def _own(job: Job, file: str) -> str:
    """Where a task has its own file in the folder of its array."""
    return file if job.task is None else f"{TASKS}/{job.task}/{file}"


def _write(file: Path, data: bytes) -> None:
    """At once, as somebody may be reading it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_bytes(data)
    fresh.replace(file)
