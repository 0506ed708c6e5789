"""Reads what jobs leave in their folders, and scripts; always as the user whose files they are."""

import asyncio
import codecs
from pathlib import PurePath, PurePosixPath
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from carme.broker import protocol
from carme.broker.context import Context
from carme.broker.dispatch import HandOver, handles, hands_over
from carme.broker.jobs import Jobs
from carme.broker.peers import Peer, owner_of_job, require_person
from carme.broker.protocol import JobFacts, LogPart, NetPicture, Recipe, Script
from carme.errors import CarmeError, Denied, InvalidRequest, NotFound
from carme.files import program
from carme.jobs import Job, JobRequest, log_reader, scripts
from carme.jobs.contents import from_bytes
from carme.launch import facts
from carme.launch.preparation import TASKS
from carme.slurm import UnixAccount
from carme.slurm.folder import job_folder, log_name
from carme.slurm.programs import check_home, run
from carme.translation import message as _

FACTS_BYTES = 16_384
#: What a job's program writes of its Petri net (carme_runtime.petri.live); its drawing is escaped in it.
NET_NAME, NET_BYTES = "net.json", 1 << 20
LOG_BYTES = 8192  # of a log's tail
LOG_SECONDS = 10.0  # the owner's home may hang

Noted = TypeVar("Noted", bound=BaseModel)


class FilePart(NamedTuple):
    """Bytes of a file from `start` on, and how many it has."""

    size: int
    start: int
    data: bytes


