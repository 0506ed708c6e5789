"""The JupyterHub spawner whose servers are Slurm jobs."""

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from time import monotonic, time
from typing import Any

from batchspawner import SlurmSpawner
from batchspawner.api import BatchSpawnerAPIHandler
from jupyterhub import orm
from jupyterhub.apihandlers import default_handlers
from jupyterhub.httpclient import fetch
from sqlalchemy.orm import Session as Database
from sqlalchemy.orm import object_session
from traitlets import Float, Instance, Integer, List, Unicode, default

from carme.broker import AsyncBrokerClient
from carme.config import SessionSettings, Settings
from carme.errors import BrokerTimeout, BrokerUnavailable, CarmeError, NotFound, SlurmError
from carme.jobs import Job, JobRequest, JobState, SessionOptions
from carme.sessions import Ending, Mark, ServerStatus, Session, SessionNote, SessionState, Step
from carme.translation import joined
from carme.translation import message as _
from carme_spawner import waiting
from carme_spawner.certificates import issue
from carme_spawner.idle import IdleWatch
from carme_spawner.names import server_name
from carme_spawner.notes import mark, moment
from carme_spawner.reports import Activity
from carme_spawner.spawn_progress import progress_event, refusal
from carme_spawner.watcher import JobWatcher, has_ended, job_name, serves

# Importing batchspawner installs an API with which a server's own token sets any attribute of its spawner,
# commands that the hub executes among them. It must not exist; ours take what they name, and nothing else.
default_handlers[:] = [entry for entry in default_handlers if entry[1] is not BatchSpawnerAPIHandler]

#: Seconds between two polls of a job about which no event came.
LONGEST_SILENCE = 2.0
#: What a certificate has beyond the longest wait in the queue and the session's longest time.
RESERVE = timedelta(days=30)
#: Seconds that a broker gets to come back which ended during a submission, or starts together with the hub.
BROKERS_RETURN = 20
#: Seconds that a server gets to answer the hub.
ANSWER = 5.0
#: Seconds that the broker gets to report how a job ended; it reads the job's log for up to 10 of them.
LAST_REPORT = 12.0

#: Cancellations that outlive the request that they belong to.
_background: set[asyncio.Task[None]] = set()


def in_background(task: asyncio.Task[None]) -> None:
    """Let a task end by itself."""
    _background.add(task)
    task.add_done_callback(_background.discard)


