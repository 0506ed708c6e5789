"""Clients of the broker, for plain and for asyncio programs. Each call has its own connection."""

import asyncio
import os
import socket as sockets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from carme.bookings import Hold, Window
from carme.broker import protocol
from carme.broker.protocol import EventBatch, JobFacts, LogPart, Overview, Recipe, Script, StartEstimate
from carme.config import load
from carme.errors import BrokerTimeout, BrokerUnavailable, InvalidRequest
from carme.jobs import Access, Cluster, Forecast, Job, JobRequest, Reservation, Stage, refusal
from carme.projects import Grant, ProjectAccount
from carme.reports import JobWarning, Report
from carme.sessions import Extension, Session, SessionNote

__all__ = ["AsyncBrokerClient", "BrokerClient", "open_files"]

TIMEOUT = 60.0  # seconds


def _request(kind: Callable[..., protocol.Request], values: dict[str, Any]) -> protocol.Request:
    try:
        return kind(**values)
    except ValidationError as error:
        raise refusal(error, protocol.Answer) from None


def _line(request: protocol.Request) -> bytes:
    line = request.model_dump_json().encode() + b"\n"
    if len(line) > protocol.MAXIMUM_LINE:
        raise InvalidRequest(
            f"The request has {len(line)} bytes; at most {protocol.MAXIMUM_LINE} are allowed.",
            "Put large values into a file and name the file.",
        )
    return line


def _patience(request: protocol.Request, timeout: float) -> float:
    return timeout + (request.wait if isinstance(request, protocol.GetEvents) else 0)


def _result(request: protocol.Request, line: bytes, socket: Path) -> Any:
    if not line.endswith(b"\n"):
        raise _gone(socket, "it closed the connection without an answer")
    try:
        answer = protocol.Answer.model_validate_json(line)
        if answer.error:
            raise answer.error.error()
        return request.result.validate_python(answer.result)
    except ValidationError:
        raise _gone(socket, "its answer is not what this version of Carme expects") from None


def _gone(socket: Path, why: object, kind: type[BrokerUnavailable] = BrokerUnavailable) -> BrokerUnavailable:
    return kind(
        f"The broker at {socket} does not answer: {why}.",
        "Try again in a moment; an administrator finds the cause with 'systemctl status carme-broker'.",
    )


def _failed(socket: Path, error: OSError) -> BrokerUnavailable:
    if isinstance(error, TimeoutError):
        return _gone(socket, "it took too long", BrokerTimeout)
    return _gone(socket, (error.strerror or str(error)).lower())


def open_files(broker: "BrokerClient", user: str) -> sockets.socket:
    """For services: a connection to a user's files, as `carme.files` speaks it; the caller closes it.

    Raises what the methods of BrokerClient do.
    """
    request = _request(protocol.OpenFiles, {"user": user})
    connection = sockets.socket(sockets.AF_UNIX)
    try:
        connection.settimeout(broker.timeout)
        connection.connect(str(broker.socket))
        connection.sendall(_line(request))
        # Byte by byte: what follows the line is no longer the broker's.
        answer = bytearray()
        while not answer.endswith(b"\n") and (byte := connection.recv(1)):
            answer += byte
        _result(request, bytes(answer), broker.socket)
    except OSError as error:
        connection.close()
        raise _failed(broker.socket, error) from None
    except BaseException:
        connection.close()
        raise
    return connection