class JobFiles:
    """Reads files of jobs and of users."""

    def __init__(self, context: Context, jobs: Jobs) -> None:
        self._context = context
        self._jobs = jobs

    @handles(protocol.GetLog)
    async def log(self, peer: Peer, request: protocol.GetLog) -> LogPart:
        job = _as_task(await self._jobs.find(peer, request.job_id, request.user, request.task), request.task)
        return await self._part(job, log_name(job.task), request.offset, request.limit, request.tail)

    @handles(protocol.GetResult)
    async def result(self, peer: Peer, request: protocol.GetResult) -> LogPart:
        job = _as_task(await self._jobs.find(peer, request.job_id, request.user, request.task), request.task)
        return await self._part(job, _own(job, "result"), request.offset, request.limit)

    @handles(protocol.GetFacts)
    async def facts(self, peer: Peer, request: protocol.GetFacts) -> JobFacts:
        return await self._read_note(peer, request, facts.NAME, FACTS_BYTES, JobFacts)

    @handles(protocol.GetNet)
    async def net(self, peer: Peer, request: protocol.GetNet) -> NetPicture:
        return await self._read_note(peer, request, NET_NAME, NET_BYTES, NetPicture)

    async def _read_note(
        self,
        peer: Peer,
        request: protocol.GetFacts | protocol.GetNet,
        name: str,
        most: int,
        kind: type[Noted],
    ) -> Noted:
        """What a file in the folder of a job, or of a task, says; all defaults where it does not."""
        job = await self._jobs.find(peer, request.job_id, request.user, request.task)
        file = _own(_as_task(job, request.task), name)
        text = (await self._read_in_folder(job, file, 0, most)).data
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            return kind()  # it has not begun, is older than this, or its owner has changed it

    @handles(protocol.GetRecipe)
    async def recipe(self, peer: Peer, request: protocol.GetRecipe) -> Recipe:
        found = await self.request_of(peer, request.job_id, request.user)
        hidden = found.model_copy(update={"environment": {}})
        return Recipe(request=hidden, variables=sorted(found.environment))

    @handles(protocol.GetScript)
    async def script(self, peer: Peer, request: protocol.GetScript) -> Script:
        owner = await owner_of_job(peer, request.user, self._context.settings)
        if any(ord(letter) < 32 for letter in request.path):
            raise InvalidRequest(
                _("The path of the script holds a character that cannot be seen."),
                _("Write its path, like train.sh or /scratch/me/train.sh."),
                field="script_path",
            )
        path = PurePosixPath(owner.home) / request.path
        try:
            found = await self._read(path, owner, 0, scripts.MAXIMUM_BYTES)
        except CarmeError as error:
            raise InvalidRequest(
                error.message, _("Name a plain file that you may read."), field="script_path"
            ) from None
        if found is None:
            raise InvalidRequest(
                _("There is no script {path!r}.", path=str(path)),
                _("Write its path from your home directory, like train.sh, or the whole path."),
                field="script_path",
            )
        if found.size > scripts.MAXIMUM_BYTES or b"\0" in found.data:
            raise InvalidRequest(
                _(
                    "{path!r} is not text, or has more than {maximum_bytes} bytes.",
                    path=str(path),
                    maximum_bytes=scripts.MAXIMUM_BYTES,
                ),
                _("Name a script. To start a program, give a command."),
                field="script_path",
            )
        return Script(path=str(path), text=from_bytes(found.data))

    @hands_over(protocol.OpenFiles)
    async def open(self, peer: Peer, request: protocol.OpenFiles) -> HandOver:
        account = await asyncio.to_thread(UnixAccount.named, request.user)
        require_person(account, self._context.settings)
        return HandOver(account, [self._context.python, "-I", "-S", str(program.__file__)])

    async def request_of(self, peer: Peer, job_id: int, user: str | None) -> JobRequest:
        """What a job was submitted with, as it lies in its folder: its owner may have changed it."""
        job = await self._jobs.find(peer, job_id, user)
        if job.kind == "batch" and job.key is not None:
            size, _unused, text = await self._read_in_folder(job, "request.json", 0, protocol.MAXIMUM_LINE)
            if 0 < size <= protocol.MAXIMUM_LINE:
                request = JobRequest.read(text)
                if request.kind == "batch":
                    return request
        raise NotFound(
            _("Carme has no record of how job {job_id} was submitted.", job_id=job_id),
            _("Carme has such a record of the batch jobs that it started, as long as their folder exists."),
        )

    async def log_tail(self, job: Job) -> str:
        """The end of a job's log. Raises CarmeError, TimeoutError."""
        file = log_name(None)
        async with asyncio.timeout(LOG_SECONDS):
            size = (await self._part(job, file, 0, 1)).size
            return (await self._part(job, file, max(0, size - LOG_BYTES), LOG_BYTES)).text

    async def _part(self, job: Job, file: str, offset: int, limit: int, tail: int | None = None) -> LogPart:
        size, start, part = await self._read_in_folder(job, file, offset, limit, tail)
        return log_part(part, start, size)

    async def _read_in_folder(
        self, job: Job, file: str, offset: int, limit: int, tail: int | None = None
    ) -> FilePart:
        """A part of a file in a job's folder; nothing when there is no such file."""
        if job.key is None:
            raise NotFound(
                _("Carme did not start job {job_id}, so it does not know where its log is.", job_id=job.id),
                _("Look for it where the job's own script put it."),
            )
        owner = await asyncio.to_thread(UnixAccount.named, job.user)
        if owner.uid < self._context.settings.broker.minimum_uid:
            raise Denied(
                _(
                    "Job {job_id} belongs to the system account {owner_name}.",
                    job_id=job.id,
                    owner_name=owner.name,
                )
            )
        path = job_folder(owner, job.key) / file
        return await self._read(path, owner, offset, limit, tail) or FilePart(0, 0, b"")

    async def _read(
        self, path: PurePath, owner: UnixAccount, offset: int, limit: int, tail: int | None = None
    ) -> FilePart | None:
        """The same of any file, read as `owner`; None when there is no such file.

        With `tail` it begins where so many lines are left.
        """
        check_home(owner)
        async with self._context.programs.slot(owner.uid):
            done = await run(
                *[self._context.python, "-I", "-S", str(log_reader.__file__)],
                *[str(path), str(offset), str(limit)],
                *([] if tail is None else [str(tail)]),
                owner=owner,
            )
        if done.code == log_reader.NO_LOG:
            return None
        place, _unused, part = done.output.partition(b"\n")
        size, _unused, start = place.partition(b" ")
        if done.code != 0 or not size.isdigit():
            raise CarmeError(
                _(
                    "The file {path} cannot be read: {errors}.",
                    path=path,
                    errors=done.errors.strip()[:200] or "the reader failed",
                ),
                _("Check that the file is yours and that your home directory can be reached."),
                code="log",
            )
        return FilePart(int(size), int(start), part)


def _as_task(job: Job, task: int | None) -> Job:
    """What stands for several tasks that wait, as the one that was requested."""
    return job if task is None else job.model_copy(update={"task": task})


def _own(job: Job, file: str) -> str:
    """Where a file that a job makes lies in its folder: a task has its own in that of the array."""
    return file if job.task is None else f"{TASKS}/{job.task}/{file}"


def log_part(part: bytes, offset: int, size: int) -> LogPart:
    """A part that ends within a character leaves that one to the next part."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(part)
    rest = len(decoder.getstate()[0])
    return LogPart(text=text, offset=min(offset, size) + len(part) - rest, size=size)
