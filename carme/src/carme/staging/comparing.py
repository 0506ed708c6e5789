"""Whether a copy is like its source, byte by byte."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

from carme.errors import NotFound
from carme.staging import tree
from carme.staging.attributes import AttributeCopier, extended
from carme.staging.digests import algorithm
from carme.staging.entries import BLOCK, Batch, Task, join, statuses
from carme.staging.limits import Pace
from carme.staging.native import chosen
from carme.staging.options import BATCH, MOST_PROBLEMS, PART, Options, Problem, Progress, Result
from carme.staging.queue import Queue
from carme.staging.walker import Report, Walker
from carme.staging.worker_pool import CONTEXT, WorkerPool
from carme.translation import message as _
from carme.wording import listing

__all__ = ["compare"]


class Comparer(Walker):
    """Compares.

    Args:
        given: See Walker.
        seconds: The destination keeps times in whole seconds.
        rename: The source's name and the destination's, where single files are compared.
        index: Report each file's digest.
    """

    def __init__(self, *given: Any, seconds: bool, rename: tuple[str, str] | None, index: bool) -> None:
        super().__init__(*given)
        self.copier = AttributeCopier()
        self.unit = 10**9 if seconds else 1
        self.native = self.compiled(self.copier, self.unit)
        self.rename, self.index = rename, index

    def __call__(self, task: Task) -> None:
        """Do one task."""
        kind, *rest = task
        getattr(self, f"do_{kind}")(*rest)

    def differs(self, path: str, how: str) -> None:
        """Report a difference."""
        self.report.problems.append(Problem(path, how))
        self.report.counts.different += 1

    def do_folder(self, path: str, _: bool) -> None:
        """A folder with all that is in it but the folders, which are reported."""
        try:
            with (
                tree.folder(self.source, path) as source,
                tree.folder(self.destination, path) as target,
                self.entries(source) as read,
            ):
                self.report.counts.folders += 1
                self._attributes(path or ".", source, target, times=True)
                self._names(source, target, path, [name for _, name in read(BATCH)])
                while batch := read(BATCH):
                    if self.share():
                        self.report.batches.append(("batch", path, batch))
                    else:
                        self._names(source, target, path, [name for _, name in batch])
                    self.flush()
                with os.scandir(target) as found:
                    for entry in found:
                        if not path and entry.name.startswith(tree.STATE):
                            self.differs(entry.name, "the copy is not finished")
                        elif self._absent(source, entry.name):
                            self.differs(join(path, entry.name), "it is not in the source")
        except OSError as error:
            self.problem(path or ".", error)

    def _absent(self, folder: int, name: str) -> bool:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def do_batch(self, path: str, batch: Batch) -> None:
        """Some of a folder's entries, which another worker has read."""
        self.do_names(path, [name for _, name in batch])

    def do_names(self, path: str, names: list[str]) -> None:
        """Some of a folder's entries."""
        try:
            with (
                tree.folder(self.source, path) as source,
                tree.folder(self.destination, path) as target,
            ):
                self._names(source, target, path, names)
        except OSError as error:
            self.problem(path or ".", error)

    def _names(self, source: int, target: int, path: str, names: list[str]) -> None:
        goals = [self.rename[1] for _ in names] if self.rename else names
        rows = zip(names, goals, statuses(source, names), statuses(target, goals), strict=True)
        for name, goal, its, own in rows:
            where = join(path, name)
            try:
                if its is None:
                    self.problem(where, "it vanished before it was read")
                elif own is None:
                    self.differs(where, "it is missing at the destination")
                elif stat.S_IFMT(its.st_mode) != stat.S_IFMT(own.st_mode):
                    self.differs(where, "it is of another kind at the destination")
                elif stat.S_ISDIR(its.st_mode):
                    self.report.folders.append((where, False))
                elif stat.S_ISREG(its.st_mode):
                    self._file(source, name, target, goal, where)
                elif stat.S_ISLNK(its.st_mode):
                    if os.readlink(name, dir_fd=source) != os.readlink(goal, dir_fd=target):
                        self.differs(where, "the symlink leads elsewhere at the destination")
                    else:
                        self.report.counts.unchanged += 1
                elif its.st_rdev != own.st_rdev or its.st_mode != own.st_mode:
                    self.differs(where, "it is another device or has another mode at the destination")
                else:
                    self.report.counts.unchanged += 1
            except OSError as error:
                self.problem(where, error)

    @contextlib.contextmanager
    def _open_both(self, source: int, name: str, target: int, goal: str) -> Iterator[tuple[int, int]]:
        original = self.open_source(name, source)
        try:
            copy = self.open_source(goal, target)
            try:
                yield original, copy
            finally:
                os.close(copy)
        finally:
            os.close(original)

    def _file(self, source: int, name: str, target: int, goal: str, where: str) -> None:
        self.operations.take(1)
        with self._open_both(source, name, target, goal) as (original, copy):
            its, own = os.fstat(original), os.fstat(copy)
            if its.st_size != own.st_size:
                self.differs(where, f"it has {own.st_size} bytes at the destination, not {its.st_size}")
            elif not self._attributes(where, original, copy, times=True):
                return
            elif its.st_size >= PART and not self.index:
                self.report.large.append((where, str(its.st_size), False))
            # A folder that is compared with itself is only to have its digests.
            elif not os.path.samestat(its, own) and not self._same(original, copy, 0, its.st_size):
                self.differs(where, "it has other contents at the destination")
            else:
                self.report.counts.unchanged += 1
                if self.index:
                    self.report.digests.append((where, its.st_size, self._digest(original, its.st_size)))

    def _same(self, original: int, copy: int, start: int, end: int) -> bool:
        if self.options.verify == "device":
            for descriptor in (original, copy):
                os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
        same = self.same_contents(original, copy, start, end)
        self.report.counts.bytes_unchanged += end - start if same else 0
        return same

    def _digest(self, descriptor: int, size: int) -> str:
        digest, block, place = self.digest(), memoryview(self.buffers[0]), 0
        while place < size and (length := os.preadv(descriptor, [block[: min(BLOCK, size - place)]], place)):
            digest.update(block[:length])
            place += length
        return digest.hexdigest()

    def _attributes(self, path: str, original: int, copy: int, *, times: bool) -> bool:
        """Whether two open files or folders have the same of all but contents."""
        its, own = os.fstat(original), os.fstat(copy)
        wrong = []
        if self.copier.owner(its) != (own.st_uid, own.st_gid) and own.st_uid in (0, self.copier.user):
            wrong.append("owner")
        if stat.S_IMODE(its.st_mode) != stat.S_IMODE(own.st_mode):
            wrong.append("mode")
        if times and its.st_mtime_ns // self.unit != own.st_mtime_ns // self.unit:
            wrong.append("time")
        if self.options.attributes and extended(original) != extended(copy):
            wrong.append("extended attributes or ACLs")
        if wrong:
            self.differs(path, f"it differs in {listing(wrong)}")
        return not wrong

    def do_part(self, path: str, number: int, size: int) -> None:
        """A part of a large file."""
        above, _, name = path.rpartition("/")
        goal = self.rename[1] if self.rename else name
        start = number * PART
        try:
            with (
                tree.folder(self.source, above) as source,
                tree.folder(self.destination, above) as target,
                self._open_both(source, name, target, goal) as (original, copy),
            ):
                if self._same(original, copy, start, min(size, start + PART)):
                    self.report.parts.append((path, number, ""))
                else:
                    self.report.changed.append(path)
        except OSError as error:
            self.fail(path, error)


