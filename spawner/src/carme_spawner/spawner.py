"""The JupyterHub spawner whose servers are Slurm jobs."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from batchspawner import SlurmSpawner
from batchspawner.api import BatchSpawnerAPIHandler
from jupyterhub import orm
from jupyterhub.apihandlers import default_handlers
from jupyterhub.spawner import SpawnException
from sqlalchemy.orm import Session, object_session
from traitlets import Float, Integer, List, Unicode, default

from carme.broker import AsyncBrokerClient
from carme.errors import BrokerUnavailable, CarmeError, Denied, InvalidRequest, NotFound
from carme.jobs import Job, JobRequest, SessionOptions
from carme_spawner.ready import ReadyHandler
from carme_spawner.watcher import JobWatcher, has_ended

# Importing batchspawner installs an API with which a server's own token sets any attribute of its spawner,
# commands that the hub executes among them. It must not exist; ours takes port and host, nothing else.
default_handlers[:] = [entry for entry in default_handlers if entry[1] is not BatchSpawnerAPIHandler]
default_handlers.append((r"/api/carme/ready", ReadyHandler))

#: Lines and bytes of a dead job's log that the user is shown at once.
LAST_LINES, LAST_BYTES = 5, 2000
#: Seconds between two looks at a job about which no event came.
LONGEST_SILENCE = 2.0

STATUS = {InvalidRequest: 400, Denied: 403, NotFound: 404, BrokerUnavailable: 503}

#: Cancellations that outlive the request that asked for them.
_background: set[asyncio.Task[None]] = set()


def in_background(task: asyncio.Task[None]) -> None:
    """Let a task end by itself."""
    _background.add(task)
    task.add_done_callback(_background.discard)


def refusal(error: CarmeError) -> SpawnException:
    """The error as JupyterHub's API and pages show it: the same words."""
    return SpawnException(
        str(error),
        reason=error.code,
        status_code=next((s for k, s in STATUS.items() if isinstance(error, k)), 502),
    )


