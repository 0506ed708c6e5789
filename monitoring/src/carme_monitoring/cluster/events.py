"""What happened between two looks at the site, counted: waits, starts and ends of jobs and sessions.

A look shows what is; Prometheus wants what came to pass. Slurm shows ended jobs for minutes (`MinJobAge`), so
looks seconds apart miss none. What had happened before the first look is not counted.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime

from prometheus_client import Counter, Histogram, Metric

from carme.broker.overview import JobFigures, Overview, SessionFigures
from carme.jobs import Phase
from carme.sessions import SessionState, Step
from carme_monitoring.cluster.bounds import Bounded

__all__ = ["Events"]

_WAITS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
_SPAWNS = (0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120, 300)


class Events:
    """Counters that grow with each overview."""

    def __init__(self) -> None:
        self._jobs: dict[int, JobFigures] | None = None
        self._sessions: dict[int, SessionFigures] | None = None
        self._partitions, self._images = Bounded(), Bounded()
        self._waits = Histogram(
            "carme_queue_wait_seconds",
            "Time that jobs waited before they started.",
            ("partition",),
            buckets=_WAITS,
            registry=None,
        )
        self._ended = Counter(
            "carme_jobs_ended", "Jobs that ended, by how.", ("partition", "state"), registry=None
        )
        self._spawns = Histogram(
            "carme_session_start_seconds",
            "Time from a session's nodes to its open address.",
            ("image",),
            buckets=_SPAWNS,
            registry=None,
        )
        self._sessions_ended = Counter(
            "carme_sessions_ended", "Sessions that ended, by how.", ("ending",), registry=None
        )

    def take(self, overview: Overview) -> None:
        """Count what is new in it."""
        # A broker that has seen nothing of Slurm yet would make everything look new afterwards.
        if overview.answered is None:
            return
        jobs = {job.id: job for job in overview.jobs}
        if self._jobs is not None:
            for job in jobs.values():
                self._job(self._jobs.get(job.id), job)
        self._jobs = jobs
        sessions = {session.job_id: session for session in overview.sessions}
        if self._sessions is not None:
            for session in sessions.values():
                self._session(self._sessions.get(session.job_id), session)
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """The counters."""
        families: Iterable[Counter | Histogram] = (
            self._waits, self._ended, self._spawns, self._sessions_ended,
        )  # fmt: skip
        for family in families:
            yield from family.collect()

    def _job(self, old: JobFigures | None, job: JobFigures) -> None:
        partition = self._partitions.name(job.partition)
        if job.started and job.submitted and (old is None or old.started != job.started):
            self._waits.labels(partition).observe(_seconds(job.submitted, job.started))
        if job.state.phase is Phase.OVER and (old is None or old.state.phase is not Phase.OVER):
            self._ended.labels(partition, job.state.value.lower()).inc()

    def _session(self, old: SessionFigures | None, session: SessionFigures) -> None:
        allocated, ready = session.marks.get(Step.ALLOCATED), session.marks.get(Step.ROUTED)
        if allocated and ready and (old is None or Step.ROUTED not in old.marks):
            self._spawns.labels(self._images.name(session.image or "")).observe(_seconds(allocated, ready))
        if session.state is SessionState.ENDED and (old is None or old.state is not SessionState.ENDED):
            self._sessions_ended.labels(session.ending.value if session.ending else "").inc()


def _seconds(begin: datetime, end: datetime) -> float:
    return max(0.0, (end - begin).total_seconds())  # clocks of two hosts may differ
