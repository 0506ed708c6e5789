"""Looks after running sessions: one round for all of them."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from time import monotonic

from jupyterhub import orm
from jupyterhub.user import UserDict
from sqlalchemy import func

from carme.sessions import Ending, ServerStatus, Session, SessionNote, SessionState
from carme.translation import message as _
from carme_spawner.spawner import CarmeSpawner
from carme_spawner.watcher import JobWatcher, has_ended

#: Seconds without a report, which servers send every 30 s, after which the hub looks for a server.
SILENCE = 90.0
#: Seconds for which a session may be unknown to the hub; a start is known when the broker has answered.
STRAY = 60.0
_UNKNOWN = _(
    "The hub had lost its record of this session, so nobody could reach it and its job "
    "was ended; start it again, and tell an administrator if that happens often."
)
#: Seconds between two rounds, and servers that are looked for at the same time.
ROUND, AT_ONCE = 10.0, 32


class OrphanCleanup:
    """Finds servers that do not answer any more, or again, and ends jobs that serve nobody.

    Args:
        users: JupyterHub's users.
        watcher: What is known about jobs.
    """

    def __init__(self, users: UserDict, watcher: JobWatcher) -> None:
        self._users = users
        self._watcher = watcher
        self._places = asyncio.Semaphore(AT_ONCE)
        self._strays: dict[int, float] = {}
        self._ending: dict[int, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Go round for ever."""
        while True:
            try:
                await self.round()
            except Exception:
                # Whatever one round trips over, the next one must still come.
                self._watcher.log.exception("A round through the sessions failed.")
            await asyncio.sleep(ROUND)

    async def round(self) -> None:
        """Look at every session. Strays are ended beside it, which takes as long as Slurm is away."""
        self._ending = {job_id: task for job_id, task in self._ending.items() if not task.done()}
        for session in self._confirmed_strays():
            if session.job_id not in self._ending:
                self._ending[session.job_id] = asyncio.create_task(self._end(session))
        await asyncio.gather(*(self._find_server(spawner) for spawner in self.silent()))

    def silent(self) -> Iterator[CarmeSpawner]:
        """Servers that have not reported for long, or did not answer when they were checked."""
        limit = monotonic() - SILENCE
        for spawner in self._spawners():
            session = spawner.known_session()
            if session is not None and session.state is SessionState.SUSPENDED:
                continue  # it cannot answer, and comes back by itself
            if spawner.routed and spawner.ready and (spawner.last_contact < limit or not spawner.reachable):
                yield spawner

    def strays(self) -> list[Session]:
        """Sessions whose job runs although the hub has no server for them.

        An earlier hub process ended before it knew its job, or before it could end it. What is to end anyway
        the broker cancels again. A session that was submitted before this database had any user is of another
        database, as on a new head before its backup is restored: it goes on.
        """
        database_start = self._database_start()
        known = {spawner.job_id for spawner in self._spawners()}
        return [
            session
            for session in self._watcher.sessions()
            if not session.is_over
            and session.state is not SessionState.STOPPING
            and str(session.job_id) not in known
            and (job := self._watcher.find(session.job_id))
            and not has_ended(job)
            and database_start is not None
            and (job.submitted is None or job.submitted >= database_start)
        ]

    def _database_start(self) -> datetime | None:
        """When the first user came into the hub's database, to the second as Slurm's times; None without."""
        first: datetime | None = self._users.db.query(func.min(orm.User.created)).scalar()
        return first and first.replace(microsecond=0, tzinfo=UTC)

    def _confirmed_strays(self) -> list[Session]:
        now, found = monotonic(), self.strays()
        self._strays = {each.job_id: self._strays.get(each.job_id, now) for each in found}
        return [each for each in found if now - self._strays[each.job_id] >= STRAY]

    def _spawners(self) -> Iterator[CarmeSpawner]:
        for user in list(self._users.values()):
            for spawner in list(user.spawners.values()):
                if isinstance(spawner, CarmeSpawner):
                    yield spawner

    async def _find_server(self, spawner: CarmeSpawner) -> None:
        async with self._places:
            await spawner.find_server()

    async def _end(self, session: Session) -> None:
        note = SessionNote(server=ServerStatus.STOPPING, ending=Ending.LOST, message=_UNKNOWN)
        await self._watcher.end(session.job_id, session.owner, session.name, note)
