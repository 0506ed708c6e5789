"""What the broker does for each request."""

import asyncio
import codecs
import contextlib
import logging
import secrets
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from carme.broker import protocol
from carme.broker.access import Peer, acting_for, owner_of_job, require_person
from carme.broker.accesses import Accesses
from carme.broker.audit import AuditLog
from carme.broker.bookings import Bookings
from carme.broker.enrolment import enrol
from carme.broker.extensions import Extensions
from carme.broker.feed import Feed
from carme.broker.overview import Overview, SessionFigures
from carme.broker.policy import Policy, itself
from carme.broker.projects import Projects
from carme.broker.protocol import EventBatch, JobFacts, LogPart, Recipe, Script
from carme.broker.records import Record
from carme.broker.reports import Reports
from carme.broker.sessions import SessionBook
from carme.broker.shares import Shares
from carme.broker.staging import (
    ahead,
    bringer,
    check_stages,
    constraint,
    data_line,
    features,
    is_bringer_of,
    prefer,
)
from carme.broker.store import Store
from carme.broker.watch import Watch
from carme.config import Settings
from carme.errors import CarmeError, Denied, InvalidRequest, NotFound, SlurmError
from carme.files import program
from carme.images import ImageCatalogue
from carme.jobs import (
    Forecast,
    Job,
    JobRequest,
    JobState,
    Reservation,
    StartEstimate,
    arrays,
    check,
    forecast,
    partition_of,
    reading,
    refusal,
    scripts,
    share,
)
from carme.jobs.contents import from_bytes
from carme.jobs.nodes import expand
from carme.launch import facts
from carme.launch.job import TASKS
from carme.projects import ProjectAccount
from carme.reports import Report
from carme.sessions import Ending, Extension, ServerStatus
from carme.slurm import Order, Slurm, UnixAccount
from carme.slurm.commands import job_folder, log_name
from carme.slurm.programs import run
from carme.wording import nearest

_log = logging.getLogger("carme.broker")

FACTS_BYTES = 16_384
LOG_BYTES = 8192  # of the end of a failed session's log
LOG_SECONDS = 10.0  # the owner's home may hang
DATA_SECONDS = 2.0  # between two looks at how far the data of waiting jobs is
TIDY_SECONDS = 3600.0
FORECAST_AGE = timedelta(minutes=1)
HISTORY = timedelta(days=7)  # how far back `history` goes by default
PROGRAMS_AT_ONCE, PROGRAMS_OF_ONE_USER = 16, 4  # run as users; protects this host
ACCOUNTING_AT_ONCE, ACCOUNTING_OF_ONE_USER = 4, 2  # questions to slurmdbd; protects the cluster


class FilePart(NamedTuple):
    """Bytes of a file from `start` on, and how many it has."""

    size: int
    start: int
    data: bytes


class HandOver(NamedTuple):
    """The peer's connection becomes that of a program which runs as a user."""

    account: UnixAccount
    arguments: list[str]


