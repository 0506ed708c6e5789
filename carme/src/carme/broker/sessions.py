"""All sessions of the site: what is known about them, kept, and reported when it changes."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from carme.broker.estimates import Estimates
from carme.broker.feed import Feed
from carme.broker.records import Records
from carme.broker.store import Changes, Store
from carme.errors import InvalidRequest, NotFound
from carme.jobs import Cluster, Job
from carme.jobs.nodes import expand
from carme.sessions import Ending, QueueEstimate, ServerStatus, Session, SessionNote, Step
from carme.sessions.facts import Facts, after_note, after_poll, has_lost_server, session_name, session_of
from carme.sessions.start_estimates import Range, estimate_start, places, used_share
from carme.translation import message as _

RETENTION = timedelta(days=14)  # after the end
MOST_OF_USER = 500  # ended sessions of one user
RECENT = timedelta(days=1)  # ended so lately, they are part of the full snapshot

_SILENT = re.compile(r"DOWN|NOT_RESPONDING|\*")


@dataclass
class _Entry:
    facts: Facts
    session: Session
    changed: int  # number of the change that made it what it is
    silent: frozenset[str] = frozenset()  # its nodes that Slurm does not hear
    estimate: QueueEstimate | None = None


class SessionBook:
    """Keeps the facts of every session, and derives what is reported from them.

    Args:
        store: Where they are kept; opened and closed by the book.
        feed: Where changes are reported.
        clock: The time, in UTC.
    """

    def __init__(
        self, store: Store, feed: Feed, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._feed = feed
        self._clock = clock
        self._entries: dict[int, _Entry] = {}
        self._unsaved: set[int] = set()
        self._forgotten: set[int] = set()
        self._wordless: set[int] = set()
        self.estimates = Estimates([])
        self.records = Records()

    async def open(self) -> list[Job]:
        """Read what was known when the broker ended; the jobs that were not over then.

        Raises:
            CarmeError: The store cannot be opened.
        """
        stored = await self._store.open()
        self.estimates = Estimates(stored.estimates)
        self.records.load(stored.since, stored.records)
        for facts in stored.sessions:
            self._entries[facts.job.id] = _Entry(facts, session_of(facts), self._feed.number())
            self.records.adopt(facts.job)
        return [facts.job for facts in stored.sessions if facts.ended is None]

    async def close(self) -> None:
        """Keep everything and close the store."""
        await self.save()
        await self._store.close()

    def sessions(self, user: str | None, active: bool) -> list[Session]:
        """The sessions of one user, or of all, newest first."""
        return [
            entry.session
            for _, entry in sorted(self._entries.items(), reverse=True)
            if (user is None or entry.session.owner == user) and not (active and entry.session.is_over)
        ]

    def session(self, name: str, user: str | None) -> Session:
        """The newest session of this name, one that is not over first. Raises NotFound."""
        found = [session for session in self.sessions(user, active=False) if session.name == name]
        if not found:
            raise NotFound(
                _("There is no session {name!r} of {user}.", name=name, user=user)
                if user
                else _("There is no session {name!r}.", name=name),
                _("See 'carme session list' for those that there are."),
            )
        return next((session for session in found if not session.is_over), found[0])

    def after(self, since: int | None, user: str | None) -> list[Session]:
        """Sessions that changed after a change, in that order; None: all that are active or ended lately."""
        recent = self._clock() - RECENT
        found = [
            entry
            for entry in self._entries.values()
            if (user is None or entry.session.owner == user)
            and (
                entry.changed > since
                if since is not None
                else entry.facts.ended is None or entry.facts.ended > recent
            )
        ]
        return [entry.session for entry in sorted(found, key=lambda entry: entry.changed)]

    def submitted(self, job: Job) -> None:
        """A job that Slurm has just taken."""
        if not session_name(job):
            return
        entry = self._entries.get(job.id)
        known = entry.facts if entry and same(entry.facts.job, job) else Facts(job=job)
        self._put(known.model_copy(update={"submitted_seen": known.submitted_seen or self._clock()}))

    def moved(self, old: Job, new: Job) -> None:
        """A session's job that Slurm had lost, and has taken again, maybe under another number."""
        if entry := self._entries.get(old.id):
            lost = (*entry.facts.lost_jobs, old.id)
            known = {"job": new, "lost_jobs": lost, "submitted_seen": self._clock()}
            if new.id != old.id:
                self.displaced(old)
                self._entries.pop(new.id, None)  # of one that ended
            self._put(entry.facts.model_copy(update=known))

    def displaced(self, job: Job) -> None:
        """Slurm has lost this job, and its number is free for another one."""
        entry = self._entries.get(job.id)
        if entry is not None and same(entry.facts.job, job):
            del self._entries[job.id]
            self._forgotten.add(job.id)
            # No change can report that it is gone: who asks next gets the full snapshot, without it.
            self._feed.forget(self._feed.number())

    def job_of(self, job_id: int, user: str | None, session: str | None) -> int:
        """The number of the job that a service means, as a session's job may have got another one.

        Args:
            user: The session's owner; None for anybody.
            session: The session's name; None when the number alone counts.

        Raises:
            NotFound: The user has no such session.
        """
        entry = self._entries.get(job_id)
        is_meant = entry is not None and entry.session.name == session and user in (None, entry.session.owner)
        if session is None or is_meant:
            return job_id
        return self.session(session, user).job_id

    def is_of(self, job_id: int, user: str) -> bool:
        """Whether a job is a session of this user."""
        entry = self._entries.get(job_id)
        return entry is not None and entry.session.owner == user

    def is_own(self, job: Job) -> bool:
        """Whether the broker submitted this session's job itself."""
        entry = self._entries.get(job.id)
        return entry is not None and same(entry.facts.job, job) and entry.facts.submitted_seen is not None

    def submissions(self, job: Job) -> int:
        """How often a session's job has been submitted."""
        entry = self._entries.get(job.id)
        return 1 + len(entry.facts.lost_jobs) if entry else 1

    def is_unwanted(self, job: Job) -> bool:
        """Whether the session of this job is over or meant to end."""
        entry = self._entries.get(job.id)
        return entry is not None and same(entry.facts.job, job) and entry.facts.is_unwanted

    def observe(self, jobs: Sequence[Job], cluster: Cluster | None, taken: datetime | None = None) -> None:
        """Process a poll of Slurm: jobs of all users and kinds, and nodes; `taken` as for `after_poll`."""
        now = self._clock()
        nodes = cluster.nodes if cluster else ()
        silent = frozenset(node.name for node in nodes if _SILENT.search(node.state))
        share, record = used_share(jobs), self.estimates.record
        sessions = [job for job in jobs if job.kind == "session" and session_name(job)]
        numbers = {job.id for job in sessions}
        place = places(jobs, lambda job: job.id in numbers) if numbers else {}
        for job in sessions:
            entry = self._entries.get(job.id)
            unheard = silent & _nodes(job.node_list) if silent else silent
            estimate = estimate_start(job, place[job.id], share, record, now) if job.id in place else None
            if entry is None or not same(entry.facts.job, job):
                # Slurm begins again at the first number when it has used up its numbers.
                self._put(after_poll(Facts(job=job), job, now), unheard, estimate)
            elif (entry.facts.job, entry.silent, entry.estimate) != (
                job,
                unheard,
                estimate,
            ) or has_lost_server(entry.facts, job, taken):
                self._put(after_poll(entry.facts, job, now, taken), unheard, estimate)
            self._score_estimate(job, estimate)

    def note(self, job_id: int, user: str, note: SessionNote) -> None:
        """Take in what the hub says about a user's session.

        Raises:
            NotFound: The job is not a session of that user.
            InvalidRequest: The note reports what only Slurm can report.
        """
        entry = self._entries.get(job_id)
        if entry is None or entry.session.owner != user:
            raise NotFound(
                _("Job {job_id} is not a session of {user}.", job_id=job_id, user=user),
                _("Note only what belongs to a session's own job."),
            )
        if any(mark.step in (Step.SUBMITTED, Step.ALLOCATED) for mark in note.marks):
            raise InvalidRequest(
                _("The marks 'submitted' and 'allocated' come from Slurm, not from a note."),
                _("Leave them out."),
                field="marks",
            )
        self._put(after_note(entry.facts, note, self._clock()), entry.silent, entry.estimate)

    @contextlib.contextmanager
    def cancelling(self, job_id: int, ending: Ending) -> Iterator[None]:
        """While a job is being cancelled for this reason; what was known before is the better one."""
        entry = self._entries.get(job_id)
        if entry is None:
            yield
            return
        before = entry.facts.ending
        if not entry.facts.is_ending:
            self._keep(entry, entry.facts.model_copy(update={"ending": before or ending}))
        try:
            yield
        except BaseException:
            self._keep(entry, entry.facts.model_copy(update={"ending": before}))
            raise
        self._put(after_note(entry.facts, SessionNote(server=ServerStatus.STOPPING)), entry.silent)

    def logged(self, job_id: int, log: str) -> None:
        """The end of the log of a session that has failed."""
        self._wordless.discard(job_id)
        if entry := self._entries.get(job_id):
            self._put(entry.facts.model_copy(update={"log": log}), entry.silent)

    def without_log(self) -> list[Job]:
        """The jobs of sessions that failed by themselves and whose logs have not been read."""
        return [self._entries[job_id].facts.job for job_id in self._wordless if job_id in self._entries]

    async def save(self) -> None:
        """Keep what has changed. Returns when it would survive the broker's end."""
        sessions = [self._entries[job_id].facts for job_id in self._unsaved if job_id in self._entries]
        forgotten = [job_id for job_id in self._forgotten if job_id not in self._entries]
        changes = Changes(sessions, forgotten, *self.estimates.take_changes(), *self.records.take_changes())
        self._unsaved.clear()
        self._forgotten.clear()
        if not await self._store.write(changes):
            self._unsaved |= {facts.job.id for facts in sessions}
            self._forgotten |= set(forgotten)
            self.estimates.restore_changes(changes.estimates, changes.dropped)
            self.records.restore_changes(changes.records, changes.unrecorded)

    def expire(self) -> None:
        """Forget sessions and jobs that ended long ago, and the oldest sessions of users with very many."""
        self.records.expire(self._clock())
        old = self._clock() - RETENTION
        ended: Counter[str] = Counter()
        for job_id, entry in sorted(self._entries.items(), reverse=True):
            if entry.facts.ended is None:
                continue
            ended[entry.session.owner] += 1
            if entry.facts.ended < old or ended[entry.session.owner] > MOST_OF_USER:
                self._feed.forget(entry.changed)
                del self._entries[job_id]
                self._forgotten.add(job_id)

    def _score_estimate(self, job: Job, estimate: QueueEstimate | None) -> None:
        if job.started:
            self.estimates.started(job.id, job.started)
        elif job.is_over:
            self.estimates.discard(job.id)
        elif estimate and estimate.earliest and estimate.latest:
            self.estimates.give(job.id, Range(estimate.earliest, estimate.latest))

    def _put(
        self, facts: Facts, silent: frozenset[str] = frozenset(), estimate: QueueEstimate | None = None
    ) -> None:
        session = session_of(facts, silent, estimate)
        facts = facts.model_copy(update={"state": session.state})
        if session.log_pending:
            self._wordless.add(facts.job.id)
        entry = self._entries.get(facts.job.id)
        if entry is None:
            self._entries[facts.job.id] = _Entry(facts, session, self._feed.number(), silent, estimate)
            self._unsaved.add(facts.job.id)
            return
        self._keep(entry, facts)
        entry.silent, entry.estimate = silent, estimate
        if session != entry.session:
            entry.session = session
            entry.changed = self._feed.number()

    def _keep(self, entry: _Entry, facts: Facts) -> None:
        if facts != entry.facts:
            entry.facts = facts
            self._unsaved.add(facts.job.id)


def same(old: Job, new: Job) -> bool:
    """Whether two snapshots of one number show the same job: Slurm may give a number again.

    Names say nothing, their owners change them; and keys are those on record (`Records`).
    """
    if old.user != new.user or old.key != new.key:
        return False
    if old.key is not None or old.submitted is None or new.submitted is None:
        return True
    return new.submitted == old.submitted or (new.submitted > old.submitted and new.restarts > old.restarts)


@lru_cache(maxsize=4096)
def _nodes(node_list: str) -> frozenset[str]:
    return frozenset(expand(node_list))
