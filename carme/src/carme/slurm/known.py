"""The jobs of the last look at the queue, so that only what has changed is read again."""

import hashlib
from collections.abc import Iterable, Mapping

from carme.jobs import Job, JobState
from carme.slurm import parsing
from carme.slurm.tres import ALLOTTED_FIELDS, EXCLUSIVE, allotted_of, records

_LEFT = parsing.QUEUE_FIELDS.index("L")
_STATE = parsing.QUEUE_FIELDS.index("T")


class KnownJobs:
    """Reads squeue's output; a job for which it prints the same as before is the very same object.

    Of the tens of thousands of jobs of a large site a handful change from one look to the next. Of what
    squeue printed for each job, only a digest stays.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[bytes, Job]] = {}  # by number, with the digest of what it was read of

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._jobs)

    def queue(self, short: str, long: str, separator: str, exclusive: str) -> list[Job]:
        """The jobs, in squeue's order.

        Args:
            short: squeue's output with QUEUE_FIELDS.
            long: The same with ALLOTTED_FIELDS and the field `exclusive`; a job may be missing here.
            separator: What follows each field.
            exclusive: The field that says whether a job has whole nodes.
        """
        fields = (*ALLOTTED_FIELDS, exclusive)
        allotments = {record[0]: record for record in records(long, separator, len(fields))}
        found: dict[str, tuple[bytes, Job]] = {}
        jobs = []
        for record in records(short, separator, len(parsing.QUEUE_FIELDS)):
            has = allotments.get(record[0])
            digest = _digest((*_lasting(record), *(has or ())))
            before, job = self._jobs.get(record[0], (b"", None))
            if job is None or digest != before:
                job = _read(record, dict(zip(fields, has, strict=True)) if has else None)
            found[record[0]] = digest, job
            jobs.append(job)
        self._jobs = found
        return jobs


def _digest(fields: Iterable[str]) -> bytes:
    """What only the very same fields give: squeue's are strings of C, so none of them holds a zero byte."""
    return hashlib.blake2b("\0".join(fields).encode(errors="surrogatepass"), digest_size=16).digest()


def _lasting(record: list[str]) -> Iterable[str]:
    """A record without the time that is left, of which nothing is read unless the job is suspended."""
    if record[_STATE] == JobState.SUSPENDED:
        return record
    return (*record[:_LEFT], "", *record[_LEFT + 1 :])


def _read(record: list[str], has: Mapping[str, str] | None) -> Job:
    field = dict(zip(parsing.QUEUE_FIELDS, record, strict=True))
    if has is None:
        return parsing.queued(field, None)
    # The field that says whether it has whole nodes comes last, under its name in that release.
    name = list(has)[-1]
    return parsing.queued(field, allotted_of(has, has[name] == EXCLUSIVE[name]))
