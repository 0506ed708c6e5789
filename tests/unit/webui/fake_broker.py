"""A broker that speaks the real protocol on a real socket, over a queue that the tests write.

Checks of requests, the forecast, arrays, cursors, reservations, accounts of projects and the program of files
are the real broker's. Jobs and sessions are what a test puts there: a page is tested with a job in a certain
state, such as one whose node was lost last year, and the whole broker over a sandbox would have to wait for
that. Nor can it run here: it acts as the Unix accounts of users, and the tests' users have none. So what it
would read as the user or from Slurm's accounting is answered here in short: numbers of jobs, their end, parts
of logs and results. The whole broker runs over the sandbox and over simulated Slurm programs in
`tests/unit/carme`, and with the portal in `tests/unit/dev`.
"""

import asyncio
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from django.conf import settings

from carme.broker import protocol
from carme.broker.bookings import Bookings
from carme.broker.feed import Feed
from carme.broker.projects import Projects
from carme.broker.protocol import RunningJob
from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.files import program
from carme.images import ImageCatalogue
from carme.jobs import (
    NEVER_BEGUN,
    Access,
    Cluster,
    Job,
    JobRequest,
    JobState,
    Node,
    Partition,
    StartEstimate,
    arrays,
    check,
    forecast,
)
from carme.reports import JobWarning, Report
from carme.sessions import Ending, Extension, Mark, Session, SessionState, Step
from carme.slurm import Slurm