class Broker:
    """Answers the requests of identified peers.

    Args:
        python: The interpreter of the small programs that run as users.
    """

    def __init__(self, settings: Settings, slurm: Slurm, python: str = sys.executable) -> None:
        self._settings = settings
        self._slurm = slurm
        self._feed = Feed()
        self._book = SessionBook(Store(settings.broker.state_directory), self._feed)
        self._watch = Watch(slurm, settings.slurm.poll_seconds, self._feed, self._book)
        self._extensions = Extensions(settings, slurm, self._book.records.known)
        self._bookings = Bookings(settings, slurm)
        self._projects = Projects(slurm)
        self._accesses = Accesses(slurm)
        self._reports = Reports(settings, slurm, self._watch, self._feed)
        #: What jobs held when it was made, and the forecast.
        self._told_forecast: tuple[frozenset[tuple[int, str]], Forecast] | None = None
        self._reserved: tuple[datetime, list[Reservation]] | None = None
        self._python = python
        #: Features of the nodes to which a job brings data, as long as the job that follows is not led there.
        self._led: dict[int, list[str]] = {}
        self._images = ImageCatalogue(settings.images.directory)
        self._audit = AuditLog(settings.broker.audit_log)
        self._policy = Policy(settings, self._watch, self._audit, self._stop_by_policy)
        self._programs = Shares(PROGRAMS_AT_ONCE, PROGRAMS_OF_ONE_USER)
        self._accounting = Shares(ACCOUNTING_AT_ONCE, ACCOUNTING_OF_ONE_USER)

    async def prepare(self) -> None:
        """Make what must be there before the first request. Raises OSError, CarmeError."""
        self._audit.prepare()
        self._watch.remember(await self._book.open())

    async def run(self) -> None:
        """Watch Slurm until cancelled, then keep what is known."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch.run())
                tasks.create_task(self._read_last_words())
                tasks.create_task(self._tidy())
                tasks.create_task(self._reports.run())
                tasks.create_task(self._policy.run())
                tasks.create_task(self._follow_data())
        finally:
            await self._book.close()

    async def _tidy(self) -> None:
        while True:
            self._book.expire()
            await self._book.save()
            await asyncio.sleep(TIDY_SECONDS)

    async def _read_last_words(self) -> None:
        """Read the ends of the logs of sessions that failed by themselves."""
        while True:
            since = self._feed.change
            await asyncio.gather(*map(self._read_last_words_of, self._book.without_log()))
            await self._feed.wait(since, protocol.MAXIMUM_WAIT, lambda: bool(self._book.without_log()))

    async def _follow_data(self) -> None:
        """Tell how far the data of waiting jobs is, and have those jobs follow it to its nodes."""
        while True:
            await asyncio.sleep(DATA_SECONDS)
            with contextlib.suppress(CarmeError):
                jobs = [job for job in self._watch.jobs() if job.key and job.is_active]
                told = {}
                for job in [one for one in jobs if one.is_pending and one.reason == "Dependency"]:
                    first = next((one for one in jobs if is_bringer_of(one, job)), None)
                    if first is not None and first.is_running:
                        told[job.id] = await self._told_by(first)
                        await self._lead(job, first)
                self._watch.data_is(told)
                ids = {job.id for job in jobs}
                self._led = {key: value for key, value in self._led.items() if key in ids}

    async def _told_by(self, job: Job) -> str:
        """The last line about the data in the log of the job that brings it."""
        try:
            async with asyncio.timeout(LOG_SECONDS):
                size = (await self._part_of_log(job, 0, 1)).size
                text = (await self._part_of_log(job, max(0, size - LOG_BYTES), LOG_BYTES)).text
        except (CarmeError, TimeoutError):
            return ""
        return data_line(text)

    async def _lead(self, job: Job, first: Job) -> None:
        """Have a job prefer the nodes to which its data is on its way; whether it came, they tell."""
        wanted = self._led.get(first.id)
        if not wanted or not first.node_list:
            return
        self._led[first.id] = []
        try:
            for node in expand(first.node_list):
                await self._slurm.add_features(node, wanted)
            await self._slurm.set_preference(job.id, "&".join(wanted))
        except SlurmError as error:
            _log.warning("Job %s is not led to its data: %s", job.id, error)

    async def _read_last_words_of(self, job: Job) -> None:
        text = ""
        try:
            async with asyncio.timeout(LOG_SECONDS):
                size = (await self._part_of_log(job, 0, 1)).size
                text = (await self._part_of_log(job, max(0, size - LOG_BYTES), LOG_BYTES)).text
        except (CarmeError, TimeoutError) as error:
            _log.info("The log of job %s is not told: %s", job.id, error or "it took too long")
        self._book.logged(job.id, text)
        await self._feed.tell()
        await self._book.save()

    async def answer(self, peer: Peer, line: bytes) -> Any:
        """The result of one request line. Raises what the peer is to be told."""
        try:
            request = _parse(line)
        except InvalidRequest as error:
            self._audit.record(peer, "malformed", None, error.code)
            raise
        try:
            return await self._answer(peer, request)
        except (Denied, NotFound) as error:
            # Services look for jobs that Slurm has forgotten; a user who asks for others' is worth a line.
            if isinstance(error, Denied) or not peer.trusted:
                about = {name: getattr(request, name, None) for name in ("user", "job_id")}
                self._audit.record(peer, request.method, result=error.code, message=error.message, **about)
            raise

    async def _answer(self, peer: Peer, request: protocol.Request) -> Any:
        match request:
            case protocol.Submit():
                return await self._submit(peer, request.request, request.user)
            case protocol.Bring():
                return await self._bring(peer, request)
            case protocol.TestStart():
                return await self._test(peer, request.request, request.user)
            case protocol.Cancel():
                return await self._cancel(peer, request.job_id, request.user, request.session, request.task)
            case protocol.Extend():
                return await self._extend(peer, request)
            case protocol.GetJob():
                return await self._job(peer, request.job_id, request.user, request.task)
            case protocol.GetJobs():
                return await self._jobs(peer, request.user, request.active)
            case protocol.GetHistory():
                return await self._history(peer, request)
            case protocol.GetLog() | protocol.GetResult():
                return await self._log(peer, request)
            case protocol.GetFacts():
                return await self._facts(peer, request)
            case protocol.GetRecipe():
                request_ = await self._request_of(peer, request.job_id, request.user)
                hidden = request_.model_copy(update={"environment": {}})
                return Recipe(request=hidden, variables=sorted(request_.environment))
            case protocol.Resubmit():
                job = await self._job(peer, request.job_id, request.user, request.task)
                again = await self._request_of(peer, job.id, request.user)
                task = job.task if job.id != job.array_id else None
                if request.tasks is not None:
                    if again.array is None:
                        raise InvalidRequest(
                            f"Job {job.id} is no array, so it has no tasks.",
                            "Submit it again without naming tasks.",
                            field="tasks",
                        )
                    again = again.model_copy(update={"array": arrays.limited(request.tasks, again.array)})
                elif (task := task if request.task is None else request.task) is not None:
                    again = again.model_copy(update={"array": str(task)})
                return await self._submit(peer, again, job.user)
            case protocol.GetScript():
                return await self._script(peer, request)
            case protocol.GetCluster():
                return self._watch.cluster()
            case protocol.GetForecast():
                return await self._forecast()
            case protocol.GetReport():
                return await self._report(peer, request.job_id, request.user)
            case protocol.GetWarnings():
                _require_service(peer, "see the warnings of all users")
                return self._policy.warnings()
            case protocol.GetReservations():
                return self._may_use(peer, await self._bookings.reservations())
            case protocol.Reserve():
                return await self._reserve(peer, request)
            case protocol.Maintain():
                return await self._maintain(peer, request)
            case protocol.Release():
                return await self._release(peer, request)
            case protocol.GetAccess():
                return await self._accesses.of(await owner_of_job(peer, request.user, self._settings))
            case protocol.GetAccountsLed():
                return await self._accounts_led(peer, request.user)
            case protocol.GetProjects():
                _require_service(peer, "see projects")
                return await self._projects.accounts()
            case protocol.PutGrant():
                return await self._grant(peer, request)
            case protocol.SetNode():
                return await self._set_node(peer, request)
            case protocol.Enrol():
                return await self._enrol(peer, request)
            case protocol.GetOverview():
                return self._overview(peer)
            case protocol.GetEvents():
                return await self._events(peer, request)
            case protocol.GetSessions():
                account = await acting_for(peer, request.user, self._settings)
                return self._book.sessions(account and account.name, request.active)
            case protocol.GetSession():
                account = await acting_for(peer, request.user, self._settings)
                return self._book.session(request.name, account and account.name)
            case protocol.Note():
                return await self._note(peer, request)
            case protocol.OpenFiles():
                return await self._files(peer, request.user)

    async def _submit(self, peer: Peer, request: JobRequest, user: str | None) -> int:
        what = {
            "name": request.name,
            "kind": request.kind,
            "image": request.image,
            "image_file": request.image_file and request.image_file.model_dump(),
            "partition": request.partition,
            "account": request.account,
            "qos": request.qos,
            "nodes": request.nodes,
            "gpus_per_node": request.gpus_per_node,
            "gpu_type": request.gpu_type,
            "minutes": request.minutes,
        }
        if request.array:
            what["array"] = request.array
        if request.stage:
            what["stage"] = [f"{stage.target}:{stage.source}" for stage in request.stage]
        owner = await owner_of_job(peer, user, self._settings)
        order = None
        try:
            order = await self._order(request, owner)
            if request.stage:
                order = await self._with_data(order, owner)
            async with self._programs.take(owner.uid):
                job_id = await self._submit_order(order, owner)
        except CarmeError as error:
            if order and error.code == "slurm-away":
                self._watch.abandon(order.key, owner)  # Slurm may have taken it all the same
            if order and order.after is not None:
                await self._end_bringer(order.after, owner)
            self._audit.record(peer, "submit", owner.name, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "submit", owner.name, "ok", job_id=job_id, key=order.key, **what)
        await self._watch.add(self._submitted(order, owner, job_id))
        return job_id

    async def _bring(self, peer: Peer, request: protocol.Bring) -> int | None:
        """Have a job bring data to nodes; the one that does already, where there is one of this name."""
        _require_service(peer, "bring data to booked nodes")
        what = {"name": request.name, "nodes": request.node_names}
        what["stage"] = [f"{stage.target}:{stage.source}" for stage in request.stage]
        owner = await owner_of_job(peer, request.user, self._settings)
        for job in self._watch.jobs():
            if job.key and (job.user, job.name, job.is_active) == (owner.name, request.name, True):
                return job.id
        try:
            asked = JobRequest(
                name=request.name,
                kind="batch",
                command=["-"],
                partition=request.partition,
                account=request.account,
                nodes=len(request.node_names),
                minutes=request.minutes,
                stage=request.stage,
            )
            order = await self._order(asked, owner)
            order = ahead(order, request.node_names, owner, await self._watch.look_at_nodes())
            if order is None:
                return None
            async with self._programs.take(owner.uid):
                job_id = await self._start(order, owner)
        except CarmeError as error:
            self._audit.record(peer, "bring", owner.name, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "bring", owner.name, "ok", job_id=job_id, **what)
        await self._watch.add(self._submitted(order, owner, job_id))
        return job_id

    def _submitted(self, order: Order, owner: UnixAccount, job_id: int) -> Job:
        """A job as it is at first."""
        request = order.request
        return Job(
            id=job_id,
            key=order.key,
            kind=request.kind,
            image=request.image,
            name=request.name,
            user=owner.name,
            account=order.account or "",
            partition=order.partition,
            state=JobState.PENDING,
            nodes=request.nodes,
            gpus=request.nodes * request.gpus_per_node,
            gpu_type=request.gpu_type,
            cpus=request.nodes * order.share.cpus,
            memory_mb=request.nodes * order.share.memory_mb,
            minutes_limit=request.minutes,
            submitted=datetime.now(UTC).replace(microsecond=0),
            **(arrays.fields(job_id, request.array) if request.array else {}),
        )

    async def _submit_order(self, order: Order, owner: UnixAccount) -> int:
        try:
            return await self._start(order, owner)
        except SlurmError as error:
            if not order.prefer or error.code == "slurm-away":
                raise
            # The copies may be gone since the last look, and Slurm knows no such nodes any more.
            return await self._start(replace(order, prefer=""), owner)

    async def _start(self, order: Order, owner: UnixAccount) -> int:
        """Submit a job. It is on record before Slurm has it: the broker may end before the answer comes."""
        request, records = order.request, self._book.records
        known = {"key": order.key, "user": owner.name, "name": request.name, "image": request.image}
        known |= {"kind": request.kind, "array": request.array or "", "submitted": datetime.now(UTC)}
        records.begin(Record.model_validate(known))
        await self._book.save()
        try:
            job_id = await self._slurm.submit(order, owner)
        except CarmeError as error:
            if error.code != "slurm-away":
                records.refused(order.key)
            raise
        records.took(order.key, job_id)
        return job_id

    async def _with_data(self, order: Order, owner: UnixAccount) -> Order:
        """The order, which begins when a job of its own, submitted here, has brought the data."""
        # Copies come and go faster than the picture is renewed.
        cluster = await self._watch.look_at_nodes()
        order = replace(order, prefer=prefer(order, owner, cluster))
        first = bringer(order, owner, cluster)
        if first is None:
            return order
        async with self._programs.take(owner.uid):
            job_id = await self._start(first, owner)
        self._led[job_id] = features(order, owner)
        await self._watch.add(self._submitted(first, owner, job_id))
        return replace(order, after=job_id)

    async def _end_bringer(self, job_id: int, owner: UnixAccount) -> None:
        """End the job that brings data for one that is not to run any more."""
        with contextlib.suppress(CarmeError):
            self._watch.unwanted(job_id)
            async with self._programs.take(owner.uid):
                await self._slurm.cancel(str(job_id), owner)

    async def _test(self, peer: Peer, request: JobRequest, user: str | None) -> StartEstimate:
        owner = await owner_of_job(peer, user, self._settings)
        order = await self._order(request, owner)
        async with self._programs.take(owner.uid):
            return await self._slurm.estimate(order, owner)

    async def _order(self, request: JobRequest, owner: UnixAccount) -> Order:
        cluster = self._watch.cluster()
        check(request, cluster, self._images, self._settings, await self._accesses.of(owner))
        check_stages(request, self._settings)
        staging = self._settings.staging
        part = share(request, cluster, self._settings)
        file, digest = self._image_of(request)
        return Order(
            key=secrets.token_hex(16),
            request=request,
            partition=partition_of(request, cluster, self._settings).name,
            account=request.account or self._settings.slurm.default_account,
            share=part,
            constraint=constraint(request),
            spec={
                "name": request.name,
                "kind": request.kind,
                "image": file,
                "image_name": request.image,
                "digest": digest,
                "own_image": request.image_file is not None,
                "command": request.command,
                "nodes": request.nodes,
                "cpus": part.cpus,
                "gpus": request.gpus_per_node,
                "gpu_type": request.gpu_type,
                "workdir": request.workdir,
                "binds": [str(path) for path in self._settings.sessions.bind],
                "stage": [stage.model_dump() | {"key": stage.key} for stage in request.stage],
                "results": request.results,
                "array": request.array is not None,
                "staging": staging.model_dump(mode="json"),
            },
        )

    def _image_of(self, request: JobRequest) -> tuple[str | None, str]:
        """The file that a job runs in, and the digest that it has, or must have if it is a user's own."""
        if request.image is None:
            return None, ""
        if request.image_file is not None:
            return request.image_file.file, request.image_file.digest
        image = self._images.get(request.image)
        return str(image.file), image.digest

    async def _cancel(
        self, peer: Peer, job_id: int, user: str | None, session: str | None, task: int | None = None
    ) -> None:
        if session is not None:
            account = await acting_for(peer, user, self._settings)
            job_id = self._book.job_of(job_id, account and account.name, session)
        job = await self._job(peer, job_id, user, task)
        # An array's number means all of it, although the last of its tasks to start has the same.
        whole = task is None and job.array_id == job.id
        over = job.is_over
        if whole:
            over = not any(one.is_active for one in self._watch.jobs() if one.array_id == job.id)
        if over:
            return
        name = job.slurm_name
        if whole:
            name = str(job_id)
        elif task is not None:
            name = arrays.task_name(job_id, task)
        owner = await asyncio.to_thread(UnixAccount.named, job.user)
        what = {"job_id": job_id} | ({"task": name} if task is not None else {})
        try:
            if owner.uid < self._settings.broker.minimum_uid:
                raise Denied(
                    f"Job {job_id} belongs to the system account {owner.name}.", "Cancel it with 'scancel'."
                )
            # A service that names no user acts for an administrator.
            by_admin = peer.trusted and user is None
            ending = Ending.CANCELLED_BY_ADMIN if by_admin else Ending.STOPPED
            with self._book.cancelling(job_id, ending):
                self._watch.unwanted(job_id)
                async with self._programs.take(owner.uid):
                    await self._slurm.cancel(name, owner)
        except CarmeError as error:
            self._audit.record(peer, "cancel", job.user, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "cancel", job.user, "ok", **what)
        alone = job.array_id is None or whole  # else other tasks may still want the data
        for other in [
            one for one in self._watch.jobs() if one.is_active and is_bringer_of(one, job) and alone
        ]:
            await self._end_bringer(other.id, owner)
        await self._feed.tell()
        await self._book.save()
        self._watch.hurry()

    async def _extend(self, peer: Peer, request: protocol.Extend) -> Extension:
        job = await self._job(peer, request.job_id, request.user)
        what = {"job_id": job.id, "minutes": request.minutes}
        try:
            extension = await self._extensions.extend(job, request.minutes, self._watch.cluster())
        except CarmeError as error:
            self._audit.record(peer, "extend", job.user, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "extend", job.user, "ok", limit=extension.minutes_limit, **what)
        self._watch.hurry()
        return extension

    async def _job(self, peer: Peer, job_id: int, user: str | None, task: int | None = None) -> Job:
        account = await acting_for(peer, user, self._settings)
        job = self._watch.job(job_id) if task is None else self._watch.task(job_id, task)
        if job is None:
            try:
                async with self._accounting.take(peer.account.uid):
                    job = await self._slurm.accounted(job_id, task)
                job = job and self._book.records.known(job)
            except SlurmError as error:
                if error.code != "no-accounting":
                    raise
            else:
                if job is None and task is not None:
                    job = self._book.records.never_begun(job_id, task, account and account.name)
        # Whose job it is must not be told to others, so that is the same answer.
        if job is None or (account is not None and job.user != account.name):
            whose = f" of {account.name}" if account else ""
            name = job_id if task is None else arrays.task_name(job_id, task)
            raise NotFound(
                f"There is no job {name}{whose}.", "See 'carme jobs --history' for the jobs that there are."
            )
        return job

    async def _jobs(self, peer: Peer, user: str | None, active: bool) -> list[Job]:
        account = await acting_for(peer, user, self._settings)
        return [
            job
            for job in self._watch.jobs()
            if (account is None or job.user == account.name) and (job.is_active or not active)
        ]

    async def _history(self, peer: Peer, request: protocol.GetHistory) -> list[Job]:
        account = await acting_for(peer, request.user, self._settings)
        since = request.since or datetime.now(UTC) - HISTORY
        async with self._accounting.take(peer.account.uid):
            found = await self._slurm.history(
                account.name if account else None, since, request.limit, request.until
            )
        return list(map(self._book.records.known, found))

    async def _log(self, peer: Peer, request: protocol.GetLog | protocol.GetResult) -> LogPart:
        job = await self._job(peer, request.job_id, request.user, request.task)
        job = _as_task(job, request.task)
        if isinstance(request, protocol.GetResult):
            return await self._part_of_log(job, request.offset, request.limit, _own(job, "result"))
        return await self._part_of_log(job, request.offset, request.limit, log_name(job.task), request.tail)

    async def _part_of_log(
        self, job: Job, offset: int, limit: int, file: str = log_name(None), tail: int | None = None
    ) -> LogPart:
        size, start, part = await self._read_in_folder(job, file, offset, limit, tail)
        return log_part(part, start, size)

    async def _facts(self, peer: Peer, request: protocol.GetFacts) -> JobFacts:
        job = await self._job(peer, request.job_id, request.user, request.task)
        file = _own(_as_task(job, request.task), facts.NAME)
        text = (await self._read_in_folder(job, file, 0, FACTS_BYTES)).data
        try:
            return JobFacts.model_validate_json(text)
        except ValidationError:
            return JobFacts()  # it has not begun, is older than this, or its owner has changed it

    async def _read_in_folder(
        self, job: Job, file: str, offset: int, limit: int, tail: int | None = None
    ) -> FilePart:
        """A part of a file in a job's folder; nothing when there is no such file."""
        if job.key is None:
            raise NotFound(
                f"Job {job.id} was not started by Carme, so its log is not known.",
                "Look for it where the job's own script put it.",
            )
        owner = await asyncio.to_thread(UnixAccount.named, job.user)
        if owner.uid < self._settings.broker.minimum_uid:
            raise Denied(f"Job {job.id} belongs to the system account {owner.name}.")
        path = job_folder(owner, job.key) / file
        return await self._read(path, owner, offset, limit, tail) or FilePart(0, 0, b"")

    async def _read(
        self, path: PurePath, owner: UnixAccount, offset: int, limit: int, tail: int | None = None
    ) -> FilePart | None:
        """The same of any file, read as `owner`; None when there is no such file.

        With `tail` it begins where so many lines are left.
        """
        async with self._programs.take(owner.uid):
            done = await run(
                *[self._python, "-I", "-S", str(reading.__file__)],
                *[str(path), str(offset), str(limit)],
                *([] if tail is None else [str(tail)]),
                owner=owner,
            )
        if done.code == reading.NO_LOG:
            return None
        place, _, part = done.output.partition(b"\n")
        size, _, start = place.partition(b" ")
        if done.code != 0 or not size.isdigit():
            raise CarmeError(
                f"The file {path} cannot be read: {done.errors.strip()[:200] or 'the reader failed'}.",
                "See that the file is yours and that your home directory can be reached.",
                code="log",
            )
        return FilePart(int(size), int(start), part)

    async def _request_of(self, peer: Peer, job_id: int, user: str | None) -> JobRequest:
        """What a job was submitted with, as it lies in its folder: its owner may have changed it."""
        job = await self._job(peer, job_id, user)
        if job.kind == "batch" and job.key is not None:
            size, _, text = await self._read_in_folder(job, "request.json", 0, protocol.MAXIMUM_LINE)
            if 0 < size <= protocol.MAXIMUM_LINE:
                request = JobRequest.read(text)
                if request.kind == "batch":
                    return request
        raise NotFound(
            f"What job {job_id} was submitted with is not known (any more).",
            "It is known of batch jobs that Carme started, as long as their folder is there.",
        )

    async def _script(self, peer: Peer, request: protocol.GetScript) -> Script:
        owner = await owner_of_job(peer, request.user, self._settings)
        if any(ord(letter) < 32 for letter in request.path):
            raise InvalidRequest(
                "The path of the script holds a character that cannot be seen.",
                "Write its path, like train.sh or /scratch/me/train.sh.",
                field="script_path",
            )
        path = PurePosixPath(owner.home) / request.path
        try:
            found = await self._read(path, owner, 0, scripts.MAXIMUM_BYTES)
        except CarmeError as error:
            raise InvalidRequest(
                error.message, "Name a plain file that you may read.", field="script_path"
            ) from None
        if found is None:
            raise InvalidRequest(
                f"There is no script {str(path)!r}.",
                "Write its path from your home directory, like train.sh, or the whole path.",
                field="script_path",
            )
        if found.size > scripts.MAXIMUM_BYTES or b"\0" in found.data:
            raise InvalidRequest(
                f"{str(path)!r} is no text, or has more than {scripts.MAXIMUM_BYTES} bytes.",
                "Name a script; a program is started by a command.",
                field="script_path",
            )
        return Script(path=str(path), text=from_bytes(found.data))

    async def _note(self, peer: Peer, request: protocol.Note) -> None:
        if not peer.trusted:
            raise Denied(
                f"{peer.account.name} may not note anything about sessions; the site's services do.",
                "See your sessions with 'carme session list'.",
            )
        job_id = self._book.job_of(request.job_id, request.user, request.session)
        if request.note.server is ServerStatus.READY and self._book.is_of(job_id, request.user):
            # Who hears that a session is ready asks for its nodes and its end, which only Slurm knows.
            await self._watch.catch_up(job_id)
            job_id = self._book.job_of(request.job_id, request.user, request.session)
        self._book.note(job_id, request.user, request.note)
        await self._feed.tell()
        await self._book.save()
        if request.note.ending:
            self._audit.record(
                peer, "note", request.user, "ok", job_id=request.job_id, ending=request.note.ending
            )

    async def _report(self, peer: Peer, job_id: int, user: str | None) -> Report:
        job = await self._job(peer, job_id, user)
        async with self._accounting.take(peer.account.uid):
            report = await self._reports.report(job)
        return report.model_copy(update={"advice": [*self._policy.notices(job), *report.advice]})

    async def _stop_by_policy(self, job: Job) -> None:
        task = job.task if job.array_id == job.id else None
        await self._cancel(itself(), job.id, None, None, task)

    async def _forecast(self) -> Forecast:
        cluster, jobs = self._watch.cluster(), self._watch.jobs()
        now = datetime.now(UTC).replace(microsecond=0)
        reserved = self._reserved
        if reserved is None or now - reserved[0] > FORECAST_AGE:
            self._reserved = reserved = now, await self._bookings.reservations()
        # What is free now changes with these at once, and the plan must not contradict it.
        held = frozenset((job.id, job.node_list) for job in jobs if job.gpus and job.is_running)
        told = self._told_forecast
        if told is None or now - told[1].start > FORECAST_AGE or held != told[0]:
            self._told_forecast = told = held, forecast(cluster, jobs, reserved[1], now)
        return told[1]

    def _may_use(self, peer: Peer, reservations: list[Reservation]) -> list[Reservation]:
        if peer.trusted:
            return reservations
        return [one for one in reservations if peer.account.name in one.users]

    async def _reserve(self, peer: Peer, request: protocol.Reserve) -> Reservation:
        _require_service(peer)
        hold = request.hold
        what = {"name": hold.name, "nodes": hold.node_names, "start": hold.start.isoformat()}
        what |= {"end": hold.end.isoformat(), "users": hold.users, "accounts": hold.accounts}
        try:
            for user in {request.user, *hold.users}:
                require_person(await asyncio.to_thread(UnixAccount.named, user), self._settings)
            kept = await self._bookings.reserve(hold, self._watch.cluster())
        except CarmeError as error:
            self._audit.record(peer, "reserve", request.user, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "reserve", request.user, "ok", **what)
        return kept

    async def _maintain(self, peer: Peer, request: protocol.Maintain) -> Reservation:
        _require_service(peer, "reserve nodes for maintenance")
        window = request.window
        what = {"name": window.name, "nodes": window.node_names, "start": window.start.isoformat()}
        what |= {"end": window.end.isoformat()}
        try:
            kept = await self._bookings.maintain(window, self._watch.cluster())
        except CarmeError as error:
            self._audit.record(peer, "maintain", request.user, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "maintain", request.user, "ok", **what)
        return kept

    async def _release(self, peer: Peer, request: protocol.Release) -> None:
        _require_service(peer)
        try:
            await self._bookings.release(request.name)
        except CarmeError as error:
            result = {"name": request.name, "message": error.message}
            self._audit.record(peer, "release", request.user, error.code, **result)
            raise
        self._audit.record(peer, "release", request.user, "ok", name=request.name)
        self._watch.hurry()

    async def _files(self, peer: Peer, user: str) -> HandOver:
        if not peer.trusted:
            raise Denied(
                f"{peer.account.name} may not open others' files; the site's portal does for their owners.",
                "Use your files as they are.",
            )
        account = await asyncio.to_thread(UnixAccount.named, user)
        require_person(account, self._settings)
        return HandOver(account, [self._python, "-I", "-S", str(program.__file__)])

    async def _accounts_led(self, peer: Peer, user: str | None) -> list[str]:
        account = await acting_for(peer, user, self._settings)
        if account is None:
            return []
        async with self._accounting.take(peer.account.uid):
            return await self._slurm.accounts_led(account.name)

    async def _grant(self, peer: Peer, request: protocol.PutGrant) -> ProjectAccount:
        _require_service(peer, "change projects")
        grant = request.grant
        what = grant.model_dump(exclude_none=True)
        try:
            for user in grant.members:
                require_person(await asyncio.to_thread(UnixAccount.named, user), self._settings)
            kept = await self._projects.grant(grant, self._watch.cluster())
            self._accesses.forget()
        except CarmeError as error:
            self._audit.record(peer, "grant", request.user, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "grant", request.user, "ok", **what)
        return kept

    async def _set_node(self, peer: Peer, request: protocol.SetNode) -> None:
        _require_service(peer, "drain or resume nodes")
        what = {"name": request.name, "drain": request.drain, "reason": request.reason}
        try:
            known = {node.name for node in self._watch.cluster().nodes}
            if request.name not in known:
                raise InvalidRequest(
                    f"There is no node {request.name!r}.", nearest(request.name, known), field="name"
                )
            if request.drain and not request.reason:
                raise InvalidRequest(
                    "A node is drained for a reason.", "Say it, so that others know.", field="reason"
                )
            if request.drain:
                await self._slurm.drain_node(request.name, request.reason)
            else:
                await self._slurm.resume_node(request.name)
        except CarmeError as error:
            self._audit.record(peer, "node", request.user, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "node", request.user, "ok", **what)
        self._watch.hurry()

    async def _enrol(self, peer: Peer, request: protocol.Enrol) -> list[str]:
        _require_service(peer, "enrol users")
        try:
            account = await asyncio.to_thread(UnixAccount.named, request.name)
            require_person(account, self._settings)
            done = await enrol(account, self._slurm, self._settings)
            self._accesses.forget()
        except CarmeError as error:
            about = {"name": request.name, "message": error.message}
            self._audit.record(peer, "enrol", request.user, error.code, **about)
            raise
        self._audit.record(peer, "enrol", request.user, "ok", name=request.name, done=done)
        return done

    def _overview(self, peer: Peer) -> Overview:
        if not peer.observer:
            raise Denied(
                f"{peer.account.name} may not see figures of all users; the site's monitoring does.",
                "See your own jobs with 'carme jobs'.",
            )
        view = self._watch.overview()
        return view.model_copy(
            update={"sessions": [SessionFigures.of(session) for session in self._book.after(None, None)]}
        )

    async def _events(self, peer: Peer, request: protocol.GetEvents) -> EventBatch:
        user = None if peer.trusted else peer.account.name
        self._watch.jobs()  # raises when there is no picture
        since = self._feed.since(request.cursor)
        if since is not None and request.wait > 0:
            known = since

            def changed() -> bool:
                return bool(self._watch.after(known, user) or self._book.after(known, user))

            await self._feed.wait(since, request.wait, changed)
            since = self._feed.since(request.cursor)
        return EventBatch(
            jobs=self._watch.after(since or 0, user),
            sessions=self._book.after(since, user),
            cursor=self._feed.cursor,
            complete=since is None,
        )