class CarmeSpawner(SlurmSpawner):
    """A session: a Slurm job that runs the single-user server in an Apptainer container.

    Of batchspawner it keeps the class and the state (`job_id`); how a job is submitted, watched and ended
    goes through the broker, so that the hub needs neither sudo nor a shell nor Slurm's commands.
    """

    settings = Instance(Settings, help="The site's configuration.").tag(config=True)
    stop_timeout = Float(60.0, help="Seconds after which a stop returns although the job is not over.").tag(
        config=True
    )

    # Nothing of the hub's own environment belongs into a user's job.
    env_keep = List(Unicode(), []).tag(config=True)

    token_id = Integer(0)
    #: What distinguishes this server from all others, see `carme_spawner.names`.
    identity = Unicode()
    address: tuple[str, int] | None = None
    #: Whether the proxy leads to the server.
    routed = False
    #: Whether the server answered when it was last looked for, None after a restart of the hub, as what the
    #: last one noted may not have arrived; and when it was last heard of (`time.monotonic`).
    reachable: bool | None = True
    last_contact = 0.0
    idle = Instance(IdleWatch, ())
    #: What the broker was notified of the idleness; None if this hub has reported none.
    reported_idle: tuple[float | None, float | None] | None = None
    #: The hub itself ends its job: it is idle, or lost.
    being_ended = False
    #: Why the hub ends a start.
    failure = ""
    #: Key and certificate of the server, until its job has them.
    files: Mapping[str, str] = {}

    @default("default_url")
    def _lab(self) -> str:
        return "/lab"

    @property
    def broker(self) -> AsyncBrokerClient:
        return self.watcher.broker

    @property
    def watcher(self) -> JobWatcher:
        return JobWatcher.shared(str(self.settings.broker.socket), self.log)

    @property
    def session_name(self) -> str:
        """The name of the session, which no other of this user has."""
        return self.name or "default"

    @property
    def changes(self) -> asyncio.Event:
        """Set by the next change of the job, of its session, or of what is known about its server."""
        return self.watcher.hold(int(self.job_id))

    @property
    def database(self) -> Database:
        database = object_session(self.orm_spawner)
        assert database is not None
        return database

    @property
    def ready(self) -> bool:
        """Whether the server can be used; JupyterHub would also say so of a start that was just given up."""
        return self.address is not None and super().ready

    # -- what is requested

    @default("apply_user_options")
    def _options_are_read_by_request(self) -> Callable[["CarmeSpawner", dict[str, Any]], None]:
        return lambda spawner, options: None

    def get_env(self) -> dict[str, str]:
        """The server's environment; it holds its token and travels in the job's private folder only."""
        environment = super().get_env()
        # The server itself finds out where it can listen.
        environment.pop("JUPYTERHUB_SERVICE_URL", None)
        if re.fullmatch(r"[a-z]{2}", language := str((self.user_options or {}).get("language"))):
            environment["CARME_LANGUAGE"] = language
        return {name: str(value) for name, value in environment.items()}

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Nothing: who the user is and where their home lies, the job's own node knows."""
        return env

    def options(self) -> SessionOptions:
        """What the user requested, completed by the site's defaults.

        Raises:
            InvalidRequest: The options are not `SessionOptions`.
        """
        site = self.settings
        options = self.user_options or {}
        policy = site.session_policy(str(options.get("partition") or site.slurm.default_partition))
        minutes = min(site.sessions.default_minutes, policy.maximum_minutes)
        requested = {"image": site.images.default, "minutes": minutes, **options}
        # That is the server's, see `get_env`; the job itself has none.
        requested.pop("language", None)
        return SessionOptions.read(requested)

    def request(self) -> JobRequest:
        """The job that this server needs. Raises InvalidRequest."""
        return self.options().request(
            name=job_name(self.session_name),
            command=["carme-singleuser"],
            environment=self.get_env(),
            files=self.files,
        )

    def policy(self) -> SessionSettings:
        """The rules for sessions in this one's partition."""
        job = self.watcher.find(int(self.job_id))
        return self.settings.session_policy(job.partition if job else "")

    # -- JupyterHub's interface

    async def create_certs(self) -> dict[str, str]:
        """A key and a certificate for this server alone, on its way to the job; no file on this host."""
        self.identity = secrets.token_hex(16)
        policies = (self.settings.session_policy(name) for name in ("", *self.settings.partitions))
        longest = max(policy.maximum_minutes for policy in policies)
        self.files = issue(
            self.internal_certs_location,
            self.internal_trust_bundles["notebooks-ca"],
            self.identity,
            waiting.LONGEST_WAIT + timedelta(minutes=longest) + RESERVE,
        )
        return {}

    async def move_certs(self, paths: dict[str, str]) -> dict[str, str]:  # pyright: ignore  untyped base
        """Nothing: the environment names no files, the server knows where its job has them."""
        return paths

    async def start(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  the base is untyped
        """Submit the job and wait until its server has reported; returns the server's URL.

        Raises:
            SpawnException: The request was refused, or the job ended first; its message says why.
        """
        self.forget_old_servers()
        token = orm.APIToken.find(self.database, self.api_token)
        assert token is not None
        self.token_id = token.id
        # If the hub ends before the broker has answered, the next one can look for the job.
        self.save_state()
        try:
            self.job_id = str(await self.submit(self.request()))
            self.log.info("%s is job %s", self._log_name, self.job_id)
            # Before anything else can fail: a hub that restarts now must find the job.
            self.save_state()
            self.note(server=ServerStatus.STARTING)
            return await self.until_ready()
        except CarmeError as error:
            raise refusal(error) from None
        finally:
            self.files = {}

    async def submit(self, request: JobRequest) -> int:
        """Start the job; if the user gives up while the broker is at it, end it again."""
        submission = asyncio.create_task(self._submit(request))
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:

            async def undo() -> None:
                await self.end(await submission, Ending.STOPPED)

            in_background(asyncio.create_task(undo()))
            raise

    async def _submit(self, request: JobRequest) -> int:
        """Start the job, also if the broker ends while it is at it and another one takes its place.

        What a broker has started ends with it, so what is not in Slurm's queue afterwards will not come.
        """
        try:
            return await self.broker.submit(request, self.user.name)
        except BrokerTimeout:
            raise  # it may still be at it
        except BrokerUnavailable:
            await asyncio.sleep(1)
        job_id = await self.submitted()
        if job_id is None:
            return await self.broker.submit(request, self.user.name)
        self.log.info("%s had been submitted when the broker ended", self._log_name)
        return job_id

    async def submitted(self) -> int | None:
        """The job of this session in Slurm's queue; the broker gets some time to come back.

        Raises:
            BrokerUnavailable: It did not.
            SlurmError: It did, but could not look at Slurm yet.
        """
        for left in reversed(range(BROKERS_RETURN)):
            try:
                jobs = await self.broker.jobs(self.user.name)
                return max((job.id for job in jobs if serves(job, self.session_name)), default=None)
            except (BrokerUnavailable, SlurmError):
                if not left:
                    raise
            await asyncio.sleep(1)
        return None

    async def find_submission(self) -> None:
        """Take up the job of a start whose answer an earlier hub process did not live to see."""
        try:
            job_id = await self.submitted()
        except CarmeError as error:
            self.log.warning("%s: whether it was submitted is not known. %s", self._log_name, error)
            return
        if job_id is not None:
            self.log.info("%s had been submitted when the hub ended", self._log_name)
            self.job_id = str(job_id)
            self.save_state()
            self.note(server=ServerStatus.STARTING)

    async def until_ready(self) -> str:
        """Wait for the server's report; returns its URL.

        Raises:
            CarmeError: The job ended first, or has waited in the queue for `waiting.LONGEST_WAIT`.
        """
        overdue, longest = False, waiting.longest_start(self.options(), self.settings)
        while True:
            self.renumber()
            job_id = int(self.job_id)
            changed, job = self.changes, self.watcher.find(job_id)
            if self.address and not (job and has_ended(job)):
                host, port = self.address
                self.save_state()
                return f"https://{server_name(host, self.identity)}:{port}"
            try:
                job = await self.watcher.look_up(job_id, self.user.name, self.session_name)
            except NotFound:
                if self.renumber():
                    continue
                raise CarmeError(
                    _("Slurm does not know the session's job {job_id} any more.", job_id=self.job_id),
                    _("Start the session again."),
                ) from None
            if job and has_ended(job):
                if self.renumber():
                    continue
                raise await self.death(job)
            if job and waiting.is_too_long(job):
                self.failure = waiting.given_up().text
                raise waiting.given_up()
            if not overdue and job and job.started and datetime.now(UTC) - job.started > longest:
                # Its node may have lost the job without Slurm's knowledge. It may yet report, so it stays.
                overdue = True
                self.log.warning("%s runs as job %s and has not reported", self._log_name, job_id)
                self.note(server=ServerStatus.UNREACHABLE)
            await self.silence(changed)

    def renumber(self) -> bool:
        """Take up the new number of a job that Slurm had lost and the broker submitted again."""
        number = self.watcher.successor(int(self.job_id), self.user.name, self.session_name)
        if number == int(self.job_id):
            return False
        self.log.info("%s is now job %s instead of %s", self._log_name, number, self.job_id)
        self.watcher.release(int(self.job_id))
        self.job_id = str(number)
        self.save_state()
        return True

    async def silence(self, event: asyncio.Event) -> None:
        """Wait for a change, but not forever: what is unknown is looked up again."""
        # Not `wait_for`, which in Python 3.11 loses a cancellation that comes together with the change.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_SILENCE):
                await event.wait()

    async def death(self, job: Job) -> CarmeError:
        """Why a job ended before its server was there: the broker's report, with the end of the log."""
        deadline = monotonic() + LAST_REPORT
        changed, session = self.changes, self.known_session()
        while (not (session and session.is_over) or session.log_pending) and monotonic() < deadline:
            await self.silence(changed)
            changed, session = self.changes, self.known_session()
        if session and session.is_over:
            label = _("{label}.", label=_(session.label))
            return CarmeError(joined([label, session.sentence]), code="session-ended")
        return CarmeError(
            _(
                "The session's job {job_id} ended before its server was ready: {explanation}",
                job_id=job.id,
                explanation=job.explanation or job.state,
            ),
            _("Start the session again."),
            code="session-ended",
        )

    def known_session(self) -> Session | None:
        """What the broker says about this session."""
        return self.watcher.session(int(self.job_id)) if self.job_id else None

    async def poll(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]  as above
        """None while the job lives or nothing is known about it, else its exit code."""
        if not self.job_id:
            return 0
        self.watcher.hold(int(self.job_id))
        try:
            job = await self.watcher.look_up(int(self.job_id), self.user.name, self.session_name)
        except NotFound:
            return 1
        # While a job is being ended, its server still takes what open pages save.
        if job is None or not job.is_over:
            return None
        return job.exit_code or 0

    def start_polling(self) -> None:
        """Notify JupyterHub at once when the job has ended; nothing is polled."""
        self.watcher.listen(int(self.job_id), self._check_job)
        self._check_job()

    def stop_polling(self) -> None:
        """Notify JupyterHub no more."""
        if self.job_id:
            self.watcher.ignore(int(self.job_id))

    def _check_job(self) -> None:
        job = self.watcher.find(int(self.job_id))
        # Without callbacks nobody is there yet to clean up; `add_poll_callback` looks again.
        if self._callbacks and (job is None or job.is_over or not serves(job, self.session_name)):
            in_background(asyncio.create_task(self._end_of_job()))
            return
        session = self.known_session()
        if self.being_ended or not (job and session):
            return
        waits = job.is_pending and job.state is not JobState.CONFIGURING
        if waits and session.state is SessionState.LOST:
            # Slurm was restarted with an old state and would start a second server that nobody knows about.
            self.being_ended = True
            note = SessionNote(server=ServerStatus.STOPPING, ending=Ending.LOST, message=waiting.PUT_BACK)
            in_background(
                asyncio.create_task(self.watcher.end(session.job_id, self.user.name, session.name, note))
            )

    async def _end_of_job(self) -> None:
        await self.poll_and_notify()

    def add_poll_callback(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Called by JupyterHub as soon as the proxy leads to the server."""
        super().add_poll_callback(callback, *args, **kwargs)
        if not self.routed:
            self.routed = True
            self.last_contact = monotonic()
            self.save_state()
            self.note(server=ServerStatus.READY, marks=(Mark(step=Step.ROUTED, at=datetime.now(UTC)),))
        self.start_polling()

    async def stop(self, now: bool = False) -> None:
        """End the job and wait until it is over, or `stop_timeout`; fine if it is over already."""
        if not self.job_id:
            return
        job_id, failure = int(self.job_id), self.failure
        if self.address and not self.routed:
            host, port = self.address
            failure = _(
                "The hub could not reach the session's server at {host} port {port}; ask an administrator "
                "to allow connections from the hub to the compute nodes.",
                host=host,
                port=port,
            )
        ending = asyncio.create_task(self.end(job_id, Ending.STOPPED, failure))
        in_background(ending)
        try:
            async with asyncio.timeout(self.stop_timeout):
                # Shielded: even if nobody waits any more, the job has to end.
                await asyncio.shield(ending)
                while not now:
                    changed = self.changes
                    if await self.poll() is not None:
                        break
                    await self.silence(changed)
        except TimeoutError:
            self.log.warning("Job %s of %s is not over yet; it is being ended", job_id, self._log_name)

    async def end(self, job_id: int, ending: Ending, failure: str = "") -> None:
        """Cancel a job, once the broker knows why."""
        note = SessionNote(server=ServerStatus.STOPPING, ending=None if failure else ending, message=failure)
        await self.watcher.end(job_id, self.user.name, self.session_name, note)

    async def progress(self) -> AsyncGenerator[dict[str, Any], None]:
        """Where the start stands, in the broker's words."""
        last = None
        while True:
            changed = self.changes if self.job_id else asyncio.Event()
            step = progress_event(self.known_session())
            if step != last:
                yield step
                last = step
            await self.silence(changed)

    # -- what the server reports

    def report_ready(self, host: str, port: int, marks: Mapping[Step, float]) -> bool:
        """Take the address at which the server listens; False if it has reported another one before."""
        if not self.job_id or (self.address and self.address != (host, port)):
            return False
        self.address = (host, port)
        self.watcher.changed(int(self.job_id))
        self.note(marks=tuple(mark(step, at) for step, at in marks.items()))
        return True

    def report_activity(self, report: Activity) -> None:
        """Take what the server does: it lives, and it is in use or not."""
        self.last_contact = monotonic()
        if self.routed and not self.reachable:
            self.found()
        if report.first_page is not None:
            self.note(marks=(mark(Step.FIRST_PAGE, report.first_page),))
        now = time()
        busy = (report.kernels, report.terminals, report.gpus, report.ranks)
        self.idle.take((*busy, now) if report.busy_since_last else busy, self.policy(), now)
        if self.reported_idle != (self.idle.since, self.idle.stops):
            self.reported_idle = (self.idle.since, self.idle.stops)
            self.note(idle_since=moment(self.idle.since), stops_idle=moment(self.idle.stops))
        if self.idle.due and not self.being_ended:
            self.being_ended = True
            self.log.info("%s is stopped for being idle", self._log_name)
            # JupyterHub hears of it as of any other end of the job.
            in_background(asyncio.create_task(self.end(int(self.job_id), Ending.IDLE)))

    async def find_server(self) -> None:
        """Find out whether the server still answers, and notify the broker when that has changed."""
        server = self.server
        if server is None:
            return  # it has ended
        try:
            async with asyncio.timeout(ANSWER):
                await fetch(server.url + "api", raise_for_status=False, allow_redirects=False)
        except Exception as error:  # whatever is wrong with the way to it
            if self.reachable is not False and self.routed:
                self.reachable = False
                self.log.warning("%s does not answer: %s", self._log_name, error or type(error).__name__)
                self.note(server=ServerStatus.UNREACHABLE)
        else:
            self.last_contact = monotonic()
            if self.routed and not self.reachable:
                self.found()

    async def report_sign_out(self) -> None:
        """Let the server close the connections of those who have just signed out."""
        server = self.server
        if server is None:
            return
        try:
            async with asyncio.timeout(ANSWER):
                await fetch(server.url + "carme/logins", method="POST", allow_redirects=False)
        except Exception as error:  # whatever is wrong with the way to it
            self.log.warning(
                "%s was not notified that %s signed out: %s",
                self._log_name,
                self.user.name,
                error or type(error).__name__,
            )

    def found(self) -> None:
        """The server answers, which the broker may not know."""
        self.reachable = True
        self.log.info("%s answers", self._log_name)
        self.note(server=ServerStatus.READY)

    def note(self, **what: Any) -> None:
        """Notify the broker, in the background; the arguments are those of `SessionNote`."""
        self.watcher.notes.send(int(self.job_id), self.user.name, self.session_name, SessionNote(**what))

    # -- what outlives the hub

    @property
    def was_submitting(self) -> bool:
        """Its job was to be submitted, and whether it was is not known."""
        return bool(self.token_id) and not self.job_id

    @property
    def is_waiting(self) -> bool:
        """Its job was submitted, but the proxy does not lead to its server yet."""
        return bool(self.job_id) and not self.routed

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier hub process saved."""
        super().load_state(state)
        self.token_id = state.get("token_id", 0)
        self.identity = state.get("identity", "")
        self.routed = state.get("routed", False)
        self.reachable = None if self.routed else True
        address = state.get("address")
        self.address = (address[0], address[1]) if address else None

    def get_state(self) -> dict[str, Any]:
        """What a later hub process needs. No secret: the token is named by its number."""
        state = super().get_state()
        if self.token_id:
            state |= {
                "token_id": self.token_id,
                "identity": self.identity,
                "address": self.address,
                "routed": self.routed,
            }
        return state

    def clear_state(self) -> None:
        """Forget the job; what it held as its key to the hub is void."""
        if self.job_id:
            self.note(server=ServerStatus.GONE)
            self.watcher.release(int(self.job_id))
        if self.token_id and (token := self.database.get(orm.APIToken, self.token_id)):
            self.database.delete(token)
            self.database.commit()
        super().clear_state()
        self.token_id = 0
        self.address = None
        self.routed = self.being_ended = False
        self.reachable = True
        self.idle = IdleWatch()
        self.reported_idle = None

    def save_state(self) -> None:
        self.orm_spawner.state = self.get_state()
        self.database.commit()

    def forget_old_servers(self) -> None:
        """Delete the user's named servers that ended more than a day ago; each session has its own name."""
        limit = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)
        for name, record in list(self.user.orm_spawners.items()):
            wrapper = self.user.spawners.get(name) if name in self.user.spawners else None
            in_use = record.server is not None or (wrapper is not None and wrapper.active)
            if name and name != self.name and not in_use and (record.last_activity or limit) <= limit:
                self.user.spawners.pop(name, None)
                self.database.delete(record)
        self.database.commit()
