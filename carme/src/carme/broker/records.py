"""Which jobs are ours, and what they are: by the broker's own record, not by what Slurm shows.

A job's owner may rename it and write another comment, an administrator all that and more. None of that
changes what the job is: its number, its owner and the time of its submission say that, and they stay.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from carme.broker.staging import STAGING_NAME
from carme.jobs import NEVER_BEGUN, Job, JobState
from carme.jobs.arrays import includes
from carme.scaling import Prediction

__all__ = ["Record", "Records"]

#: For so long a record is kept after its job has left the queue; later its comment in the accounting counts.
RETENTION = timedelta(days=14)

#: How far the clocks of this host and of Slurm's controller may be apart: munge takes no more.
CLOCKS = timedelta(minutes=5)


class Record(BaseModel):
    """A job that the broker submitted.

    Attributes:
        key: Names its private folder, and it.
        array: Its tasks, if it is an array.
        job_id: Its number, or that of its array; None until Slurm has answered.
        submitted: When, as Slurm says; until Slurm has shown it (`shown`), as the broker's own clock says.
        left: When it was not in the queue any more.
        prediction: The probe's prediction for its nodes and GPUs.
        abandoned: Its owner knows it as one that Slurm did not take: it is cancelled should it turn up.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    user: str
    kind: Literal["session", "batch"]
    name: str
    image: str | None = None
    array: str = ""
    job_id: int | None = None
    submitted: AwareDatetime
    shown: bool = False
    left: AwareDatetime | None = None
    prediction: Prediction | None = None
    abandoned: bool = False

    def is_of(self, job: Job) -> bool:
        """Whether this record is of a job that has its number."""
        if job.user != self.user:
            return False
        if job.key == self.key:
            return True
        if job.submitted is None:
            return False
        if not self.shown:
            return abs(job.submitted - self.submitted) <= CLOCKS
        # What Slurm puts back into the queue gets another time of submission.
        return job.submitted == self.submitted or (job.submitted > self.submitted and job.restarts > 0)


