"""The jobs of the last poll of the queue, so that only what has changed is read again."""

from collections.abc import Iterator, Mapping

from carme.jobs import Job
from carme.slurm import parsing
from carme.slurm.tres import ALLOTTED_FIELDS, EXCLUSIVE, allotted_of

_LEFT = parsing.QUEUE_FIELDS.index("L")
_ACROSS = frozenset({"u", "a", "P", "q", "v", "r", "b", "m", "l"})  # fields that many jobs have alike
_MOST_TEXTS = 100_000
#: Bytes of squeue's output that are taken apart at once: of a large site it prints tens of megabytes.
_BLOCK = 1 << 20


class QueueCache:
    """Reads squeue's output; a job for which it prints the same as before is the very same object.

    Of the tens of thousands of jobs of a large site a handful change from one look to the next. So records
    are compared as squeue's bytes, and only those that differ become text. Of what squeue printed for each
    job, only a hash of 64 bits stays, with the key that Python draws for each process.
    """

    def __init__(self) -> None:
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

    def queue(self, short: bytes, long: bytes, separator: bytes, exclusive: str) -> list[Job]:
        """The jobs, in squeue's order.

        Args:
            short: squeue's output with QUEUE_FIELDS.
            long: The same with ALLOTTED_FIELDS and the field `exclusive`; a job may be missing here.
            separator: What follows each field.
            exclusive: The field that says whether a job has whole nodes.
        """
        allotments = _allotments(long, separator, exclusive)
        found: dict[bytes, tuple[int, Job]] = {}
        self._unallotted = {}
        for record in _records(short, separator, len(parsing.QUEUE_FIELDS)):
            number = record.partition(b"\0")[0]
            has = allotments.get(number)
            if has is None:
                self._unallotted[number] = record
            found[number] = self._current(number, record, exclusive, has)
        self._jobs = found
        if len(self._texts) > _MOST_TEXTS:
            self._texts.clear()
        return self._listed()

    def allot(self, long: bytes, separator: bytes, exclusive: str) -> list[Job]:
        """The jobs of the last poll, with what those have that `unallotted` named.

        Args:
            long, separator, exclusive: As for `queue`, of these jobs; a job may be missing here, too.
        """
        allotments = _allotments(long, separator, exclusive)
        for number, record in self._unallotted.items():
            self._jobs[number] = self._current(number, record, exclusive, allotments.get(number))
        return self._listed()

    def _listed(self) -> list[Job]:
        return [job for _, job in self._jobs.values()]

    def _current(self, number: bytes, record: bytes, exclusive: str, has: bytes | None) -> tuple[int, Job]:
        """The job of a record, as it was unless that has changed, with the hash of the record."""
        digest = hash((_without_time_left(record), has))
        known = self._jobs.get(number)
        if known is None or known[0] != digest:
            known = digest, self._read(record, (*ALLOTTED_FIELDS, exclusive), has)
        return known

    def _read(self, record: bytes, names: tuple[str, ...], has: bytes | None) -> Job:
        values = record.decode(errors="replace").split("\0")
        field = dict(zip(parsing.QUEUE_FIELDS, values, strict=True))
        for name in _ACROSS:
            field[name] = self._texts.setdefault(field[name], field[name])
        if has is None:
            return parsing.queued(field, None)
        long: Mapping[str, str] = dict(zip(names, has.decode(errors="replace").split("\0"), strict=True))
        # The field that says whether it has whole nodes comes last, under its name in that release.
        return parsing.queued(field, allotted_of(long, long[names[-1]] == EXCLUSIVE[names[-1]]))


def _allotments(long: bytes, separator: bytes, exclusive: str) -> dict[bytes, bytes]:
    """The long form's records by the jobs' numbers."""
    records = _records(long, separator, len((*ALLOTTED_FIELDS, exclusive)))
    return {record.partition(b"\0")[0]: record for record in records}


def _records(output: bytes, separator: bytes, count: int) -> Iterator[bytes]:
    """Records of `count` fields with a zero byte between two of them, which none of squeue's words holds.

    A field may begin with a line end, as its owner chose it: then what is before it is not a whole record.
    """
    record = b""
    for block in _blocks(output, separator + b"\n"):
        for part in block.replace(separator, b"\0").split(b"\0\n"):
            record = record + b"\0\n" + part if record else part
            if record.count(b"\0") == count - 1:
                yield record
                record = b""


def _blocks(output: bytes, end: bytes) -> Iterator[bytes]:
    """The output in parts, cut where a record may end; what ends the record before a cut is left out."""
    start = 0
    while start < len(output):
        stop = output.find(end, start + _BLOCK)
        yield output[start:] if stop < 0 else output[start:stop]
        start = len(output) if stop < 0 else stop + len(end)


def _without_time_left(record: bytes) -> bytes:
    """A record without the time that is left, which is read for suspended jobs only.

    While a job waits that time stands still, and need not be cut out.
    """
    if b"\0PENDING\0" in record or b"\0SUSPENDED\0" in record:
        return record
    before = record.split(b"\0", _LEFT + 1)
    return b"\0".join((*before[:_LEFT], before[-1]))