def _as_task(job: Job, task: int | None) -> Job:
    """What stands for several tasks that wait, as the one that was asked about."""
    return job if task is None else job.model_copy(update={"task": task})


def _own(job: Job, file: str) -> str:
    """Where a file that a job makes lies in its folder: a task has its own in that of the array."""
    return file if job.task is None else f"{TASKS}/{job.task}/{file}"


def _require_service(peer: Peer, what: str = "make or change reservations") -> None:
    if not peer.trusted:
        raise Denied(f"{peer.account.name} may not {what}; the site's portal does.", "Use the portal.")


def log_part(part: bytes, offset: int, size: int) -> LogPart:
    """A part that ends within a character leaves that one to the next part."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(part)
    rest = len(decoder.getstate()[0])
    return LogPart(text=text, offset=min(offset, size) + len(part) - rest, size=size)


def _parse(line: bytes) -> protocol.Request:
    try:
        return protocol.request_adapter.validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        where = detail["loc"]
        if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
            raise InvalidRequest(
                "The broker does not know this method.",
                f"It knows: {', '.join(sorted(_METHODS))}.",
                field="method",
            ) from None
        # A method that takes no request may be sent one all the same.
        if where[1:2] == ("request",) and (len(where) > 2 or detail["type"] != "extra_forbidden"):
            raise refusal(error, JobRequest, skip=2) from None
        raise refusal(error, _METHODS.get(str(where[0]) if where else "", protocol.Answer), skip=1) from None


_METHODS: dict[str, type[BaseModel]] = {
    kind.model_fields["method"].default: kind for kind in protocol.Request.__args__
}