def compare(
    source: str,
    destination: str,
    options: Options,
    index: Callable[[str, int, str], None] | None = None,
    *,
    notify: Callable[[Any], None] | None,
    workers: int,
    seconds: bool = False,
) -> Result:
    """Compare two trees or two files, in a process with one thread.

    Args:
        source: One of them.
        destination: The other.
        options: How to compare.
        index: Called with path, size and digest of each file that is the same.
        notify: Called with differences and progress.
        workers: How many.
        seconds: One of them keeps times in whole seconds only.

    Raises:
        NotFound: One of them is not there.
    """
    for path in (source, destination):
        if not os.path.exists(path):
            raise NotFound(_("There is nothing at {path}.", path=tree.shown(path)), _("Check the path."))
    source, destination = os.path.realpath(source), os.path.realpath(destination)
    rename = None
    if os.path.isdir(source) != os.path.isdir(destination):
        raise NotFound(_("A folder cannot be compared with a file."), _("Name two folders, or two files."))
    if not os.path.isdir(source):
        rename = (os.path.basename(source), os.path.basename(destination))
        source, destination = os.path.dirname(source), os.path.dirname(destination)
    with contextlib.ExitStack() as opened:
        source_folder = os.open(source, tree.FOLDER)
        opened.callback(os.close, source_folder)
        target_folder = os.open(destination, tree.FOLDER)
        opened.callback(os.close, target_folder)
        return _Run(options, index, notify, workers).result(source_folder, target_folder, rename, seconds)