class BrokerClient:
    """The broker, for a plain program.

    Args:
        socket: The broker's Unix socket; by default the one that `carme.toml` names.
        timeout: Seconds without an answer, beyond the time that a request itself waits.

    Every method raises `BrokerUnavailable` when there is no broker (`BrokerTimeout` when it takes too long
    and may still do what it was asked), and what the broker refuses as `InvalidRequest`, `Denied`, `NotFound`
    or `SlurmError`.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT) -> None:
        self.socket = Path(socket) if socket is not None else load().broker.socket
        self.timeout = timeout

    def submit(self, request: JobRequest, user: str | None = None) -> int:
        """Start a job; its id. `user`: for services and root, whose job it is."""
        return self._ask(protocol.Submit, request=request, user=user)

    def bring(
        self,
        name: str,
        stage: list[Stage],
        partition: str,
        node_names: list[str],
        minutes: int,
        user: str,
        account: str | None = None,
    ) -> int | None:
        """For services: bring a user's data to nodes; the job that does, None where it is there already."""
        return self._ask(
            protocol.Bring,
            name=name,
            stage=stage,
            partition=partition,
            node_names=node_names,
            minutes=minutes,
            user=user,
            account=account,
        )

    def test(self, request: JobRequest, user: str | None = None) -> StartEstimate:
        """When the job would start, without starting it."""
        return self._ask(protocol.TestStart, request=request, user=user)

    def cancel(
        self, job_id: int, user: str | None = None, session: str | None = None, task: int | None = None
    ) -> None:
        """End a job, an array, or a `task` of one; what is over already is left as it is.

        Args:
            session: The name of the session that the job serves.
        """
        self._ask(protocol.Cancel, job_id=job_id, user=user, session=session, task=task)

    def extend(self, job_id: int, minutes: int, user: str | None = None) -> Extension:
        """Give a running job more time; InvalidRequest says why not, and how much more there is."""
        return self._ask(protocol.Extend, job_id=job_id, minutes=minutes, user=user)

    def job(self, job_id: int, user: str | None = None, task: int | None = None) -> Job:
        """One job, or a task of an array, also when it ended long ago."""
        return self._ask(protocol.GetJob, job_id=job_id, user=user, task=task)

    def jobs(self, user: str | None = None, active: bool = True) -> list[Job]:
        """Jobs in Slurm's queue; with `active=False` those too that ended minutes ago."""
        return self._ask(protocol.GetJobs, user=user, active=active)

    def history(
        self,
        user: str | None = None,
        since: datetime | None = None,
        limit: int = 200,
        until: datetime | None = None,
    ) -> list[Job]:
        """Jobs in Slurm's accounting, newest first, by default those of the last seven days."""
        return self._ask(protocol.GetHistory, user=user, since=since, until=until, limit=limit)

    def log(
        self,
        job_id: int,
        user: str | None = None,
        offset: int = 0,
        limit: int = 65_536,
        task: int | None = None,
        tail: int | None = None,
    ) -> LogPart:
        """A part of the job's output, from byte `offset`, or from where `tail` lines are left."""
        return self._ask(
            protocol.GetLog, job_id=job_id, user=user, offset=offset, limit=limit, task=task, tail=tail
        )

    def result(
        self,
        job_id: int,
        user: str | None = None,
        offset: int = 0,
        limit: int = 65_536,
        task: int | None = None,
    ) -> LogPart:
        """A part of what the job left as its result, from byte `offset`; empty as long as there is none."""
        return self._ask(protocol.GetResult, job_id=job_id, user=user, offset=offset, limit=limit, task=task)

    def facts(self, job_id: int, user: str | None = None, task: int | None = None) -> JobFacts:
        """Where a job began: its image's digest, the Git revision of its working folder."""
        return self._ask(protocol.GetFacts, job_id=job_id, user=user, task=task)

    def recipe(self, job_id: int, user: str | None = None) -> Recipe:
        """What a batch job was submitted with, without the values of its environment."""
        return self._ask(protocol.GetRecipe, job_id=job_id, user=user)

    def resubmit(
        self, job_id: int, user: str | None = None, task: int | None = None, tasks: str | None = None
    ) -> int:
        """Start a batch job once more as it was, its environment included; of an array, `task` or `tasks`.

        Returns:
            The new id.
        """
        return self._ask(protocol.Resubmit, job_id=job_id, user=user, task=task, tasks=tasks)

    def script(self, path: str, user: str | None = None) -> Script:
        """A script, read as the user; `path` is absolute or within the home directory."""
        return self._ask(protocol.GetScript, path=path, user=user)

    def cluster(self) -> Cluster:
        """Partitions and nodes, and when they were last seen."""
        return self._ask(protocol.GetCluster)

    def forecast(self) -> Forecast:
        """How many GPUs will be free in the coming days, by Slurm's plan of a minute ago at most."""
        return self._ask(protocol.GetForecast)

    def report(self, job_id: int, user: str | None = None) -> Report:
        """What a job used of what it asked for, and what to change."""
        return self._ask(protocol.GetReport, job_id=job_id, user=user)

    def warnings(self) -> list[JobWarning]:
        """For services: what the policy about alerts did last to each job of all users."""
        return self._ask(protocol.GetWarnings)

    def access(self, user: str | None = None) -> Access:
        """What Slurm lets somebody use: accounts, qualities of service, partitions, limits, and groups."""
        return self._ask(protocol.GetAccess, user=user)

    def accounts_led(self, user: str | None = None) -> list[str]:
        """The accounts whose coordinator somebody is in Slurm."""
        return self._ask(protocol.GetAccountsLed, user=user)

    def overview(self) -> Overview:
        """For observers and services: figures of the whole site, of all users."""
        return self._ask(protocol.GetOverview)

    def events(self, cursor: str | None = None, wait: float = 0.0) -> EventBatch:
        """Jobs and sessions that changed since `cursor`; waits up to `wait` seconds (at most 60) for one."""
        return self._ask(protocol.GetEvents, cursor=cursor, wait=wait)

    def sessions(self, user: str | None = None, active: bool = True) -> list[Session]:
        """Sessions, newest first; with `active=False` those too that ended in the last days."""
        return self._ask(protocol.GetSessions, user=user, active=active)

    def session(self, name: str, user: str | None = None) -> Session:
        """The newest session of this name."""
        return self._ask(protocol.GetSession, name=name, user=user)

    def note(self, job_id: int, user: str, note: SessionNote, session: str | None = None) -> None:
        """For services: what the hub knows about a user's session; `session`: its name."""
        self._ask(protocol.Note, job_id=job_id, user=user, note=note, session=session)

    def reservations(self) -> list[Reservation]:
        """Slurm's reservations that have not ended; an ordinary user's are those that they may use."""
        return self._ask(protocol.GetReservations)

    def reserve(self, hold: Hold, user: str) -> Reservation:
        """For services: make or change the reservation of `user`'s booking, so that it is as `hold` says."""
        return self._ask(protocol.Reserve, hold=hold, user=user)

    def maintain(self, window: Window, user: str) -> Reservation:
        """For services: keep nodes for maintenance; `user`: the administrator who asked."""
        return self._ask(protocol.Maintain, window=window, user=user)

    def release(self, name: str, user: str) -> None:
        """For services: give back what a booking of `user` keeps; jobs that run in it are ended."""
        self._ask(protocol.Release, name=name, user=user)

    def projects(self) -> list[ProjectAccount]:
        """For services: the accounts of Slurm that are Carme's, with members, limits and use."""
        return self._ask(protocol.GetProjects)

    def grant(self, grant: Grant, user: str) -> ProjectAccount:
        """For services: make a project's account what `grant` says; `user`: who changed it."""
        return self._ask(protocol.PutGrant, grant=grant, user=user)

    def node(self, name: str, drain: bool, user: str, reason: str = "") -> None:
        """For services: let no more jobs start on a node (with the reason), or let them again."""
        self._ask(protocol.SetNode, name=name, drain=drain, reason=reason, user=user)

    def enrol(self, name: str, user: str) -> list[str]:
        """For services: give an account what it needs to run jobs; what had to be done, in words."""
        return self._ask(protocol.Enrol, name=name, user=user)

    def _ask(self, kind: Callable[..., protocol.Request], **values: Any) -> Any:
        request = _request(kind, values)
        line = _line(request)
        try:
            with sockets.socket(sockets.AF_UNIX) as connection:
                connection.settimeout(_patience(request, self.timeout))
                connection.connect(str(self.socket))
                connection.sendall(line)
                with connection.makefile("rb") as stream:
                    answer = stream.readline()
        except OSError as error:
            raise _failed(self.socket, error) from None
        return _result(request, answer, self.socket)