class CarmeSpawner(SlurmSpawner):
    """A session: a Slurm job that runs the single-user server in an Apptainer container.

    Of batchspawner it keeps the class and the state (`job_id`); how a job is submitted, watched and ended
    goes through the broker, so that the hub needs neither sudo nor a shell nor Slurm's commands.
    """

    broker_socket = Unicode("/run/carme/broker.sock", help="The broker's Unix socket.").tag(config=True)
    default_image = Unicode("torch", help="Image of a server that was started without options.").tag(
        config=True
    )
    default_minutes = Integer(60, help="Time limit of a server that was started without options.").tag(
        config=True
    )
    stop_timeout = Float(60.0, help="Seconds until a stop returns though the job is not over.").tag(
        config=True
    )

    # A job may wait in the queue for days; the broker tells at once if it dies.
    start_timeout = Integer(7 * 86_400).tag(config=True)
    # Polling is a look into memory.
    poll_interval = Integer(1).tag(config=True)
    # Nothing of the hub's own environment belongs into a user's job.
    env_keep = List(Unicode(), []).tag(config=True)

    token_id = Integer(0)
    address: tuple[str, int] | None = None

    @default("default_url")
    def _lab(self) -> str:
        return "/lab"

    @property
    def broker(self) -> AsyncBrokerClient:
        return self.watcher.broker

    @property
    def watcher(self) -> JobWatcher:
        return JobWatcher.shared(self.broker_socket, self.log)

    @property
    def news(self) -> asyncio.Event:
        """Set when the state of the job has changed or its server has reported."""
        return self.watcher.hold(int(self.job_id))

    @property
    def session(self) -> Session:
        session = object_session(self.orm_spawner)
        assert session is not None
        return session

    @property
    def ready(self) -> bool:
        """Whether the server can be used; JupyterHub would also say so of a start that was just given up."""
        return self.address is not None and super().ready

    # -- what is asked for

    @default("apply_user_options")
    def _options_are_read_by_request(self) -> Callable[["CarmeSpawner", dict[str, Any]], None]:
        return lambda spawner, options: None

    def get_env(self) -> dict[str, str]:
        """The server's environment; it holds its token and travels in the job's private folder only."""
        environment = super().get_env()
        # The server itself finds out where it can listen.
        environment.pop("JUPYTERHUB_SERVICE_URL", None)
        return {name: str(value) for name, value in environment.items()}

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Nothing: who the user is and where their home lies, the job's own node knows."""
        return env

    def request(self) -> JobRequest:
        """The job that this server needs.

        Raises:
            InvalidRequest: The options are no `SessionOptions`.
        """
        given = {"image": self.default_image, "minutes": self.default_minutes, **(self.user_options or {})}
        options = SessionOptions.read(given)
        return options.request(
            name=f"session-{self.name or 'default'}", command=["carme-singleuser"], environment=self.get_env()
        )

    # -- JupyterHub's interface

    async def start(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  the base is untyped
        """Submit the job and wait until its server has reported; returns the server's URL.

        Raises:
            SpawnException: The request was refused, or the job ended first; its message says why.
        """
        self.forget_old_servers()
        token = orm.APIToken.find(self.session, self.api_token)
        assert token is not None
        self.token_id = token.id
        # If the hub ends before the broker has answered, the next one can at least take the job its key.
        self.save_state()
        try:
            self.job_id = str(await self.submit(self.request()))
            self.log.info("%s is job %s", self._log_name, self.job_id)
            # Before anything else can fail: a hub that restarts now must find the job.
            self.save_state()
            return await self.until_ready()
        except CarmeError as error:
            raise refusal(error) from None

    async def submit(self, request: JobRequest) -> int:
        """Start the job; if the user gives up while the broker is at it, end it again."""
        submission = asyncio.create_task(self.broker.submit(request, self.user.name))
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:

            async def undo() -> None:
                await self.end(await submission)

            in_background(asyncio.create_task(undo()))
            raise

    async def until_ready(self) -> str:
        """Wait for the server's report; returns its URL.

        Raises:
            CarmeError: The job ended first.
        """
        while True:
            self.news.clear()
            if self.address:
                host, port = self.address
                self.ip, self.port = host, port
                self.save_state()
                return f"http://{f'[{host}]' if ':' in host else host}:{port}"
            try:
                job = await self.watcher.look_up(int(self.job_id), self.user.name)
            except NotFound:
                raise CarmeError(
                    f"Slurm does not know the session's job {self.job_id} any more.",
                    "Start the session again.",
                ) from None
            if job and has_ended(job):
                raise await self.death(job)
            await self.silence(self.news)

    async def silence(self, event: asyncio.Event) -> None:
        """Wait for news, but not forever: what is unknown is looked up again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), LONGEST_SILENCE)

    async def death(self, job: Job) -> CarmeError:
        """Why a job ended before its server was there."""
        for _ in range(5):
            if job.is_over:
                break
            self.news.clear()
            await self.silence(self.news)
            job = self.watcher.find(job.id) or job
        words = ""
        try:
            size = (await self.broker.log(job.id, self.user.name, 0, 1)).size
            part = await self.broker.log(job.id, self.user.name, max(0, size - LAST_BYTES), LAST_BYTES)
            words = "\n".join(part.text.strip().splitlines()[-LAST_LINES:])
        except CarmeError as error:
            self.log.info("No log of job %s: %s", job.id, error)
        why = job.explanation or f"Slurm calls it {job.state}."
        return CarmeError(
            f"The session's job {job.id} ended before its server was ready: {why}",
            f"The end of its log says:\n{words}"
            if words
            else "It has written no log; start the session again.",
            code="job-ended",
        )

    async def poll(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]  as above
        """None while the job lives or nothing is known about it, else its exit code."""
        if not self.job_id:
            return 0
        self.watcher.hold(int(self.job_id))
        try:
            job = await self.watcher.look_up(int(self.job_id), self.user.name)
        except NotFound:
            return 1
        if job is None or not has_ended(job):
            return None
        return job.exit_code or 0

    async def stop(self, now: bool = False) -> None:
        """End the job and wait until it is over, or `stop_timeout`; fine if it is over already."""
        if not self.job_id:
            return
        job_id = int(self.job_id)
        ending = asyncio.create_task(self.end(job_id))
        in_background(ending)
        try:
            async with asyncio.timeout(self.stop_timeout):
                # Shielded: even if nobody waits any more, the job has to end.
                await asyncio.shield(ending)
                while not now and await self.poll() is None:
                    event = self.news
                    event.clear()
                    await self.silence(event)
        except TimeoutError:
            self.log.warning("Job %s of %s is not over yet; it is being ended", job_id, self._log_name)

    async def end(self, job_id: int) -> None:
        """Cancel a job, as soon as the broker can be reached."""
        while True:
            try:
                await self.broker.cancel(job_id, self.user.name)
                return
            except NotFound:
                return
            except BrokerUnavailable:
                await asyncio.sleep(1)
            except CarmeError as error:
                self.log.error("Job %s of %s cannot be ended: %s", job_id, self._log_name, error)
                return

    async def progress(self) -> AsyncGenerator[dict[str, Any], None]:
        """Where the start stands, in plain words."""
        last = None
        while True:
            step = self.situation()
            if step != last:
                yield step
                last = step
            await asyncio.sleep(0.5)

    def situation(self) -> dict[str, Any]:
        """One event of `progress`."""
        if not self.job_id:
            return {"progress": 5, "message": "The session is being submitted."}
        job = self.watcher.find(int(self.job_id))
        if job is None:
            return {"progress": 10, "message": f"Job {self.job_id} was submitted."}
        if job.is_pending:
            place = self.watcher.place(job)
            message = f"Job {job.id} waits in the queue, place {place}. {job.explanation}".strip()
            return {"progress": 20, "message": message}
        if has_ended(job):
            return {"progress": 90, "message": f"Job {job.id} has ended. {job.explanation}".strip()}
        return {"progress": 60, "message": f"Job {job.id} runs on {job.node_list}; JupyterLab is starting."}

    # -- the server's report

    def report_ready(self, host: str, port: int) -> bool:
        """Take the address at which the server listens; False if it has reported another one before."""
        if not self.job_id or (self.address and self.address != (host, port)):
            return False
        self.address = (host, port)
        self.news.set()
        return True

    # -- what outlives the hub

    @property
    def is_waiting(self) -> bool:
        """Its job was submitted, but its server has not reported yet."""
        return bool(self.job_id) and self.address is None

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier hub process saved."""
        super().load_state(state)
        self.token_id = state.get("token_id", 0)
        address = state.get("address")
        self.address = (address[0], address[1]) if address else None

    def get_state(self) -> dict[str, Any]:
        """What a later hub process needs. No secret: the token is named by its number."""
        state = super().get_state()
        if self.token_id:
            state |= {"token_id": self.token_id, "address": self.address}
        return state

    def clear_state(self) -> None:
        """Forget the job; what it held as its key to the hub is void."""
        if self.job_id:
            self.watcher.release(int(self.job_id))
        if self.token_id and (token := self.session.get(orm.APIToken, self.token_id)):
            self.session.delete(token)
            self.session.commit()
        super().clear_state()
        self.token_id = 0
        self.address = None

    def save_state(self) -> None:
        self.orm_spawner.state = self.get_state()
        self.session.commit()

    def forget_old_servers(self) -> None:
        """Delete the user's named servers that ended more than a day ago; each session has its own name."""
        limit = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)
        for name, record in list(self.user.orm_spawners.items()):
            wrapper = self.user.spawners.get(name) if name in self.user.spawners else None
            in_use = record.server is not None or (wrapper is not None and wrapper.active)
            if name and name != self.name and not in_use and (record.last_activity or limit) <= limit:
                self.user.spawners.pop(name, None)
                self.session.delete(record)
        self.session.commit()