class Records:
    """All records; the store keeps them."""

    def __init__(self) -> None:
        self._since = datetime(9000, 1, 1, tzinfo=UTC)  # nothing yet
        self._records: dict[str, Record] = {}
        self._by_number: dict[int, list[str]] = {}
        self._changed: set[str] = set()
        self._dropped: set[str] = set()

    def load(self, since: datetime, records: Iterable[Record]) -> None:
        """Take up what the store holds; `since` then every submission has been recorded."""
        self._since = since
        for record in records:
            self._put(record)
        self._changed.clear()

    def begin(self, record: Record) -> None:
        """A job that is about to be submitted."""
        self._put(record)

    def took(self, key: str, job_id: int) -> None:
        """Slurm has taken it and gave it this number."""
        record = self._records.get(key)
        if record is not None and not record.shown:  # else a poll of the queue was faster
            self._put(record.model_copy(update={"job_id": job_id, "submitted": datetime.now(UTC)}))

    def again(self, key: str) -> None:
        """A job that Slurm has lost is about to be submitted again: it may get any number."""
        if record := self._records.get(key):
            fresh = {"job_id": None, "submitted": datetime.now(UTC), "shown": False, "left": None}
            self._put(record.model_copy(update=fresh))

    def abandon(self, key: str, abandoned: bool = True) -> None:
        """A submission got no answer, and counts as one that failed; or what came of it is cancelled."""
        if record := self._records.get(key):
            self._put(record.model_copy(update={"abandoned": abandoned}))

    def is_abandoned(self, job: Job) -> bool:
        """Whether a job comes from a submission that got no answer."""
        record = self._records.get(job.key or "")
        return record is not None and record.abandoned and record.user == job.user

    def refused(self, key: str) -> None:
        """Slurm has not taken it."""
        self._drop(key)

    def adopt(self, job: Job) -> None:
        """Record a job that is known, or taken for ours, without a record."""
        if job.key is None or job.kind == "other" or job.key in self._records:
            return
        self._put(
            Record(
                key=job.key,
                user=job.user,
                kind=job.kind,
                name=job.name,
                image=job.image,
                job_id=job.array_id or job.id,
                submitted=job.submitted or datetime.now(UTC),
                shown=job.submitted is not None,
            )
        )

    def queue(self, jobs: Iterable[Job], now: datetime) -> list[Job]:
        """The jobs of Slurm's queue as what they are; what is new about ours is recorded."""
        found, present = [], set()
        for job in jobs:
            if job.key is None and (job.array_id or job.id) not in self._by_number:
                found.append(job)  # nothing that is ours: almost all jobs of a large site
                continue
            record = self._record_of(job)
            if record is not None:
                present.add(record.key)
                self._update_seen(record, job)
            found.append(self._with_identity(job, record, now))
            if record is None and job.is_active:
                self.adopt(found[-1])  # what its comment says now holds from now on
        for key, record in list(self._records.items()):
            if record.shown and record.left is None and key not in present:
                self._put(record.model_copy(update={"left": now}))
        return found

    def known(self, job: Job) -> Job:
        """A job of the accounting as what it is."""
        return self._with_identity(job, self._record_of(job), datetime.now(UTC))

    def never_begun(self, array_id: int, task: int, user: str | None) -> Job | None:
        """A task that was cancelled while it waited: Slurm keeps nothing of it. None: there is no such task.

        Args:
            user: Whose it must be; None for anybody's.
        """
        records = [self._records[key] for key in self._by_number.get(array_id, ())]
        record = next((each for each in reversed(records) if includes(each.array, task)), None)
        if record is None or user not in (None, record.user):
            return None
        return Job(
            id=array_id,
            key=record.key,
            kind=record.kind,
            image=record.image,
            name=record.name,
            user=record.user,
            state=JobState.CANCELLED,
            reason=NEVER_BEGUN,
            submitted=record.submitted,
            array_id=array_id,
            task=task,
        )

    def expire(self, now: datetime) -> None:
        """Forget those whose jobs left the queue long ago, or never came into it."""
        for key, record in list(self._records.items()):
            last = record.left if record.shown else record.submitted
            if last is not None and last < now - RETENTION:
                self._drop(key)

    def take_changes(self) -> tuple[list[Record], list[str]]:
        """What has changed since the last call, and the keys of those that are known no more."""
        changed = [self._records[key] for key in self._changed if key in self._records]
        dropped = [key for key in self._dropped if key not in self._records]
        self._changed.clear()
        self._dropped.clear()
        return changed, dropped

    def restore_changes(self, changed: Iterable[Record], dropped: Iterable[str]) -> None:
        """What the last `take_changes` reported could not be kept."""
        self._changed |= {record.key for record in changed}
        self._dropped |= set(dropped)

    def _record_of(self, job: Job) -> Record | None:
        number = job.array_id or job.id
        known = self._records.get(job.key or "")
        if known and known.user == job.user and known.job_id in (None, number):
            return known
        numbered = [self._records[key] for key in self._by_number.get(number, ())]
        return next((record for record in reversed(numbered) if record.is_of(job)), None)

    def _update_seen(self, record: Record, job: Job) -> None:
        if record.shown and record.left is None:
            return
        seen: dict[str, object] = {"left": None}
        if not record.shown and job.submitted is not None:
            seen |= {"job_id": job.array_id or job.id, "submitted": job.submitted, "shown": True}
        self._put(record.model_copy(update=seen))

    def _with_identity(self, job: Job, record: Record | None, now: datetime) -> Job:
        if record is not None:
            what = {"key": record.key, "kind": record.kind, "image": record.image}
            what |= {"prediction": record.prediction}
            if record.kind == "session" or record.name.startswith(STAGING_NAME):
                what["name"] = record.name  # others' names are their owners' words and nothing else
            return job.model_copy(update=what)
        # Of jobs that are over records are kept only so long.
        since = self._since + CLOCKS if job.is_active else max(self._since + CLOCKS, now - RETENTION)
        if job.key is not None and job.submitted is not None and job.submitted > since:
            # We would know it: somebody wrote a comment like ours into a job of another origin.
            return job.model_copy(update={"key": None, "kind": "other", "image": None})
        return job

    def _put(self, record: Record) -> None:
        old = self._records.get(record.key)
        if old is not None and old.job_id != record.job_id:
            self._unlist(old)
        if record.job_id is not None and (old is None or old.job_id != record.job_id):
            self._by_number.setdefault(record.job_id, []).append(record.key)
        self._records[record.key] = record
        self._changed.add(record.key)
        self._dropped.discard(record.key)

    def _drop(self, key: str) -> None:
        if record := self._records.pop(key, None):
            self._unlist(record)
            self._changed.discard(key)
            self._dropped.add(key)

    def _unlist(self, record: Record) -> None:
        if record.job_id is not None:
            keys = self._by_number[record.job_id]
            keys.remove(record.key)
            if not keys:
                del self._by_number[record.job_id]