from .memory_slurm import MemorySlurm

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def make_job(job_id: int, user: str = "alice", state: str = "RUNNING", **fields: Any) -> Job:
    """A job; the fields not named are ordinary ones."""
    values: dict[str, Any] = {
        "id": job_id, "name": f"job {job_id}", "user": user, "state": JobState(state), "partition": "gpu",
        "nodes": 1, "node_list": "n1", "gpus": 1, "gpu_type": "a100", "cpus": 4, "memory_mb": 8192,
        "submitted": NOW, "minutes_limit": 60,
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

#: What a part of the broker returns for a request that is another part's.
NO_ANSWER = object()


class FakeBroker:
    """`queue`: what Slurm has; `archive`: what only accounting has; `published`: sessions; `requests`: all.

    `refusal` is how it answers who asks for more time, a reservation, a start or a job; `reservations`: by
    name; `accesses`: what Slurm lets users use; `leads`: accounts that users lead; `starts`: when a
    request would begin, at once without it;
    `wanted`: what jobs were submitted with; `results`: what they left; `facts`: where they began;
    `scripts`: by user and path; `granted`: the accounts of projects; `warnings`: by the policy about alerts.
    """

    def __init__(self, address: Path) -> None:
        self.socket = address
        self.cluster: Cluster = CLUSTER
        self.queue: dict[int, Job] = {}
        self._turn = threading.Lock()
        self.archive: dict[int, Job] = {}
        self.logs: dict[int, bytes] = {}
        self.reports: dict[int, Report] = {}
        self.warnings: list[JobWarning] = []
        self.requests: list[protocol.Request] = []
        self.published: dict[str, Session] = {}
        self.refusal: CarmeError | None = None
        self._slurm = cast(Slurm, memory := MemorySlurm(self.queue, self.put))
        self.reservations = memory.reserved
        self.granted = memory.granted
        self.home = address.parent / "home"
        #: What the programs that run as the user have besides.
        self.environment: dict[str, str] = {}
        #: A program that starts them, with its arguments.
        self.wrapper: list[str] = []
        self.starts: Callable[[JobRequest], datetime] | None = None
        self.wanted: dict[int, JobRequest] = {}
        self.results: dict[int, bytes] = {}
        self.facts: dict[int, protocol.JobFacts] = {}
        self.nets: dict[int, protocol.NetPicture] = {}
        self.scripts: dict[tuple[str, str], str] = {}
        self.accesses: dict[str, Access] = {}
        self.leads: dict[str, list[str]] = {}
        #: Of changes and their numbers. `_turn` may be held when it is taken, never the other way round.
        self._changing = threading.RLock()
        self._feed = Feed()
        #: Jobs and sessions, each with the number of its latest change.
        self._changes: dict[int | str, int] = {}

    def put(self, job: Job) -> Job:
        """The job appears or changes in the queue."""
        with self._changing:
            self.queue[job.id] = job
            self._changes[job.id] = self._feed.number()
        return job

    def publish(self, session: Session) -> Session:
        """The session appears or changes."""
        with self._changing:
            self.published[session.name] = session
            self._changes[session.name] = self._feed.number()
        return session

    def leave(self, job: Job) -> Job:
        """The job is only in accounting from now on, and no event says so."""
        with self._changing:
            self.queue.pop(job.id, None)
            self.archive[job.id] = job
        return job

    def restart(self) -> None:
        """All cursors become unknown."""
        with self._changing:
            self._feed = Feed()
            self._changes = {}

    def requests_of(self, method: str) -> list[Any]:
        """The requests of one method."""
        return [request for request in self.requests if request.method == method]

    def answer(self, request: protocol.Request) -> Any:
        for part in (
            self._answer_of_cluster,
            self._answer_of_sessions,
            self._answer_of_projects,
            self._answer_to_submit,
            self._answer_of_jobs,
        ):
            if (found := part(request)) is not NO_ANSWER:
                return found
        raise AssertionError(f"the portal must not ask for {request.method}")

    def _answer_of_cluster(self, request: protocol.Request) -> Any:
        """What Slurm is like and what it keeps for whom."""
        match request:
            case protocol.GetCluster():
                # Taken a moment ago, unless a test says otherwise.
                taken = datetime.now(UTC) if self.cluster.taken == NOW else self.cluster.taken
                return self.cluster.model_copy(update={"taken": taken})
            case protocol.GetForecast():
                now = datetime.now(UTC)
                return forecast(self.cluster, self.queue.values(), self.reservations.values(), now)
            case protocol.GetReservations():
                return asyncio.run(self._bookings().reservations())
            case protocol.Reserve(hold=hold):
                return self._real(self._bookings().reserve(hold, self.cluster))
            case protocol.Maintain(window=window):
                return self._real(self._bookings().maintain(window, self.cluster))
            case protocol.Release(name=name):
                with self._turn:
                    return asyncio.run(self._bookings().release(name))
            case protocol.TestStart(request=requested):
                if self.refusal is not None:
                    raise self.refusal
                check(requested, self.cluster, ImageCatalogue(self.socket.parent / "images"), settings.SITE)
                start = self.starts(requested) if self.starts else datetime.now(UTC)
                now = datetime.now(UTC)
                return StartEstimate(nodes="n1", start=start, earliest=now + (start - now) / 2)
            case protocol.SetNode() | protocol.Enrol():
                if self.refusal is not None:
                    raise self.refusal
                return ["added to the account carme in Slurm"] if request.method == "enrol" else None
            case protocol.GetAccess(user=user):
                return self.accesses.get(user or "", Access(user=user or ""))
            case protocol.GetCoordinatedAccounts(user=user):
                return self.leads.get(user or "", [])
        return NO_ANSWER

    def _answer_of_sessions(self, request: protocol.Request) -> Any:
        """Events and sessions."""
        match request:
            case protocol.GetEvents(cursor=cursor):
                return self._events(cursor)
            case protocol.GetSessions(active=active):
                return [session for session in self.published.values() if not (active and session.is_over)]
            case protocol.GetSession(name=name):
                if name not in self.published:
                    raise NotFound(f"There is no session {name}.", "Check the name.")
                return self.published[name]
            case protocol.Extend(job_id=job_id, user=user, minutes=minutes):
                if job_id in self.queue:
                    self._known(job_id, user, None)
                if self.refusal is not None:
                    raise self.refusal
                return Extension(ends=NOW + timedelta(minutes=minutes), minutes_limit=minutes)
            case protocol.OpenFiles():
                return None
        return NO_ANSWER

    def _answer_of_projects(self, request: protocol.Request) -> Any:
        """Projects, and warnings of waste."""
        match request:
            case protocol.GetWarnings():
                return self.warnings
            case protocol.GetProjects():
                return asyncio.run(Projects(self._slurm).accounts())
            case protocol.PutGrant(grant=grant):
                return self._real(Projects(self._slurm).grant(grant, self.cluster))
        return NO_ANSWER

    def _answer_to_submit(self, request: protocol.Request) -> Any:
        """What makes jobs and ends them."""
        match request:
            case protocol.Submit(request=wanted, user=user):
                if self.refusal is not None:
                    raise self.refusal
                check(wanted, self.cluster, ImageCatalogue(self.socket.parent / "images"), settings.SITE)
                number = max([100, *self.queue, *self.archive]) + 1
                self.wanted[number] = wanted
                which = arrays.fields(number, wanted.array) if wanted.array else {}
                job = make_job(
                    number, user=user or "", state="PENDING", name=wanted.name, kind="batch", **which
                )
                self.put(job)
                return number
            case protocol.StageIn(name=name, user=user):
                if self.refusal is not None:
                    raise self.refusal
                number = max([100, *self.queue, *self.archive]) + 1
                self.put(make_job(number, user=user, state="PENDING", name=name, kind="batch"))
                return number
            case protocol.GetRecipe(job_id=job_id, user=user):
                return protocol.Recipe(
                    request=self._wanted(job_id, user).model_copy(update={"environment": {}})
                )
            case protocol.Resubmit(job_id=job_id, user=user, task=task, tasks=tasks):
                again = self._wanted(job_id, user)
                if tasks is not None and again.array is not None:
                    again = again.model_copy(update={"array": arrays.limited(tasks, again.array)})
                elif task is not None:
                    again = again.model_copy(update={"array": str(task)})
                return self.answer(protocol.Submit(request=again, user=user))
            case protocol.GetScript(path=path, user=user):
                text = self.scripts.get((user or "", path))
                if text is None:
                    raise InvalidRequest(f"There is no script {path!r}.", "Look.", field="script_path")
                return protocol.Script(path=f"/home/{user}/{path}", text=text)
            case protocol.Cancel(job_id=job_id, user=user, session=None, task=task):
                job = self._known(job_id, user, task)
                others = [one for one in self.queue.values() if job.id == one.array_id and one.id != job.id]
                for one in others if task is None else ():
                    self.put(one.model_copy(update={"state": JobState.CANCELLED, "ended": NOW}))
                self.leave(job.model_copy(update={"state": JobState.CANCELLED, "ended": NOW}))
                return None
            case protocol.Cancel(job_id=job_id):
                for session in self.published.values():
                    if session.job_id == job_id:
                        self.publish(
                            session.model_copy(update={"state": SessionState.ENDED, "ending": Ending.STOPPED})
                        )
                        break
                return None
        return NO_ANSWER

    def _answer_of_jobs(self, request: protocol.Request) -> Any:
        """Jobs, their logs, results and reports."""
        match request:
            case protocol.GetJobs(active=active):
                return [job for job in self.queue.values() if job.is_active or not active]
            case protocol.GetRunning():
                return [RunningJob.of(job) for job in self.queue.values() if job.is_running]
            case protocol.GetHistory(since=since, until=until, limit=limit):
                found = list(self.archive.values())
                if since is not None and until is not None:
                    found = [job for job in found if job.submitted and since <= job.submitted < until]
                return sorted(found, key=lambda job: job.id, reverse=True)[:limit]
            case protocol.GetFacts(job_id=job_id, user=user, task=task):
                self._known(job_id, user, task)
                return self.facts.get(job_id, protocol.JobFacts())
            case protocol.GetNet(job_id=job_id, user=user, task=task):
                self._known(job_id, user, task)
                return self.nets.get(job_id, protocol.NetPicture())
            case protocol.GetJob(job_id=job_id, user=user, task=task):
                return self._known(job_id, user, task)
            case protocol.GetResult(job_id=job_id, user=user, offset=offset, limit=limit, task=task):
                job = self._known(job_id, user, task)
                whole = b"" if job.reason == NEVER_BEGUN else self.results.get(job.id, b"")
                part = whole[offset : offset + limit]
                return protocol.LogPart(text=part.decode(), offset=offset + len(part), size=len(whole))
            case protocol.GetLog(job_id=job_id, offset=offset, limit=limit, user=user, task=task, tail=tail):
                job = self._known(job_id, user, task)
                if job.reason == NEVER_BEGUN:
                    return protocol.LogPart(text="", offset=0, size=0)
                if (job_id := job.id) not in self.logs:
                    raise NotFound(f"Job {job_id} has no log.", "Wait until it has started.")
                if tail is not None:
                    whole = self.logs[job_id]
                    offset = len(whole) - len(
                        b"".join(whole.splitlines(keepends=True)[-tail:]) if tail else b""
                    )
                part = self.logs[job_id][offset : offset + limit]
                return protocol.LogPart(
                    text=part.decode(errors="replace"),
                    offset=offset + len(part),
                    size=len(self.logs[job_id]),
                )
            case protocol.GetReport(job_id=job_id, user=user):
                self._known(job_id, user)
                if job_id not in self.reports:
                    raise NotFound(f"Nothing is known of job {job_id}.", "Ask again when it has run.")
                return self.reports[job_id]
        return NO_ANSWER

    def _events(self, cursor: str | None) -> protocol.EventBatch:
        with self._changing:
            since = self._feed.since(cursor)
            changed = {*self.queue, *self.published}
            if since is not None:
                changed = {key for key, number in self._changes.items() if number > since}
            return protocol.EventBatch(
                jobs=[job for job in self.queue.values() if job.id in changed],
                sessions=[session for session in self.published.values() if session.name in changed],
                cursor=self._feed.cursor,
                complete=since is None,
            )

    def _bookings(self) -> Bookings:
        """The real broker's, which has not looked at Slurm yet."""
        return Bookings(settings.SITE, self._slurm)

    def _real(self, change: Coroutine[Any, Any, Any]) -> Any:
        """What the real broker makes of a change, unless the test has it refused."""
        if self.refusal is not None:
            change.close()
            raise self.refusal
        with self._turn:
            return asyncio.run(change)

    def run_files(self, connection: socket.socket) -> None:
        """The program that the real broker runs, here as whoever runs the tests."""
        subprocess.run(
            [*self.wrapper, sys.executable, "-I", "-S", str(program.__file__)],
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            env={"HOME": str(self.home), **self.environment},
            check=False,
        )

    def _wanted(self, job_id: int, user: str | None) -> JobRequest:
        self._known(job_id, user)
        if job_id not in self.wanted:
            raise NotFound(f"What job {job_id} was submitted with is not known.", "Look elsewhere.")
        return self.wanted[job_id]

    def _known(self, job_id: int, user: str | None = None, task: int | None = None) -> Job:
        if task is not None:
            jobs = [*self.queue.values(), *self.archive.values()]
            found = [job for job in jobs if job.has_task(job_id, task) and user in (None, job.user)]
            wanted = self.wanted.get(job_id)
            if not found and wanted and arrays.includes(wanted.array or "", task):
                base = next(job for job in jobs if job.array_id == job_id)
                known = {"id": job_id, "task": task, "tasks": "", "state": JobState.CANCELLED}
                return base.model_copy(update=known | {"reason": NEVER_BEGUN, "started": None})
            if not found:
                raise NotFound(f"There is no job {job_id}_{task}.", "Check the number.")
            return next((job for job in found if job.task == task), found[0])
        for place in (self.queue, self.archive):
            if job_id in place and user in (None, place[job_id].user):
                return place[job_id]
        raise NotFound(f"There is no job {job_id}.", "Check the number.")

    def __enter__(self) -> "FakeBroker":
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                request = protocol.request_adapter.validate_json(self.rfile.readline())
                fake.requests.append(request)
                try:
                    answer = protocol.Answer(result=fake.answer(request))
                except CarmeError as error:
                    answer = protocol.Answer(error=protocol.Failure.of(error))
                self.wfile.write(answer.model_dump_json().encode() + b"\n")
                if isinstance(request, protocol.OpenFiles) and answer.error is None:
                    fake.run_files(self.connection)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self.socket.unlink(missing_ok=True)
        self._server = Server(str(self.socket), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.socket.unlink(missing_ok=True)
