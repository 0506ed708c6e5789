"""The jobs of the last poll of the queue, so that only what has changed is read again."""

import functools
import itertools
from collections.abc import Iterator

from carme.jobs import Job
from carme.slurm import parsing
from carme.slurm.tres import ALLOTTED_FIELDS, EXCLUSIVE, Allotted, allotted_of

_LEFT = parsing.QUEUE_FIELDS.index("L")
_ACROSS = frozenset({"u", "a", "P", "q", "v", "r", "b", "m", "l"})  # fields that many jobs have alike
_MOST_TEXTS = 100_000
#: Bytes of squeue's output that are taken apart at once: of a large site it prints tens of megabytes.
_BLOCK = 1 << 20


class QueueCache:
    """Reads squeue's output; a job for which it prints the same as before is the very same object.

    Of the tens of thousands of jobs of a large site a handful change from one look to the next. So records
    are compared as squeue's bytes, and only those that differ are taken apart. Of what squeue printed for
    each job, only a hash of 64 bits stays, with the key that Python draws for each process.

    Args:
        separator: What follows each field, the same at every look: else no record would be as before.
    """

    def __init__(self, separator: bytes) -> None:
        self._separator, self._end = separator, separator + b"\n"
        self._pending, self._suspended = (
            separator + state + separator for state in (b"PENDING", b"SUSPENDED")
        )
        self._jobs: dict[bytes, tuple[int, Job]] = {}  # by number, with the hash of what it was read of
        self._texts: dict[str, str] = {}
        self._unallotted: dict[bytes, bytes] = {}  # by number, the records of jobs that the long form lacked

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._jobs)

    @property
    def unallotted(self) -> list[int]:
        """The jobs that the long form had no record of."""
        return list(map(int, self._unallotted))

    def queue(self, short: bytes, long: bytes, exclusive: str) -> list[Job]:
        """The jobs, in squeue's order.

        Args:
            short: squeue's output with QUEUE_FIELDS.
            long: The same with ALLOTTED_FIELDS and the field `exclusive`; a job may be missing here.
            exclusive: The field that says whether a job has whole nodes.
        """
        allotments = self._allotments(long)
        found: dict[bytes, tuple[int, Job]] = {}
        self._unallotted = {}
        record = b""
        for part in self._parts(short):
            # A field may begin with a line end, as its owner chose it: then a part is not a whole record.
            record = record + self._end + part if record else part
            number = record.partition(self._separator)[0]
            has = allotments.get(number)
            known = self._current(number, record, exclusive, has)
            if known is None:
                continue
            if has is None:
                self._unallotted[number] = record
            found[number] = known
            record = b""
        self._jobs = found
        if len(self._texts) > _MOST_TEXTS:
            self._texts.clear()
        return self._listed()

    def allot(self, long: bytes, exclusive: str) -> list[Job]:
        """The jobs of the last poll, with what those have that `unallotted` named.

        Args:
            long, exclusive: As for `queue`, of these jobs; a job may be missing here, too.
        """
        allotments = self._allotments(long)
        for number, record in self._unallotted.items():
            if known := self._current(number, record, exclusive, allotments.get(number)):
                self._jobs[number] = known
        return self._listed()

    def _listed(self) -> list[Job]:
        return [job for _, job in self._jobs.values()]

    def _current(
        self, number: bytes, record: bytes, exclusive: str, has: bytes | None
    ) -> tuple[int, Job] | None:
        """The job of a record, as it was unless that has changed, with its hash; None if it is not whole."""
        digest = hash((self._without_time_left(record), has, exclusive))
        known = self._jobs.get(number)
        if known is not None and known[0] == digest:
            return known  # and whole, as that record was
        if record.count(self._separator) != len(parsing.QUEUE_FIELDS) - 1:
            return None
        return digest, self._read(record, exclusive, has)

    def _read(self, record: bytes, exclusive: str, has: bytes | None) -> Job:
        values = (value.decode(errors="replace") for value in record.split(self._separator))
        field = dict(zip(parsing.QUEUE_FIELDS, values, strict=True))
        for name in _ACROSS:
            field[name] = self._texts.setdefault(field[name], field[name])
        resources = has.partition(self._separator)[2] if has else b""
        return parsing.queued(field, _allotted(resources, self._separator, exclusive))

    def _allotments(self, long: bytes) -> dict[bytes, bytes]:
        """The long form's whole records by the jobs' numbers; none of its words are chosen by users."""
        return {
            part.partition(self._separator)[0]: part
            for part in self._parts(long)
            if part.count(self._separator) == len(ALLOTTED_FIELDS)  # the end of the last field is cut off
        }

    def _parts(self, output: bytes) -> Iterator[bytes]:
        """The output between two ends of records."""
        return itertools.chain.from_iterable(block.split(self._end) for block in _blocks(output, self._end))

    def _without_time_left(self, record: bytes) -> bytes:
        """A record without the time that is left, which is read for suspended jobs only.

        While a job waits that time stands still, and need not be cut out.
        """
        if self._pending in record or self._suspended in record:
            return record
        before = record.split(self._separator, _LEFT + 1)
        return self._separator.join((*before[:_LEFT], before[-1]))


@functools.lru_cache(maxsize=1 << 12)  # tens of thousands of jobs have and ask for a few hundred things
def _allotted(resources: bytes, separator: bytes, exclusive: str) -> Allotted | None:
    """What a job has, from a record of the long form without the job's number; None if it is not whole."""
    names = (*ALLOTTED_FIELDS[1:], exclusive)
    values = [value.decode(errors="replace") for value in resources.split(separator)]
    if len(values) != len(names):
        return None
    # The field that says whether it has whole nodes comes last, under its name in that release.
    return allotted_of(dict(zip(names, values, strict=True)), values[-1] == EXCLUSIVE[exclusive])


def _blocks(output: bytes, end: bytes) -> Iterator[bytes]:
    """The output in parts, cut where a record may end; what ends the record before a cut is left out."""
    start = 0
    while start < len(output):
        stop = output.find(end, start + _BLOCK)
        yield output[start:] if stop < 0 else output[start:stop]
        start = len(output) if stop < 0 else stop + len(end)
