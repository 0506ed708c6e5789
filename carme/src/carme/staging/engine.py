"""Copying a tree: the plan, what the workers find, and the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable

from carme.errors import CarmeError
from carme.staging import incremental, tree
from carme.staging.attributes import AttributeCopier
from carme.staging.digests import algorithm
from carme.staging.native import ChangedFolder, Entries, Native, chosen, hasher, library
from carme.staging.options import (
    BATCH,
    MOST_PROBLEMS,
    PART,
    TRIES,
    Counts,
    Options,
    Problem,
    Progress,
    Result,
)
from carme.staging.queue import Queue
from carme.translation import message as _

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from carme.staging.digests import Digest
    from carme.staging.journal import Journal
    from carme.staging.walker import Report
    from carme.staging.work import Copier
    from carme.staging.worker_pool import Total, WorkerPool

__all__ = ["Notify", "copy", "pack", "sync", "verify"]

#: With so many bytes of names of what has changed, the workers begin, who then look for the rest as well.
ENOUGH = 4 << 20
#: So many threads look for what has changed while the device keeps them waiting. As in native/carme.c.
LOOKERS = 32
#: So many blocks of large files are read and written at once, where that goes past this host's memory. A
#: worker has 2 to 16 of them; native/ranges.c has no more.
IN_FLIGHT = 32

#: Called with each problem as it is met, with what a dry run would do (`("remove", path)`), and some times a
#: second with the progress.
Notify = Callable[[Problem | Progress | tuple[str, str]], None]


def copy(
    source: str, destination: str, options: Options | None = None, *, notify: Notify | None = None
) -> Result:
    """Make `destination` a verified copy of `source`; what is there and unchanged is not copied again.

    A folder's contents come into the folder `destination`, which is made if it is not there; what else is
    in it stays. A file becomes the file `destination`, or comes into it if that is a folder. Files appear
    under their names only when they are complete and verified. A run that was interrupted, by whatever,
    goes on from there when it is started again.

    Args:
        source: A folder or a file.
        destination: Where the copy goes.
        options: How to copy.
        notify: Called with problems and progress.

    Returns:
        What was done; its problems are files that could not be copied, with reasons.

    Raises:
        CarmeError: It cannot be begun, or the destination takes no more (full, quota, read-only).
    """
    return start("run", source, destination, options or Options(), False, False, notify=notify)


def sync(
    source: str,
    destination: str,
    options: Options | None = None,
    *,
    dry_run: bool = False,
    notify: Notify | None = None,
) -> Result:
    """Copy, and remove from `destination` what `source` does not have.

    Args:
        source: A folder.
        destination: Its copy.
        options: How to copy.
        dry_run: Change nothing; `notify` gets what would be done as pairs of `copy`, `update` or `remove` and
            a path.
        notify: Called with problems and progress.

    Returns:
        As for `copy`.

    Raises:
        CarmeError: As for `copy`.
    """
    return start("run", source, destination, options or Options(), True, dry_run, notify=notify)


def verify(
    source: str, destination: str = "", options: Options | None = None, *, notify: Notify | None = None
) -> Result:
    """Compare a copy with its source, byte by byte and with all attributes; nothing is changed.

    Args:
        source: A folder or a file; or, with no destination, an image that `pack` has made, which is
            compared with the digest that it had then.
        destination: Its copy.
        options: `verify="device"` has both sides read from their devices, as far as this host has written
            out what it holds in memory.
        notify: Called with differences and progress.

    Returns:
        The differences are its problems and counted as `different`; `unchanged` are files that are the same.

    Raises:
        CarmeError: One of them is not there.
    """
    return start("run_verify", source, destination, options or Options(), notify=notify)


def pack(
    source: str,
    image: str,
    compression: str = "zstd",
    options: Options | None = None,
    *,
    notify: Notify | None = None,
) -> Result:
    """Pack a folder into one squashfs image, and compare the two.

    Beside it come `IMAGE.json` (what it is, with its digest) and `IMAGE.index` (each file's path, size and
    digest, one JSON object a line). The image appears under its name only when it is complete and compared.

    Args:
        source: The folder.
        image: The image's file.
        compression: `zstd`, `lz4` or `none`.
        options: `hash` and `workers` count; the digest is a strong one unless another is named.
        notify: Called with differences and progress.

    Raises:
        CarmeError: It cannot be made, or is not like the folder.
    """
    return start("run_pack", source, image, compression, options or Options(), notify=notify)


def run_verify(source: str, destination: str, options: Options, *, notify: Notify | None) -> Result:
    """What `verify` does, in a process with one thread."""
    # What a copy does not need is not waited for.
    from carme.staging.comparing import compare
    from carme.staging.packing import check_image

    if not destination:
        return check_image(source, notify=notify)
    paths = [path for path in (source, destination) if os.path.exists(path)]
    return compare(source, destination, options, notify=notify, workers=worker_count(options, *paths))


def run_pack(source: str, image: str, compression: str, options: Options, *, notify: Notify | None) -> Result:
    """What `pack` does, in a process with one thread."""
    from carme.staging.packing import pack_image

    return pack_image(source, image, compression, options, notify=notify, workers=worker_count(options))


def copy_names(
    source: str,
    destination: str,
    names: list[str],
    options: Options | None = None,
    *,
    notify: Notify | None = None,
) -> Result:
    """Copy some entries of a folder that are not folders, as `copy` does; the folder itself is left as it is.

    Args:
        source: The folder.
        destination: The folder that they come into; it is there.
        names: The entries.
        options: How to copy.
        notify: Called with problems and progress.
    """
    return start("run_names", source, destination, names, options or Options(), notify=notify)


def run_names(
    source: str, destination: str, names: list[str], options: Options, *, notify: Notify | None
) -> Result:
    """What `copy_names` does, in a process with one thread."""
    if not names:
        return Result()
    source, destination = tree.check(source, destination)
    return _Run(source, destination, options, notify, False, False, None, names).result


def start(name: str, *arguments: Any, notify: Notify | None) -> Any:
    """Call a function of this module, in a process with no other threads."""
    # Where nobody has imported it there are no others, and to import it takes as long as a thousand files.
    threading = sys.modules.get("threading")
    if threading and threading.active_count() > 1:
        from carme.staging import in_subprocess

        return in_subprocess.run(globals()[name], *arguments, notify=notify)
    return globals()[name](*arguments, notify=notify)


def run(
    source: str, destination: str, options: Options, replace: bool, dry: bool, *, notify: Notify | None
) -> Result:
    """What `copy` and `sync` do, in a process with one thread."""
    source, destination = tree.check(source, destination)
    single = None
    if not os.path.isdir(source):
        if replace:
            raise CarmeError(_("Only folders can be synchronised."), _("Use copy for a single file."))
        if os.path.isdir(destination):
            destination = os.path.join(destination, os.path.basename(source))
        if os.path.realpath(destination) == source:
            raise CarmeError(_("Source and destination are the same file."), _("Name another destination."))
        single = (os.path.basename(source), os.path.basename(destination))
        source, destination = os.path.dirname(source), os.path.dirname(destination)
    elif not dry and not os.path.isdir(destination):
        try:
            os.mkdir(destination, 0o700)
        except OSError as error:
            shown, why = tree.shown(destination), tree.reason(error)
            raise CarmeError(
                _("The folder {folder} cannot be made: {why}.", folder=shown, why=why),
                _("Choose a place where you may write."),
            ) from None
    if dry and not os.path.isdir(destination):
        absent = _("There is no folder {folder} to compare with.", folder=tree.shown(destination))
        raise CarmeError(absent, _("Copying would copy everything."))
    return _Run(source, destination, options, notify, replace, dry, single).result


def worker_count(options: Options, *paths: str) -> int:
    """How many workers a run gets. Over a network they mostly wait, so there can be more than cores."""
    if options.workers:
        return options.workers
    cores = len(os.sched_getaffinity(0))
    return min(64, 4 * cores) if any(map(tree.is_network, paths)) else max(2, min(32, cores))


class _Large:
    """A large file under way."""

    def __init__(self, identity: str, missing: int, sparse: bool) -> None:
        self.identity, self.missing, self.sparse = identity, missing, sparse


class _Run:
    def __init__(
        self,
        source: str,
        destination: str,
        options: Options,
        notify: Notify | None,
        replace: bool,
        dry: bool,
        single: tuple[str, str] | None,
        names: list[str] | None = None,
    ) -> None:
        self.names = names
        self.options, self.notify = options, notify
        self.result = Result()
        self.start = time.monotonic()
        self.queue = Queue()
        self.large: dict[str, _Large] = {}
        self.tries: dict[str, int] = {}
        self.lost: set[str] = set()
        self._reported = 0.0
        self.total: Total | None = None
        self.journal: Journal | None = None
        self.result.engine = chosen(options.engine)
        if options.hash:
            # Refused at once where it is not to be had.
            algorithm(options.hash)
        self.result.workers = 1 if single else worker_count(options, source, destination)
        if single and os.stat(os.path.join(source, single[0])).st_size >= PART:
            self.result.workers = worker_count(options, source, destination)
        with contextlib.ExitStack() as opened:
            source_folder = os.open(source, tree.FOLDER)
            opened.callback(os.close, source_folder)
            target_folder = os.open(destination, tree.FOLDER)
            opened.callback(os.close, target_folder)
            if (
                single
                or names
                or not self._find_changes(source_folder, target_folder, destination, replace, dry)
            ):
                self._copy(source, destination, source_folder, target_folder, replace, dry, single)
            if options.durable and not dry:
                tree.write_out(target_folder)
        self.result.warnings = sorted(self.result.warnings)
        self.result.seconds = time.monotonic() - self.start
        if notify:
            notify(self._progress())

    def _find_changes(self, source: int, destination: int, path: str, replace: bool, dry: bool) -> bool:
        """Find what has changed since it was copied; whether there is nothing more to do.

        What has not is counted, the rest waits in the queue. Nothing is written, so that no record is needed,
        nor workers as long as there is nothing to do. Where a few files
        have changed they are copied here, too.
        It is left out where it is of no use: for the first copy, and after one that was interrupted.
        """
        options = self.options
        with os.scandir(destination) as entries:
            # More than a folder that has just been made, and no record of a run that was interrupted.
            names = [entry.name for entry in itertools.islice(entries, 1)]
        with contextlib.suppress(FileNotFoundError):
            os.stat(tree.STATE, dir_fd=destination, follow_symlinks=False)
            names = []
        loaded = library() if names and not options.contents and self.result.engine == "native" else None
        copier = AttributeCopier(options.attributes)
        native = loaded and Native.make(loaded, options, copier, 1)
        if not native or not native.copies:
            self.queue.folders([("", False)])
            return False
        changed: list[ChangedFolder] | None = [] if not dry and incremental.is_eligible(options) else None
        files = 0
        same = True
        # More than cores: while one waits for the device, another one looks.
        threads = options.workers or 2 * self.result.workers
        most = options.workers or max(threads, LOOKERS)
        for counts, found in native.walk(source, destination, threads, most, BATCH, ENOUGH, replace):
            self.result.counts.add(counts)
            self._tick()
            if changed is not None:
                changed += found
                files += sum(len(each.entries) if each.entries else 1 for each in found)
                if files <= incremental.MOST_FILES:
                    continue
                found, changed = changed, None
            same = same and not found
            self._wait(found)
        if not changed:
            return same
        rest = incremental.copy_changed(native, copier, source, destination, path, changed, self._copied)
        if self.result.counts.copied:
            self._choose_digest()
        if rest:
            self._wait(rest)
        else:
            self._settle_top(copier, source, destination)
        return not rest

    def _wait(self, found: list[ChangedFolder]) -> None:
        """Have that done by the workers."""
        for each in found:
            if each.surplus:
                self.queue.batches.append(("surplus", each.path))
            elif each.entries is None:
                self.queue.folders([(each.path, False)])
            else:
                self.queue.batches.append(("rest", each.path, each.entries, each.parts))

    def _copied(self, files: int, size: int) -> None:
        self.result.counts.copied += files
        self.result.counts.bytes_copied += size
        self._tick()

    def _choose_digest(self) -> Callable[[], Digest]:
        """What makes the digest that contents are verified by, named in the result."""
        name, digest = algorithm(self.options.hash)
        if self.result.engine == "native" and not self.options.hash:
            # What the compiled part finds decides.
            name = "xxh3" if hasher() else "bytes"
        self.result.hash = "" if self.options.verify == "none" else name
        return digest

    def _copy(
        self,
        source: str,
        destination: str,
        source_folder: int,
        target_folder: int,
        replace: bool,
        dry: bool,
        single: tuple[str, str] | None,
    ) -> None:
        """Have what waits in the queue done, and what is found on the way."""
        # What is not needed where nothing has changed is not waited for.
        from carme.staging.journal import explained_errors
        from carme.staging.limits import Pace
        from carme.staging.work import Copier
        from carme.staging.worker_pool import CONTEXT, Total, WorkerPool

        digest = self._choose_digest()
        first = single[1] if single else self.names[0] if self.names else ""
        journal = self.journal = None if dry else self._open_journal(source, destination, first)
        options = self.options
        if journal is not None and journal.doubtful:
            options = Options(**{**vars(options), "contents": True})
        paces = Pace(CONTEXT, options.bandwidth), Pace(CONTEXT, options.operations)
        finished = False
        try:
            seconds = journal is not None and journal.whole_seconds()
            # Over a network the server's memory is not this host's, and its ways are its own.
            direct = 0 if tree.is_network(destination) else min(16, max(2, IN_FLIGHT // self.result.workers))
            leftovers = replace or (journal is not None and journal.resumed)

            def make(share: Callable[[], bool]) -> Copier:
                return Copier(
                    source_folder, target_folder, options, digest, share, paces,
                    replace=replace, dry=dry, seconds=seconds, leftovers=leftovers, rename=single,
                    direct=direct,
                )  # fmt: skip

            with contextlib.ExitStack() as working:
                pool = WorkerPool(self.result.workers, make)
                working.callback(pool.close)
                if options.estimate and (dry or not first):
                    self.total = Total(source_folder)
                    working.callback(self.total.close)
                with explained_errors(journal.folder) if journal else contextlib.nullcontext():
                    self._work(pool, single)
                finished = True
        finally:
            if journal is not None:
                journal.close(finished=finished)
        if not single and not self.names and not dry:
            unit = 10**9 if seconds else 1
            self._settle_top(AttributeCopier(options.attributes), source_folder, target_folder, unit)

    def _open_journal(self, source: str, destination: str, first: str) -> Journal:
        """This run's record in the destination, or that of the same run before, which was interrupted.

        Args:
            source: Copied from there,
            destination: to there.
            first: The first of the entries that are copied, which names the record beside those of other runs
                that copy other entries into the same folder; empty: all are copied.
        """
        from carme.staging.journal import Journal

        state = tree.STATE + ("-" + tree.partial_name(first)[len(tree.PARTIAL) :] if first else "")
        about = f"{source} -> {destination}".encode(errors="backslashreplace").decode()
        journal = Journal(os.path.join(destination, state), about, self.result.hash)
        self.result.resumed = journal.resumed
        if journal.resumed and not first:
            # Somebody has begun another run meanwhile, and it was interrupted.
            self.queue, self.result.counts = Queue(), Counts()
            self.queue.folders([("", False)])
        return journal

    def _work(self, pool: WorkerPool, single: tuple[str, str] | None) -> None:
        if single:
            self.queue.first.append(("names", "", [single[0]], False))
        elif self.names:
            for first in range(0, len(self.names), BATCH):
                self.queue.batches.append(
                    ("rest", "", Entries.files(self.names[first : first + BATCH]), True)
                )
        self._drain(pool)
        if self.journal is None:
            return
        # Files with several names: each once, then its other names.
        for links in self.journal.links():
            above, _, name = links[0].rpartition("/")
            self.queue.first.append(("names", above, [name], False))
            if len(self.queue.first) >= 1000:
                self._drain(pool)
        self._drain(pool)
        for first, *aliases in self.journal.links():
            if aliases and first in self.lost:
                for path in aliases:
                    self._problem(Problem(path, "the file could not be copied under its other name"))
            elif aliases:
                self.queue.first.append(("link", first, aliases))
            if len(self.queue.first) >= 1000:
                self._drain(pool)
        self._drain(pool)
        for paths in self.journal.folders(200):
            self.queue.first.append(("settle", paths))
            if len(self.queue.first) >= 100:
                self._drain(pool)
        self._drain(pool)

    def _drain(self, pool: WorkerPool) -> None:
        pool.run(self.queue, self._take_report, self._tick)

    def _take_report(self, report: Report) -> None:
        self.result.counts.add(report.counts)
        self.queue.folders(report.folders)
        self.queue.batches.extend(report.batches)
        self.result.warnings = list({*self.result.warnings, *report.warnings})
        for problem in report.problems:
            self._mark_lost(problem)
        if self.notify:
            for action in report.actions:
                self.notify(action)
        if self.journal is None:
            return
        for device, inode, path in report.links:
            self.journal.link(device, inode, path)
        for path in report.waiting:
            self.journal.folder_waits(path)
        for path, identity, sparse in report.large:
            self._begin(path, identity, sparse)
        for path, number, digest in report.parts:
            self.journal.part(path, number, digest)
            if known := self.large.get(path):
                known.missing -= 1
                if not known.missing:
                    self.queue.first.append(("complete", path, known.identity))
        for path, why in report.failed:
            if self.large.pop(path, None) is not None:
                self._drop(path)
                self._mark_lost(Problem(path, why))
                self.result.counts.problems += 1
        for path in report.changed:
            self._again(path)
        self.journal.commit()

    def _begin(self, path: str, identity: str, sparse: bool) -> None:
        assert self.journal is not None
        done = self.journal.large(path, identity)
        size = int(identity.partition(":")[0])
        missing = [number for number in range(-(-size // PART)) if number not in done]
        self.large[path] = _Large(identity, len(missing), sparse)
        self.result.counts.bytes_unchanged += size - sum(
            min(PART, size - number * PART) for number in missing
        )
        begin = int(self.options.turn * len(missing))
        for number in missing[begin:] + missing[:begin]:
            self.queue.first.append(("part", path, identity, number, sparse))
        if not missing:
            self.queue.first.append(("complete", path, identity))

    def _again(self, path: str) -> None:
        """A large file has changed while it was read: once more from its beginning, but not for ever."""
        assert self.journal is not None
        known = self.large.pop(path, None)
        if known is None:
            return
        self.journal.forget(path)
        self._drop(path)
        self.tries[path] = self.tries.get(path, 1) + 1
        if self.tries[path] > TRIES:
            self._problem(Problem(path, "it changed while it was read"))
            return
        above, _, name = path.rpartition("/")
        self.queue.first.append(("names", above, [name], False))

    def _drop(self, path: str) -> None:
        """Do nothing more of what waits to be done for a large file."""
        waiting = [task for task in self.queue.first if task[1] != path]
        self.queue.first.clear()
        self.queue.first.extend(waiting)

    def _mark_lost(self, problem: Problem) -> None:
        """A file could not be copied, so it gets no other names."""
        if len(self.lost) < MOST_PROBLEMS:
            self.lost.add(problem.path)
        self._keep(problem)

    def _problem(self, problem: Problem) -> None:
        self.result.counts.problems += 1
        self._keep(problem)

    def _keep(self, problem: Problem) -> None:
        if len(self.result.problems) < MOST_PROBLEMS:
            self.result.problems.append(problem)
        if self.notify:
            self.notify(problem)

    def _tick(self) -> None:
        if self.notify and time.monotonic() - self._reported >= 0.5:
            self._reported = time.monotonic()
            self.notify(self._progress())

    def _progress(self) -> Progress:
        total = self.total.known() if self.total else None
        return Progress(self.result.counts, time.monotonic() - self.start, *(total or (None, None)))

    def _settle_top(self, copier: AttributeCopier, source: int, destination: int, unit: int = 1) -> None:
        """The top folder comes last: until now the record was in it."""
        try:
            copier.settle(source, destination, os.fstat(source), unit)
        except OSError as error:
            self._problem(Problem(".", tree.reason(error)))
        self.result.warnings = list({*self.result.warnings, *copier.lost})