class _Run:
    """A comparison, and what its workers have found so far; the arguments are those of `compare`."""

    def __init__(
        self,
        options: Options,
        index: Callable[[str, int, str], None] | None,
        notify: Callable[[Any], None] | None,
        workers: int,
    ) -> None:
        self._options, self._index, self._report, self._workers = options, index, notify, workers
        self._start = time.monotonic()
        name, self._digest = algorithm(options.hash, strong=index is not None)
        self._result = Result(workers=workers, hash=name, engine=chosen(options.engine))
        self._queue = Queue()
        self._large: dict[str, int] = {}
        self._reported_at = 0.0

    def result(
        self, source_folder: int, target_folder: int, rename: tuple[str, str] | None, seconds: bool
    ) -> Result:
        """Compare two open folders, or the two files of these names in them."""
        options, result = self._options, self._result
        paces = Pace(CONTEXT, options.bandwidth), Pace(CONTEXT, options.operations)

        def make(share: Callable[[], bool]) -> Comparer:
            return Comparer(
                source_folder,
                target_folder,
                options,
                self._digest,
                share,
                paces,
                seconds=seconds,
                rename=rename,
                index=self._index is not None,
            )

        pool = WorkerPool(self._workers, make)
        try:
            if rename:
                self._queue.first.append(("names", "", [rename[0]]))
            else:
                self._queue.folders([("", False)])
            pool.run(self._queue, self._take_report, self._progress)
        finally:
            pool.close()
        result.seconds = time.monotonic() - self._start
        if self._report:
            self._report(Progress(result.counts, result.seconds))
        return result

    def _progress(self) -> None:
        if self._report and time.monotonic() - self._reported_at >= 0.5:
            self._reported_at = time.monotonic()
            self._report(Progress(self._result.counts, self._reported_at - self._start))

    def _add(self, problem: Problem) -> None:
        if len(self._result.problems) < MOST_PROBLEMS:
            self._result.problems.append(problem)
        if self._report:
            self._report(problem)

    def _take_report(self, report: Report) -> None:
        """Take what a worker has found."""
        result, queue, large = self._result, self._queue, self._large
        result.counts.add(report.counts)
        queue.folders(report.folders)
        queue.batches.extend(report.batches)
        for problem in report.problems:
            self._add(problem)
        for path, size, _rest in report.large:
            large[path] = -(-int(size) // PART)
            queue.first.extend(("part", path, number, int(size)) for number in range(large[path]))
        for path, _first, _rest in report.parts:
            if path in large:
                large[path] -= 1
                if not large[path]:
                    result.counts.unchanged += 1
        for path, why in report.failed:
            if large.pop(path, None) is not None:
                result.counts.problems += 1
                self._add(Problem(path, why))
        for path in report.changed:
            # Reported once, however many of its parts differ.
            if large.pop(path, None) is not None:
                result.counts.different += 1
                self._add(Problem(path, "it has other contents at the destination"))
        if self._index:
            for each in report.digests:
                self._index(*each)
