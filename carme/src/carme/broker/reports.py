"""Reports of jobs: from metrics while they are kept, and from the record that is left in the accounting."""

import logging
import statistics
from datetime import UTC, datetime, timedelta

from carme.broker.background import Rounds
from carme.broker.feed import Feed
from carme.broker.protocol import MAXIMUM_WAIT
from carme.broker.watch import Watch
from carme.config import Settings
from carme.errors import CarmeError
from carme.jobs import Job
from carme.jobs.nodes import expand
from carme.reports import Curve, Peers, Report, Usage, advise, read_record, write_record
from carme.reports.advice import efficiency
from carme.reports.exporters import Exporters
from carme.reports.metrics import Metrics
from carme.slurm import Slurm

_log = logging.getLogger("carme.broker")

LEAST_SECONDS = 60.0  # shorter jobs have hardly been scraped
SETTLE_SECONDS = 30.0  # after the end: the last scrape and the accounting come later
BATCH = 50  # jobs that are recorded between two polls
MOST_WAITING = 20_000  # jobs whose record is still to be written
PEERS_SINCE = timedelta(days=30)
PEERS_MOST = 50
SEEN_ENOUGH = 0.5  # of a job's time: of less, what it did says little about what its owner should change


class Reports:
    """Makes reports, and leaves a record of each job that ends.

    Args:
        settings: Says whether there are metrics.
    """

    def __init__(self, settings: Settings, slurm: Slurm, watch: Watch, feed: Feed) -> None:
        self._slurm, self._watch, self._feed = slurm, watch, feed
        place = settings.monitoring
        self._metrics = Metrics(place.prometheus, place.certificates) if place.prometheus else None
        self._exporters = Exporters(place.exporter_port, place.certificates)
        self._waiting: dict[int, Job] = {}
        self._written: set[int] = set()
        self._troubled = False

    async def report(self, job: Job) -> Report:
        """What the job used, and what its owner should change.

        Raises:
            SlurmError: The accounting does not answer.
        """
        usage, curves, source, trouble = await self._usage(job)
        end = job.ended or datetime.now(UTC)
        gpus = [gpu.energy_joules for gpu in usage.gpus if gpu.energy_joules is not None] if usage else []
        shares = efficiency(usage) if usage else {}
        ran = _between(job.started, end)
        seen = source != "exporters" or (usage and ran and usage.seconds >= SEEN_ENOUGH * ran)
        return Report(
            job=job,
            source=source,
            trouble=trouble,
            monitored=self._metrics is not None or self._exporters.exist,
            seen_enough=bool(seen),
            usage=usage,
            curves=curves,
            waited_seconds=_between(job.submitted, job.started or (end if job.is_pending else None)),
            ran_seconds=ran,
            energy_joules=sum(gpus) if gpus else None,
            efficiency=shares,
            peers=await self._peers(job),
            advice=advise(job, usage if seen else None),
        )

    async def run(self) -> None:
        """Leave records of jobs that end, until cancelled."""
        if self._metrics is None:
            return
        rounds = Rounds("Recording what jobs used")
        while True:
            since = self._feed.change
            self._collect()
            await rounds.attempt(self._record())
            wait = SETTLE_SECONDS if self._waiting else MAXIMUM_WAIT
            await self._feed.wait(since, wait, lambda: not self._waiting)

    async def _usage(self, job: Job) -> tuple[Usage | None, list[Curve], str, str]:
        """What it used, from where that is, and why it is not from metrics though there may be some."""
        trouble = ""
        if job.started is None:
            return None, [], "none", trouble
        if self._metrics is not None:
            try:
                usage, curves = await self._metrics.usage(job.id, job.started, job.ended or datetime.now(UTC))
                if usage is not None:
                    return usage, curves, "live", trouble
            except CarmeError as error:
                _log.warning("The report of job %s is without metrics: %s", job.id, error)
                trouble = str(error)
        elif job.is_running and self._exporters.exist:
            try:
                usage, curves = await self._exporters.usage(job, self._addresses(job))
                return usage, curves, "exporters" if usage else "none", trouble
            except CarmeError as error:
                _log.warning("The report of job %s is without metrics: %s", job.id, error)
                trouble = str(error)
        if job.is_over:
            known = await self._slurm.admin_comments([job.id])
            if usage := read_record(known.get(job.id, "")):
                return usage, [], "record", trouble
        return None, [], "none", trouble

    def _addresses(self, job: Job) -> dict[str, str]:
        """Where Slurm reaches the job's nodes, of those that it does not reach at their names."""
        names = set(expand(job.node_list))
        known = self._watch.cluster().nodes
        return {node.name: node.address for node in known if node.address and node.name in names}

    async def _peers(self, job: Job) -> Peers:
        """How well the owner's jobs of the same name and size did before."""
        since = datetime.now(UTC) - PEERS_SINCE
        jobs = [
            peer
            for peer in await self._slurm.history(job.user, since, 1000)
            if (peer.name, peer.gpus, peer.nodes) == (job.name, job.gpus, job.nodes)
            and peer.id != job.id
            and peer.is_over
        ][:PEERS_MOST]
        if not jobs:
            return Peers()
        texts = await self._slurm.admin_comments([peer.id for peer in jobs])
        usages = [usage for text in texts.values() if (usage := read_record(text))]
        shares = [efficiency(usage) for usage in usages]

        def median(name: str) -> float | None:
            values = [share[name] for share in shares if name in share]
            return round(statistics.median(values), 4) if values else None

        return Peers(jobs=len(usages), gpu_busy=median("gpu"), cpu=median("cpu"), memory=median("memory"))

    def _collect(self) -> None:
        """Remember jobs that have ended lately."""
        known = set()
        for job in self._watch.ended():
            known.add(job.id)
            ran = _between(job.started, job.ended)
            if job.id in self._written or ran is None or ran < LEAST_SECONDS:
                continue
            if len(self._waiting) < MOST_WAITING:
                self._waiting.setdefault(job.id, job)
        self._written &= known

    async def _record(self) -> None:
        """Write what is due; what cannot be written now is tried again, until Slurm has forgotten the job."""
        assert self._metrics is not None
        ready = datetime.now(UTC) - timedelta(seconds=SETTLE_SECONDS)
        due = [job for job in self._waiting.values() if job.ended and job.ended <= ready][:BATCH]
        if not due:
            return
        try:
            present = await self._slurm.admin_comments([job.id for job in due])
            for job in due:
                # One that is there stays, no matter who wrote it; a job that is not accounted comes later.
                if job.id in present and not present[job.id]:
                    await self._write_record(self._metrics, job)
                if job.id in present or self._watch.job(job.id) is None:
                    self._waiting.pop(job.id, None)
                    self._written.add(job.id)
            self._troubled = False
        except CarmeError as error:
            if not self._troubled:
                _log.warning("What jobs used cannot be recorded: %s", error)
            self._troubled = True
            for job in due:
                if self._watch.job(job.id) is None:
                    self._waiting.pop(job.id, None)

    async def _write_record(self, metrics: Metrics, job: Job) -> None:
        """Raises CarmeError where it may be written later."""
        if job.started is None or job.ended is None:
            return
        try:
            usage, _ = await metrics.usage(job.id, job.started, job.ended)
            if usage is not None:
                await self._slurm.set_admin_comment(job.id, write_record(usage))
        except CarmeError:
            raise
        except Exception:
            # Others' jobs get their records all the same; this one would fail each time.
            _log.exception("What job %s used cannot be recorded.", job.id)


def _between(begin: datetime | None, end: datetime | None) -> float | None:
    return max(0.0, (end - begin).total_seconds()) if begin and end else None
