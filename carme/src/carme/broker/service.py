"""What the broker does for each request."""

import asyncio
import codecs
import secrets
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel, ValidationError

from carme.broker import protocol
from carme.broker.access import Peer, acting_for, owner_of_job
from carme.broker.audit import AuditLog
from carme.broker.protocol import EventBatch, LogPart
from carme.broker.watch import Watch
from carme.config import Settings
from carme.errors import CarmeError, Denied, InvalidRequest, NotFound, SlurmError
from carme.images import ImageCatalogue
from carme.jobs import (
    Job,
    JobRequest,
    JobState,
    StartEstimate,
    check,
    partition_of,
    reading,
    refusal,
    share,
)
from carme.slurm import Order, Slurm, UnixAccount
from carme.slurm.commands import job_folder
from carme.slurm.programs import run

HISTORY = timedelta(days=7)  # how far back `history` goes by default
PROGRAMS_AT_ONCE = 16  # run as users; protects this host
ACCOUNTING_AT_ONCE = 4  # questions to slurmdbd; protects the cluster


class Broker:
    """Answers the requests of identified peers.

    Args:
        python: The interpreter of the small programs that run as users.
    """

    def __init__(self, settings: Settings, slurm: Slurm, watch: Watch, python: str = sys.executable) -> None:
        self._settings = settings
        self._slurm = slurm
        self._watch = watch
        self._python = python
        self._images = ImageCatalogue(settings.images.directory)
        self._audit = AuditLog(settings.broker.audit_log)
        self._programs = asyncio.Semaphore(PROGRAMS_AT_ONCE)
        self._accounting = asyncio.Semaphore(ACCOUNTING_AT_ONCE)

    def prepare(self) -> None:
        """Make what must be there before the first request. Raises OSError."""
        self._audit.prepare()

    async def answer(self, peer: Peer, line: bytes) -> Any:
        """The result of one request line. Raises what the peer is to be told."""
        request = _parse(line)
        try:
            return await self._answer(peer, request)
        except Denied as error:
            user = getattr(request, "user", None)
            self._audit.record(peer, request.method, user, "denied", message=error.message)
            raise

    async def _answer(self, peer: Peer, request: protocol.Request) -> Any:
        match request:
            case protocol.Submit():
                return await self._submit(peer, request.request, request.user)
            case protocol.TestStart():
                return await self._test(peer, request.request, request.user)
            case protocol.Cancel():
                return await self._cancel(peer, request.job_id, request.user)
            case protocol.GetJob():
                return await self._job(peer, request.job_id, request.user)
            case protocol.GetJobs():
                return await self._jobs(peer, request.user, request.active)
            case protocol.GetHistory():
                return await self._history(peer, request)
            case protocol.GetLog():
                return await self._log(peer, request)
            case protocol.GetCluster():
                return self._watch.cluster()
            case protocol.GetEvents():
                return await self._events(peer, request)

    async def _submit(self, peer: Peer, request: JobRequest, user: str | None) -> int:
        what = {
            "name": request.name,
            "kind": request.kind,
            "image": request.image,
            "partition": request.partition,
            "nodes": request.nodes,
            "gpus_per_node": request.gpus_per_node,
            "gpu_type": request.gpu_type,
            "minutes": request.minutes,
        }
        owner = await owner_of_job(peer, user, self._settings)
        order = None
        try:
            order = self._order(request)
            async with self._programs:
                job_id = await self._slurm.submit(order, owner)
        except CarmeError as error:
            if order and error.code == "slurm-away":
                self._watch.abandon(order.key, owner)  # Slurm may have taken it all the same
            self._audit.record(peer, "submit", owner.name, error.code, message=error.message, **what)
            raise
        self._audit.record(peer, "submit", owner.name, "ok", job_id=job_id, key=order.key, **what)
        await self._watch.add(
            Job(
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
            )
        )
        return job_id

    async def _test(self, peer: Peer, request: JobRequest, user: str | None) -> StartEstimate:
        owner = await owner_of_job(peer, user, self._settings)
        order = self._order(request)
        async with self._programs:
            return await self._slurm.estimate(order, owner)

    def _order(self, request: JobRequest) -> Order:
        cluster = self._watch.cluster()
        check(request, cluster, self._images, self._settings)
        part = share(request, cluster, self._settings)
        return Order(
            key=secrets.token_hex(16),
            request=request,
            partition=partition_of(request, cluster, self._settings).name,
            account=request.account or self._settings.slurm.default_account,
            share=part,
            spec={
                "name": request.name,
                "kind": request.kind,
                "image": str(self._images.get(request.image).file) if request.image else None,
                "command": request.command,
                "nodes": request.nodes,
                "cpus": part.cpus,
                "gpus": request.gpus_per_node,
                "gpu_type": request.gpu_type,
                "workdir": request.workdir,
                "binds": [str(path) for path in self._settings.sessions.bind],
            },
        )

    async def _cancel(self, peer: Peer, job_id: int, user: str | None) -> None:
        job = await self._job(peer, job_id, user)
        if job.is_over:
            return
        owner = await asyncio.to_thread(UnixAccount.named, job.user)
        try:
            if owner.uid < self._settings.broker.minimum_uid:
                raise Denied(
                    f"Job {job_id} belongs to the system account {owner.name}.", "Cancel it with 'scancel'."
                )
            async with self._programs:
                await self._slurm.cancel(job_id, owner)
        except CarmeError as error:
            self._audit.record(peer, "cancel", job.user, error.code, job_id=job_id, message=error.message)
            raise
        self._audit.record(peer, "cancel", job.user, "ok", job_id=job_id)
        self._watch.hurry()

    async def _job(self, peer: Peer, job_id: int, user: str | None) -> Job:
        account = await acting_for(peer, user, self._settings)
        job = self._watch.job(job_id)
        if job is None:
            try:
                async with self._accounting:
                    job = await self._slurm.accounted(job_id)
            except SlurmError as error:
                if error.code != "no-accounting":
                    raise
        # Whose job it is must not be told to others, so that is the same answer.
        if job is None or (account is not None and job.user != account.name):
            whose = f" of {account.name}" if account else ""
            raise NotFound(
                f"There is no job {job_id}{whose}.", "See 'carme jobs --history' for the jobs that there are."
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
        async with self._accounting:
            return await self._slurm.history(account.name if account else None, since, request.limit)

    async def _log(self, peer: Peer, request: protocol.GetLog) -> LogPart:
        job = await self._job(peer, request.job_id, request.user)
        if job.key is None:
            raise NotFound(
                f"Job {job.id} was not started by Carme, so its log is not known.",
                "Look for it where the job's own script put it.",
            )
        owner = await asyncio.to_thread(UnixAccount.named, job.user)
        if owner.uid < self._settings.broker.minimum_uid:
            raise Denied(f"Job {job.id} belongs to the system account {owner.name}.")
        path = job_folder(owner, job.key) / "output.log"
        async with self._programs:
            done = await run(
                *[self._python, "-I", "-S", str(reading.__file__)],
                *[str(path), str(request.offset), str(request.limit)],
                owner=owner,
            )
        if done.code == reading.NO_LOG:
            return LogPart(text="", offset=0, size=0)
        size, _, part = done.output.partition(b"\n")
        if done.code != 0 or not size.isdigit():
            raise CarmeError(
                f"The log {path} cannot be read: {done.errors.strip()[:200] or 'the reader failed'}.",
                "See that the file is yours and that your home directory can be reached.",
                code="log",
            )
        return log_part(part, request.offset, int(size))

    async def _events(self, peer: Peer, request: protocol.GetEvents) -> EventBatch:
        user = None if peer.trusted else peer.account.name
        return await self._watch.events(request.cursor, request.wait, user)


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
        if len(where) > 1 and where[1] == "request":
            raise refusal(error, JobRequest, skip=2) from None
        raise refusal(error, _METHODS.get(str(where[0]) if where else "", protocol.Answer), skip=1) from None


_METHODS: dict[str, type[BaseModel]] = {
    kind.model_fields["method"].default: kind for kind in protocol.Request.__args__
}