class AsyncBrokerClient:
    """The same as `BrokerClient`, for asyncio programs."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT) -> None:
        self.socket = Path(socket) if socket is not None else load().broker.socket
        self.timeout = timeout

    async def submit(self, request: JobRequest, user: str | None = None) -> int:
        """Start a job; its id. `user`: for services and root, whose job it is."""
        return await self._ask(protocol.Submit, request=request, user=user)

    async def bring(
        self,
        name: str,
        stage: list[Stage],
        partition: str,
        node_names: list[str],
        minutes: int,
        user: str,
        account: str | None = None,
    ) -> int | None:
        """For services: bring a user's data to nodes; the job that does, None where it is there already."""
        return await self._ask(
            protocol.Bring,
            name=name,
            stage=stage,
            partition=partition,
            node_names=node_names,
            minutes=minutes,
            user=user,
            account=account,
        )

    async def test(self, request: JobRequest, user: str | None = None) -> StartEstimate:
        """When the job would start, without starting it."""
        return await self._ask(protocol.TestStart, request=request, user=user)

    async def cancel(
        self, job_id: int, user: str | None = None, session: str | None = None, task: int | None = None
    ) -> None:
        """End a job, an array, or a `task` of one; what is over already is left as it is.

        Args:
            session: The name of the session that the job serves.
        """
        await self._ask(protocol.Cancel, job_id=job_id, user=user, session=session, task=task)

    async def extend(self, job_id: int, minutes: int, user: str | None = None) -> Extension:
        """Give a running job more time; InvalidRequest says why not, and how much more there is."""
        return await self._ask(protocol.Extend, job_id=job_id, minutes=minutes, user=user)

    async def job(self, job_id: int, user: str | None = None, task: int | None = None) -> Job:
        """One job, or a task of an array, also when it ended long ago."""
        return await self._ask(protocol.GetJob, job_id=job_id, user=user, task=task)

    async def jobs(self, user: str | None = None, active: bool = True) -> list[Job]:
        """Jobs in Slurm's queue; with `active=False` those too that ended minutes ago."""
        return await self._ask(protocol.GetJobs, user=user, active=active)

    async def history(
        self,
        user: str | None = None,
        since: datetime | None = None,
        limit: int = 200,
        until: datetime | None = None,
    ) -> list[Job]:
        """Jobs in Slurm's accounting, newest first, by default those of the last seven days."""
        return await self._ask(protocol.GetHistory, user=user, since=since, until=until, limit=limit)

    async def log(
        self,
        job_id: int,
        user: str | None = None,
        offset: int = 0,
        limit: int = 65_536,
        task: int | None = None,
        tail: int | None = None,
    ) -> LogPart:
        """A part of the job's output, from byte `offset`, or from where `tail` lines are left."""
        return await self._ask(
            protocol.GetLog, job_id=job_id, user=user, offset=offset, limit=limit, task=task, tail=tail
        )

    async def result(
        self,
        job_id: int,
        user: str | None = None,
        offset: int = 0,
        limit: int = 65_536,
        task: int | None = None,
    ) -> LogPart:
        """A part of what the job left as its result, from byte `offset`; empty as long as there is none."""
        return await self._ask(
            protocol.GetResult, job_id=job_id, user=user, offset=offset, limit=limit, task=task
        )

    async def facts(self, job_id: int, user: str | None = None, task: int | None = None) -> JobFacts:
        """Where a job began: its image's digest, the Git revision of its working folder."""
        return await self._ask(protocol.GetFacts, job_id=job_id, user=user, task=task)

    async def recipe(self, job_id: int, user: str | None = None) -> Recipe:
        """What a batch job was submitted with, without the values of its environment."""
        return await self._ask(protocol.GetRecipe, job_id=job_id, user=user)

    async def resubmit(
        self, job_id: int, user: str | None = None, task: int | None = None, tasks: str | None = None
    ) -> int:
        """Start a batch job once more as it was, its environment included; of an array, `task` or `tasks`.

        Returns:
            The new id.
        """
        return await self._ask(protocol.Resubmit, job_id=job_id, user=user, task=task, tasks=tasks)

    async def script(self, path: str, user: str | None = None) -> Script:
        """A script, read as the user; `path` is absolute or within the home directory."""
        return await self._ask(protocol.GetScript, path=path, user=user)

    async def cluster(self) -> Cluster:
        """Partitions and nodes, and when they were last seen."""
        return await self._ask(protocol.GetCluster)

    async def forecast(self) -> Forecast:
        """How many GPUs will be free in the coming days, by Slurm's plan of a minute ago at most."""
        return await self._ask(protocol.GetForecast)

    async def report(self, job_id: int, user: str | None = None) -> Report:
        """What a job used of what it asked for, and what to change."""
        return await self._ask(protocol.GetReport, job_id=job_id, user=user)

    async def warnings(self) -> list[JobWarning]:
        """For services: what the policy about alerts did last to each job of all users."""
        return await self._ask(protocol.GetWarnings)

    async def access(self, user: str | None = None) -> Access:
        """What Slurm lets somebody use: accounts, qualities of service, partitions, limits, and groups."""
        return await self._ask(protocol.GetAccess, user=user)

    async def accounts_led(self, user: str | None = None) -> list[str]:
        """The accounts whose coordinator somebody is in Slurm."""
        return await self._ask(protocol.GetAccountsLed, user=user)

    async def overview(self) -> Overview:
        """For observers and services: figures of the whole site, of all users."""
        return await self._ask(protocol.GetOverview)

    async def events(self, cursor: str | None = None, wait: float = 0.0) -> EventBatch:
        """Jobs and sessions that changed since `cursor`; waits up to `wait` seconds (at most 60) for one."""
        return await self._ask(protocol.GetEvents, cursor=cursor, wait=wait)

    async def sessions(self, user: str | None = None, active: bool = True) -> list[Session]:
        """Sessions, newest first; with `active=False` those too that ended in the last days."""
        return await self._ask(protocol.GetSessions, user=user, active=active)

    async def session(self, name: str, user: str | None = None) -> Session:
        """The newest session of this name."""
        return await self._ask(protocol.GetSession, name=name, user=user)

    async def note(self, job_id: int, user: str, note: SessionNote, session: str | None = None) -> None:
        """For services: what the hub knows about a user's session; `session`: its name."""
        await self._ask(protocol.Note, job_id=job_id, user=user, note=note, session=session)

    async def reservations(self) -> list[Reservation]:
        """Slurm's reservations that have not ended; an ordinary user's are those that they may use."""
        return await self._ask(protocol.GetReservations)

    async def reserve(self, hold: Hold, user: str) -> Reservation:
        """For services: make or change the reservation of `user`'s booking, so that it is as `hold` says."""
        return await self._ask(protocol.Reserve, hold=hold, user=user)

    async def maintain(self, window: Window, user: str) -> Reservation:
        """For services: keep nodes for maintenance; `user`: the administrator who asked."""
        return await self._ask(protocol.Maintain, window=window, user=user)

    async def release(self, name: str, user: str) -> None:
        """For services: give back what a booking of `user` keeps; jobs that run in it are ended."""
        await self._ask(protocol.Release, name=name, user=user)

    async def projects(self) -> list[ProjectAccount]:
        """For services: the accounts of Slurm that are Carme's, with members, limits and use."""
        return await self._ask(protocol.GetProjects)

    async def grant(self, grant: Grant, user: str) -> ProjectAccount:
        """For services: make a project's account what `grant` says; `user`: who changed it."""
        return await self._ask(protocol.PutGrant, grant=grant, user=user)

    async def node(self, name: str, drain: bool, user: str, reason: str = "") -> None:
        """For services: let no more jobs start on a node (with the reason), or let them again."""
        await self._ask(protocol.SetNode, name=name, drain=drain, reason=reason, user=user)

    async def enrol(self, name: str, user: str) -> list[str]:
        """For services: give an account what it needs to run jobs; what had to be done, in words."""
        return await self._ask(protocol.Enrol, name=name, user=user)

    async def _ask(self, kind: Callable[..., protocol.Request], **values: Any) -> Any:
        request = _request(kind, values)
        line = _line(request)
        try:
            async with asyncio.timeout(_patience(request, self.timeout)):
                answer = await self._exchange(line)
        except OSError as error:
            raise _failed(self.socket, error) from None
        return _result(request, answer, self.socket)

    async def _exchange(self, line: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            writer.write(line)
            await writer.drain()
            # Answers have no length limit, so read to the end: the broker closes after we do.
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()
