"""What a worker does: folders, and what is in them, from the source to the destination."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import operator
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from carme.staging import tree
from carme.staging.attributes import DEFAULT, Keeper, attribute_names, extended
from carme.staging.limits import Pace
from carme.staging.native import Entries, Entry, Native, hasher, library
from carme.staging.options import BATCH, PART, TRIES, Counts, Options, Problem

if TYPE_CHECKING:
    from carme.staging.digests import Digest

__all__ = ["Batch", "Copier", "Report", "Stop", "Walker", "join", "statuses"]

#: Files up to this size are read in one go; in bytes.
SMALL = 1 << 20
#: What is read in one go of larger ones; in bytes. It stays in the processor's cache until it is read back.
BLOCK = 256 << 10
#: What the compiled part copies of a large file before it is told, in bytes.
STEP = 16 << 20

#: The destination takes no more: going on would only make a long list of the same error.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FICLONE = 0x40049409

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Task = tuple[Any, ...]
#: Some of a folder's entries.
Batch = Entries | list[Entry]


@dataclass
class Report:
    """What a worker has done and found since its last report.

    `folders` are those found below, with whether they are new at the destination; `batches` parts of very
    large folders; `large` files to be copied in parts; `failed` those of which a part could not be, with the
    reason; `links` names of files that have several; `waiting`
    folders whose times must be set at the end.
    """

    counts: Counts = field(default_factory=Counts)
    folders: list[tuple[str, bool]] = field(default_factory=list)
    batches: list[Task] = field(default_factory=list)
    large: list[tuple[str, str, bool]] = field(default_factory=list)
    parts: list[tuple[str, int, str]] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    links: list[tuple[int, int, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    actions: list[tuple[str, str]] = field(default_factory=list)
    digests: list[tuple[str, int, str]] = field(default_factory=list)
    warnings: set[str] = field(default_factory=set)
    stop: str = ""
    done: bool = False


class Stop(Exception):
    """The run cannot go on; says why."""


class _Changed(Exception):
    """The source is not what it was when it was begun to be read."""


class _Corrupt(Exception):
    """What was read back is not what was written."""


class Walker:
    """What copying and comparing have in common.

    Args:
        source: Descriptor of the source's folder.
        destination: Descriptor of the destination's folder.
        options: How to copy.
        digest: Makes a digest.
        share: Asked whether a batch of a very large folder should be left to other workers.
        paces: The limits on bytes and on operations.
    """

    def __init__(
        self,
        source: int,
        destination: int,
        options: Options,
        digest: Callable[[], Digest],
        share: Callable[[], bool],
        paces: tuple[Pace, Pace],
    ) -> None:
        self.source, self.destination = source, destination
        self.options = options
        self.digest = digest
        self.share = share
        self.bandwidth, self.operations = paces
        self.report = Report()
        #: Tells what is done, at once or if that was not done for a while.
        self.flush: Callable[[], None] = lambda: None
        self.breathe: Callable[[], None] = lambda: None
        self.buffers = bytearray(BLOCK), bytearray(BLOCK)
        self.native: Native | None = None
        # Reading should not count as an access; only owners may ask for that.
        self._read = _READ | os.O_NOATIME

    def compiled(self, keeper: Keeper, unit: int) -> Native | None:
        """The compiled part for this walk, where it is there and wanted."""
        loaded = library() if self.options.engine != "python" else None
        return loaded and Native.make(loaded, self.options, keeper, unit)

    @contextlib.contextmanager
    def entries(self, folder: int) -> Iterator[Callable[[int], Batch]]:
        """What reads an open folder's entries: at most so many at a time, none at the end.

        Raises:
            OSError: It cannot be read.
        """
        if self.native:
            with self.native.entries(folder) as read:
                yield read
            return
        with os.scandir(folder) as found:
            yield lambda most: [(_kind(entry), entry.name) for entry in itertools.islice(found, most)]

    def same_contents(self, one: int, other: int, start: int, end: int) -> bool:
        """Whether a range of two open files is the same."""
        if self.native and not self.options.bandwidth:
            return self.native.same(one, other, start, end)
        mine, yours = self.buffers
        while start < end:
            want = min(BLOCK, end - start)
            if want != len(mine):
                mine, yours = bytearray(want), bytearray(want)
            self.bandwidth.take(want)
            if _fill(one, mine, start) != want or _fill(other, yours, start) != want or mine != yours:
                return False
            start += want
        return True

    def open_source(self, name: str, folder: int) -> int:
        """A source file for reading; a FIFO or device that took its place does not block."""
        try:
            return os.open(name, self._read, dir_fd=folder)
        except PermissionError:
            return os.open(name, _READ, dir_fd=folder)

    def problem(self, path: str, why: str | OSError) -> None:
        """Tell what could not be done.

        Raises:
            Stop: The destination takes no more.
        """
        self.report.problems.append(Problem(path, _words(why)))
        self.report.counts.problems += 1

    def fail(self, path: str, why: str | OSError) -> None:
        """Tell that a large file failed. It is a problem once, however many of its parts say so.

        Raises:
            Stop: The destination takes no more.
        """
        self.report.failed.append((path, _words(why)))


def _words(why: str | OSError) -> str:
    if isinstance(why, str):
        return why
    if why.errno in _FULL:
        raise Stop(tree.reason(why)) from None
    return tree.reason(why)


class Copier(Walker):
    """Copies.

    Args:
        given: See Walker.
        replace: What is in the way of another kind of thing, and what the source does not have, is removed.
        dry: Only say what would be done.
        seconds: The destination keeps times in whole seconds.
        leftovers: Look for what an interrupted run left.
        rename: The source's name and the destination's, where a single file is copied.
        direct: Large files may go past this host's memory, so many blocks at a time; 0: they may not.
    """

    def __init__(
        self,
        *given: Any,
        replace: bool,
        dry: bool,
        seconds: bool,
        leftovers: bool,
        rename: tuple[str, str] | None,
        direct: int,
    ) -> None:
        super().__init__(*given)
        self.direct = direct
        self.keeper = Keeper(self.options.attributes)
        self.replace, self.dry, self.leftovers, self.rename = replace, dry, leftovers, rename
        self.unit = 10**9 if seconds else 1
        self.native = self.compiled(self.keeper, self.unit)
        self.top = os.fstat(self.destination)
        self.verify = self.options.verify
        # The compiled part knows no digest but one. Where none is asked for, to compare bytes is as good.
        self.hashes = (
            self.verify == "none" or not self.options.hash or (self.options.hash == "xxh3" and bool(hasher()))
        )
        # Until the file systems refuse it. What is cloned is neither read nor written, so no limit holds it.
        self.clone = True
        self.links = True
        self.plain_owner = False
        #: How much of the part at hand is told already, in bytes; None: it is told at its end.
        self.told: int | None = None

    def __call__(self, task: Task) -> None:
        """Do one task.

        Raises:
            Stop: The destination takes no more.
        """
        kind, *rest = task
        getattr(self, f"do_{kind}")(*rest)
        self.report.warnings |= self.keeper.lost

    def goal(self, name: str) -> str:
        """What a source's name is at the destination."""
        return self.rename[1] if self.rename else name

    # Folders

    def do_folder(self, path: str, fresh: bool) -> None:
        """A folder with all that is in it but the folders, which are reported.

        Args:
            path: Relative to the top.
            fresh: It is not at the destination.
        """
        try:
            with tree.folder(self.source, path) as source, self.entries(source) as read:
                status = os.fstat(source)
                if os.path.samestat(status, self.top):
                    self.problem(path, "it is the destination itself")
                    return
                first = read(BATCH + 1)
                whole = len(first) <= BATCH
                if self.options.turn:
                    first = _turned(first, self.options.turn)
                with self._place(path, fresh, whole) as (target, empty):
                    self.report.counts.folders += 1
                    if self.leftovers and target is not None and not empty:
                        self._sweep(source, target, path)
                    if not whole:
                        added = self._share_out(source, target, path, first, read)
                    elif empty and target is not None:
                        added = self._fresh(source, target, path, first)
                    else:
                        added = self._batch(source, target, path, first)
                    if self.replace and target is not None and not empty:
                        added |= self._remove_gone(source, target, path)
                    if target is not None and path:
                        if added:
                            self.report.waiting.append(path)
                        else:
                            self._settle(source, target, status)
        except OSError as error:
            self.problem(path or ".", error)

    @contextlib.contextmanager
    def _place(self, path: str, fresh: bool, whole: bool) -> Iterator[tuple[int | None, bool]]:
        """The destination's folder, made if it is not there, and whether nothing is in it.

        A new one with few entries is built under another name and then renamed, so that its files need not
        be renamed one by one. None: it is not there, and is not to be made.
        """
        if not path:
            yield self.destination, False
            return
        above, _, name = path.rpartition("/")
        if self.dry and fresh:
            yield None, True
            return
        with tree.folder(self.destination, above) as parent:
            building = ""
            empty = False
            try:
                if fresh:
                    raise FileNotFoundError
                target = os.open(name, tree.FOLDER, dir_fd=parent)
            except FileNotFoundError:
                if self.dry:
                    yield None, True
                    return
                building = tree.partial_name(name) if whole else ""
                target, empty = self._make(parent, building or name)
            try:
                made = os.fstat(target)
                self.plain_owner = (
                    empty
                    and made.st_uid == self.keeper.user
                    and made.st_gid == self.keeper.group
                    and not made.st_mode & stat.S_ISGID
                    and DEFAULT not in attribute_names(target)
                )
                yield target, empty
                if building:
                    os.rename(building, name, src_dir_fd=parent, dst_dir_fd=parent)
            finally:
                os.close(target)

    def _make(self, parent: int, name: str) -> tuple[int, bool]:
        """Make a folder, or take the one that an interrupted run has left."""
        empty = True
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            empty = False
        target = os.open(name, tree.FOLDER, dir_fd=parent)
        if not empty and os.fstat(target).st_uid != self.keeper.user:
            os.close(target)
            raise FileExistsError(errno.EEXIST, "")
        return target, empty

    def _settle(self, source: int, target: int, status: os.stat_result) -> None:
        if not self.dry:
            self.keeper.settle(source, target, status, self.unit)

    def do_settle(self, paths: list[str]) -> None:
        """Set the times and modes of folders in which nothing changes any more."""
        for path in paths:
            with contextlib.ExitStack() as opened:
                try:
                    source = opened.enter_context(tree.folder(self.source, path))
                except OSError as error:
                    # Noted by a run that was killed; since then the folder has gone from the source.
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                        self.problem(path, error)
                    continue
                try:
                    target = opened.enter_context(tree.folder(self.destination, path))
                    self._settle(source, target, os.fstat(source))
                except OSError as error:
                    self.problem(path, error)

    def _share_out(
        self, source: int, target: int | None, path: str, batch: Batch, read: Callable[[int], Batch]
    ) -> bool:
        """The entries of a very large folder, by all workers. Never all of its names are held."""
        while batch:
            if self.share():
                self.report.batches.append(("batch", path, batch))
            else:
                self._batch(source, target, path, batch)
            self.flush()
            batch = read(BATCH)
        return True

    def do_batch(self, path: str, batch: Batch) -> None:
        """Some of a folder's entries, which another worker has read."""
        with self._folders(path) as (source, target):
            self._batch(source, target, path, batch)

    def do_rest(self, path: str, batch: Batch, parts: bool) -> None:
        """Those of a folder's entries that somebody has found to be no longer as they were copied.

        Args:
            path: The folder.
            batch: Its entries; none if the folder itself has other attributes.
            parts: There are more of them than these.
        """
        with self._folders(path) as (source, target):
            status = os.fstat(source)
            added = self._batch(source, target, path, batch)
            if target is not None and path:
                if added or parts:
                    self.report.waiting.append(path)
                else:
                    self._settle(source, target, status)

    def do_surplus(self, path: str) -> None:
        """Remove what a folder has at the destination that the source does not have."""
        with self._folders(path) as (source, target):
            if target is None:
                return
            self._sweep(source, target, path)
            self._remove_gone(source, target, path)
            if path:
                self.report.waiting.append(path)

    def do_names(self, path: str, names: list[str], links: bool = True) -> None:
        """Some of a folder's entries.

        Args:
            path: The folder.
            names: The entries.
            links: Files that have several names are reported, not copied.
        """
        self.links = links
        try:
            with self._folders(path) as (source, target):
                self._names(source, target, path, names)
        finally:
            self.links = True

    @contextlib.contextmanager
    def _folders(self, path: str) -> Iterator[tuple[int, int | None]]:
        """A folder on both sides; what goes wrong with them is told. None: it is not there, in a dry run."""
        try:
            with contextlib.ExitStack() as opened:
                source = opened.enter_context(tree.folder(self.source, path))
                target = None
                try:
                    target = opened.enter_context(tree.folder(self.destination, path))
                except FileNotFoundError:
                    if not self.dry:
                        raise
                yield source, target
        except OSError as error:
            self.problem(path or ".", error)

    def _sweep(self, source: int, target: int, path: str) -> None:
        """Remove what an interrupted run has left of files that are no longer in the source.

        The source is read by a descriptor of its own: to read it by the one that the caller is reading by
        would have the caller begin anew, and two workers copy one file.
        """
        if self.dry:
            return
        with os.scandir(target) as entries:
            left = {entry.name for entry in entries if entry.name.startswith(tree.PARTIAL)}
        if not left:
            return
        with tree.folder(source, "") as again, os.scandir(again) as entries:
            for entry in entries:
                left.discard(tree.partial_name(self.goal(entry.name)))
        for name in left:
            try:
                tree.remove(target, name)
            except OSError as error:
                self.problem(join(path, name), error)

    def _remove_gone(self, source: int, target: int, path: str) -> bool:
        """Remove what the source does not have; whether there was any."""
        gone = []
        with os.scandir(target) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(tree.PARTIAL) or (not path and name.startswith(tree.STATE)):
                    continue
                try:
                    os.stat(name, dir_fd=source, follow_symlinks=False)
                except FileNotFoundError:
                    gone.append(name)
        for name in gone:
            self._remove(target, path, name)
        return bool(gone)

    def _remove(self, target: int, path: str, name: str) -> None:
        where = join(path, name)
        if self.dry:
            self.report.actions.append(("remove", where))
            self.report.counts.removed += 1
            return
        try:
            self.report.counts.removed += tree.remove(target, name)
        except OSError as error:
            self.problem(where, error)

    # Entries

    def _fresh(self, source: int, target: int, path: str, batch: Batch) -> bool:
        """All entries of a folder that is new at the destination; whether more comes into it later."""
        # Not visible under its name yet, so its files can have theirs at once.
        direct = bool(path)
        if direct:
            batch = self._natively(source, target, batch, None)
        # Not before: what was found until then may have been told meanwhile.
        waits = len(self.report.large) + len(self.report.links) + len(self.report.folders)
        for kind, name in batch:
            try:
                if kind == "?":
                    kind = _kind_of(os.stat(name, dir_fd=source, follow_symlinks=False))
                if kind == "f":
                    self._file(source, name, target, path, direct)
                elif kind == "d":
                    self.report.folders.append((join(path, name), True))
                else:
                    self._other(source, name, target, path, None)
            except OSError as error:
                self.problem(join(path, name), error)
        return waits != len(self.report.large) + len(self.report.links) + len(self.report.folders)

    def _batch(self, source: int, target: int | None, path: str, batch: Batch) -> bool:
        """Entries of which some may be at the destination; whether more comes into it, now or later."""
        added = False
        native, counts = self.native, self.report.counts
        if native and target is not None and isinstance(batch, Entries) and not self.options.contents:
            batch, unchanged, size = native.unchanged(source, target, batch)
            counts.unchanged += unchanged
            counts.bytes_unchanged += size
            new = batch.of("n")
            if new and not self.dry:
                names = [name for _, name in new]
                writing = "".join(f"{tree.partial_name(name)}\0" for name in names).encode()
                missed = {name for _, name in self._natively(source, target, new, writing)}
                done = set(names) - missed
                batch = [entry for entry in batch if entry[1] not in done]
                added = bool(done)
        return self._names(source, target, path, [name for _, name in batch]) or added

    def _natively(self, source: int, target: int, batch: Batch, writing: bytes | None) -> Batch:
        """Have the compiled part copy what it can; the rest."""
        native, options = self.native, self.options
        if (
            not native
            or not native.copies
            or not self.hashes
            or not isinstance(batch, Entries)
            or options.bandwidth
            or options.operations
            or DEFAULT in attribute_names(target)
        ):
            return batch

        def tell(files: int, size: int) -> None:
            self.report.counts.copied += files
            self.report.counts.bytes_copied += size
            self.breathe()

        return native.copy(source, target, batch, writing, writing is None and self.plain_owner, tell)

    def _names(self, source: int, target: int | None, path: str, names: list[str]) -> bool:
        """Entries of which some may be at the destination; whether more comes into it, now or later."""
        counts, unit, user, group = self.report.counts, self.unit, self.keeper.user, self.keeper.group
        contents = self.options.contents
        added = False
        if not names:
            return added
        theirs = statuses(source, names)
        ours = statuses(target, [self.goal(name) for name in names] if self.rename else names)
        if not contents and _all_the_same(theirs, ours):
            counts.unchanged += len(names)
            counts.bytes_unchanged += sum(map(_size, theirs))
            return False
        for name, its, own in zip(names, theirs, ours, strict=True):
            if (
                own is not None
                and its is not None
                and its.st_mode == own.st_mode
                and its.st_size == own.st_size
                and its.st_mtime_ns // unit == own.st_mtime_ns // unit
                and its.st_nlink == 1
                and stat.S_ISREG(its.st_mode)
                and its.st_ctime_ns <= own.st_ctime_ns
                and (
                    (its.st_uid == own.st_uid and its.st_gid == own.st_gid)
                    or (user and own.st_uid == user and own.st_gid == group)
                )
                and not contents
            ):
                counts.unchanged += 1
                counts.bytes_unchanged += its.st_size
                continue
            try:
                if its is None:
                    self.problem(join(path, name), "it vanished before it was read")
                else:
                    added |= self._one(source, name, target, path, its, own)
            except OSError as error:
                self.problem(join(path, name), error)
        return added

    def _one(
        self,
        source: int,
        name: str,
        target: int | None,
        path: str,
        its: os.stat_result,
        own: os.stat_result | None,
    ) -> bool:
        """One entry; whether it adds something to the folder, now or later."""
        where, goal = join(path, name), self.goal(name)
        if own is not None and stat.S_ISDIR(own.st_mode) != stat.S_ISDIR(its.st_mode):
            if not self.replace:
                kinds = ("a folder", "something that is no folder")
                self.problem(
                    where, f"{kinds[stat.S_ISDIR(its.st_mode)]} of that name is in the way at the destination"
                )
                return False
            assert target is not None
            self._remove(target, path, goal)
            own = None
        if stat.S_ISDIR(its.st_mode):
            self.report.folders.append((where, own is None))
            return own is None
        regular = stat.S_ISREG(its.st_mode)
        if regular and its.st_nlink > 1 and self.links and not self.dry:
            self.report.links.append((its.st_dev, its.st_ino, where))
            return True
        if (
            regular
            and own is not None
            and target is not None
            and stat.S_ISREG(own.st_mode)
            and own.st_size == its.st_size
            and (self.options.contents or own.st_mtime_ns // self.unit == its.st_mtime_ns // self.unit)
            and (not self.options.contents or self._equal(source, name, target, goal))
        ):
            self._update(source, name, target, goal, where)
            return False
        if regular and not self.dry and target is not None:
            self._file(source, name, target, path, False)
            return True
        if regular or target is None:
            self.report.counts.copied += 1
            self.report.counts.bytes_copied += its.st_size
            self.report.actions.append(("copy", where))
            return True
        return self._other(source, name, target, path, own)

    def _update(self, source: int, name: str, target: int, goal: str, where: str) -> None:
        """A file whose contents are the same: set what else is not."""
        counts = self.report.counts
        one = self.open_source(name, source)
        try:
            # Reading is enough to set all of it, and one may not be allowed to write to it.
            other = os.open(goal, _READ, dir_fd=target)
            try:
                status, now = os.fstat(one), os.fstat(other)
                attributes = self._attributes(one)
                same = (
                    status.st_mode == now.st_mode
                    and self.keeper.owner(status) == (now.st_uid, now.st_gid)
                    and status.st_mtime_ns // self.unit == now.st_mtime_ns // self.unit
                    and (not self.options.attributes or attributes == extended(other))
                )
                if same:
                    counts.unchanged += 1
                    counts.bytes_unchanged += status.st_size
                    return
                counts.updated += 1
                if self.dry:
                    self.report.actions.append(("update", where))
                else:
                    self.keeper.apply(other, status, attributes, now=now)
            finally:
                os.close(other)
        finally:
            os.close(one)

    def _attributes(self, descriptor: int) -> dict[str, bytes]:
        return extended(descriptor) if self.options.attributes else {}

    def _other(self, source: int, name: str, target: int, path: str, own: os.stat_result | None) -> bool:
        """A symlink, FIFO, socket or device; whether it is new or replaced."""
        counts, goal = self.report.counts, self.goal(name)
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        link = os.readlink(name, dir_fd=source) if kind == stat.S_IFLNK else ""
        if own is not None and stat.S_IFMT(own.st_mode) == kind:
            if link:
                same = os.readlink(goal, dir_fd=target) == link
            else:
                same = (own.st_rdev, own.st_mode) == (status.st_rdev, status.st_mode)
            if same:
                if not self.dry:
                    self._plain_attributes(goal, target, status)
                counts.unchanged += 1
                return False
        if self.dry:
            counts.copied += 1
            self.report.actions.append(("copy", join(path, name)))
            return True
        self.operations.take(1)
        writing = tree.partial_name(goal)
        with contextlib.suppress(FileNotFoundError):
            tree.remove(target, writing)
        if link:
            os.symlink(link, writing, dir_fd=target)
        else:
            os.mknod(writing, status.st_mode, status.st_rdev, dir_fd=target)
        self._plain_attributes(writing, target, status)
        os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
        counts.copied += 1
        return True

    def _plain_attributes(self, name: str, target: int, status: os.stat_result) -> None:
        """Owner and times of what has no contents; never through a symlink that somebody puts there."""
        owner, group = self.keeper.owner(status)
        now = os.stat(name, dir_fd=target, follow_symlinks=False)
        if (now.st_uid, now.st_gid) != (owner, group):
            os.chown(name, owner, group, dir_fd=target, follow_symlinks=False)
        if now.st_mtime_ns // self.unit != status.st_mtime_ns // self.unit:
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)

    # Contents

    def _file(self, source: int, name: str, target: int, path: str, direct: bool) -> None:
        """Copy a regular file.

        Args:
            source: The folder that it is in.
            name: Its name there.
            target: The folder that it comes into.
            path: That folder's path.
            direct: It may have its final name at once.
        """
        for attempt in range(1, TRIES + 1):
            try:
                self._attempt(source, name, target, path, direct)
                return
            except _Changed:
                if attempt == TRIES:
                    self.problem(join(path, name), "it changed while it was read")
            except _Corrupt:
                if attempt == TRIES:
                    self.problem(
                        join(path, name), "what was read back from the destination is not what was written"
                    )

    def _attempt(self, source: int, name: str, target: int, path: str, direct: bool) -> None:
        keeper, report = self.keeper, self.report
        one = self.open_source(name, source)
        try:
            status = os.fstat(one)
            mode, size = status.st_mode, status.st_size
            if not stat.S_ISREG(mode):
                raise _Changed
            if status.st_nlink > 1 and self.links:
                report.links.append((status.st_dev, status.st_ino, join(path, name)))
                return
            if size >= PART:
                self._begin_large(one, status, name, target, path)
                return
            self.operations.take(1)
            sparse = status.st_blocks * 512 < size
            data = None
            if size <= SMALL and not sparse:
                data = os.read(one, size + 1)
                if len(data) != size:
                    raise _Changed
            attributes = extended(one) if self.options.attributes else {}
            plain = (
                direct
                and self.plain_owner
                and not attributes
                and not mode & 0o7000
                and status.st_uid == keeper.user
                and status.st_gid == keeper.group
            )
            goal = self.goal(name)
            writing = goal if direct else tree.partial_name(goal)
            other = _create(writing, mode & 0o777 if plain else 0o600, target)
            try:
                try:
                    if data is None:
                        self._middling(one, other, size, sparse)
                    elif size:
                        self._small(data, other)
                    if not _same(status, os.fstat(one)):
                        raise _Changed
                    if plain:
                        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
                    else:
                        keeper.apply(other, status, attributes)
                finally:
                    # Some file systems tell of a full disk or quota only here.
                    os.close(other)
                if not direct:
                    os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(writing, dir_fd=target)
                raise
            report.counts.copied += 1
            report.counts.bytes_copied += size
        finally:
            os.close(one)

    def _small(self, data: bytes, other: int) -> None:
        """Write what is in memory, and read it back: it must have the same digest."""
        size = len(data)
        self.bandwidth.take(size)
        wanted = b"" if self.verify == "none" else self._hashed(data)
        written = os.write(other, data)
        while written < size:
            written += os.write(other, data[written:])
        if self.verify == "none":
            return
        if self.verify == "device":
            _drop(other, 0, size)
        if self._hashed(os.pread(other, size + 1, 0)) != wanted:
            raise _Corrupt

    def _hashed(self, data: bytes | bytearray) -> bytes:
        digest = self.digest()
        digest.update(data)
        return digest.digest()

    def _middling(self, one: int, other: int, size: int, sparse: bool) -> None:
        if sparse:
            os.ftruncate(other, size)
        elif self._cloned(one, other):
            return
        self._transfer(one, other, 0, size, sparse)

    def _cloned(self, one: int, other: int) -> bool:
        """Whether the file system could share the contents of one file with another."""
        if self.clone:
            try:
                fcntl.ioctl(other, _FICLONE, one)
                return True
            except OSError as error:
                if error.errno in _FULL:
                    raise
                self.clone = False
        return False

    def _transfer(self, one: int, other: int, start: int, end: int, sparse: bool) -> str:
        """Copy a range and verify it; its digest, where one was made.

        Read back block by block, while it is near: faster than in a second go. From the device it takes that.
        """
        ranges = _data(one, start, end) if sparse else [(start, end)]
        device, compare = self.verify == "device", self.verify == "read"
        native = self.native and self.hashes and not device and not self.options.bandwidth
        direct = native and self.direct and self.told is not None
        if (
            self.verify == "none"
            and not direct
            and not self.options.bandwidth
            and self._by_kernel(one, other, ranges)
        ):
            return ""
        if native:
            # The more blocks at a time, the longer a step, as each waits for all of them at its end.
            step = STEP * max(1, self.direct // 2) if direct else STEP
            for begin, finish in ranges:
                for place in range(begin, finish, step):
                    self._step(one, other, place, min(place + step, finish), compare)
            return ""
        digest, again, block, back = self.digest(), self.digest(), *self.buffers
        ranges = list(ranges) if device else ranges
        for begin, finish in ranges:
            place = begin
            while place < finish:
                want = min(BLOCK, finish - place)
                if want != len(block):
                    block, back = bytearray(want), bytearray(want)
                self.bandwidth.take(want)
                if _fill(one, block, place) != want:
                    raise _Changed
                if compare or device:
                    digest.update(block)
                _write(other, block, place)
                if compare:
                    if _fill(other, back, place) != want:
                        raise _Corrupt
                    again.update(back)
                place += want
                self._progress(want)
            block, back = self.buffers
        if device:
            _drop(other, start, end - start)
            again = self._digest_of(other, list(ranges))
        if (compare or device) and again.digest() != digest.digest():
            raise _Corrupt
        return digest.hexdigest() if compare or device else ""

    def _step(self, one: int, other: int, start: int, end: int, compare: bool) -> None:
        """Copy a range by the compiled part."""
        assert self.native
        way = "plain" if self.told is None else "direct" if self.direct else "early"
        same = self.native.transfer(one, other, start, end, compare=compare, way=way, threads=self.direct)
        if same is None:
            raise _Changed
        if not same:
            raise _Corrupt
        self._progress(end - start)

    def _progress(self, size: int) -> None:
        """So many bytes of the part at hand are copied."""
        if self.told is not None:
            self.told += size
            self.report.counts.bytes_copied += size
            self.breathe()

    def _by_kernel(self, one: int, other: int, ranges: Any) -> bool:
        """Whether the kernel could copy, which a server may do by itself."""
        try:
            for begin, finish in ranges:
                while begin < finish:
                    copied = os.copy_file_range(one, other, finish - begin, begin, begin)
                    if not copied:
                        raise _Changed
                    begin += copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            return False
        return True

    def _digest_of(self, descriptor: int, ranges: list[tuple[int, int]]) -> Digest:
        digest = self.digest()
        block = memoryview(self.buffers[1])
        for place, finish in ranges:
            while place < finish:
                got = os.preadv(descriptor, [block[: min(BLOCK, finish - place)]], place)
                if not got:
                    break
                digest.update(block[:got])
                place += got
        return digest

    def _equal(self, source: int, name: str, target: int, goal: str) -> bool:
        """Whether two files of one size have the same contents."""
        one = self.open_source(name, source)
        try:
            other = os.open(goal, _READ, dir_fd=target)
            try:
                return self.same_contents(one, other, 0, os.fstat(one).st_size)
            finally:
                os.close(other)
        finally:
            os.close(one)

    # Large files

    def _begin_large(self, one: int, status: os.stat_result, name: str, target: int, path: str) -> None:
        """Make ready what the parts of a large file are written into; or be done, if it can be cloned."""
        goal = self.goal(name)
        writing = tree.partial_name(goal)
        sparse = status.st_blocks * 512 < status.st_size
        try:
            other = os.open(writing, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=target)
            there = os.fstat(other)
            # What an interrupted run wrote may lie where a file with holes has none.
            usable = (
                stat.S_ISREG(there.st_mode)
                and there.st_uid == self.keeper.user
                and there.st_nlink == 1
                and there.st_size == status.st_size
                and not sparse
            )
            if not usable:
                os.close(other)
                raise FileNotFoundError
        except OSError:
            other = _create(writing, 0o600, target)
            try:
                if not sparse and self._cloned(one, other) and _same(status, os.fstat(one)):
                    self.keeper.apply(other, status, self._attributes(one))
                    os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
                    self.report.counts.copied += 1
                    self.report.counts.bytes_copied += status.st_size
                    return
                os.ftruncate(other, status.st_size)
                if self.native and self.direct and not sparse:
                    self.native.reserve(other, status.st_size)
                there = os.fstat(other)
            finally:
                os.close(other)
        else:
            os.close(other)
        identity = f"{_identity(status)}:{there.st_ino}"
        self.report.large.append((join(path, name), identity, sparse))

    @contextlib.contextmanager
    def _large(self, path: str, identity: str) -> Iterator[tuple[int, int, int, os.stat_result]]:
        """Source, partial copy, the copy's folder and the source's status.

        Raises:
            _Changed: The source is another one than when it was begun.
        """
        above, _, name = path.rpartition("/")
        with contextlib.ExitStack() as opened:
            source = opened.enter_context(tree.folder(self.source, above))
            target = opened.enter_context(tree.folder(self.destination, above))
            one = self.open_source(name, source)
            opened.callback(os.close, one)
            status = os.fstat(one)
            if identity.rpartition(":")[0] != _identity(status):
                raise _Changed
            writing = tree.partial_name(self.goal(name))
            other = os.open(writing, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
            opened.callback(os.close, other)
            # Not something else that somebody has put there meanwhile.
            if str(os.fstat(other).st_ino) != identity.rpartition(":")[2]:
                raise _Changed
            yield one, other, target, status

    def do_part(self, path: str, identity: str, number: int, sparse: bool) -> None:
        """A part of a large file."""
        for attempt in range(1, TRIES + 1):
            self.told = 0
            copied = 0
            try:
                with self._large(path, identity) as (one, other, _, status):
                    self.operations.take(1)
                    start = number * PART
                    end = min(start + PART, status.st_size)
                    digest = self._transfer(one, other, start, end, sparse)
                    if not _same(status, os.fstat(one)):
                        raise _Changed
                    self.report.parts.append((path, number, digest))
                    copied = end - start
                    return
            except _Corrupt:
                if attempt == TRIES:
                    self.fail(path, "what was read back from the destination is not what was written")
            except _Changed:
                self.report.changed.append(path)
                return
            except OSError as error:
                self.fail(path, error)
                return
            finally:
                # Holes count as well; what was in vain does not.
                self.report.counts.bytes_copied += copied - self.told
                self.told = None

    def do_complete(self, path: str, identity: str) -> None:
        """Give a large file, of which all parts are there, its attributes and its name."""
        goal = self.goal(path.rpartition("/")[2])
        try:
            with self._large(path, identity) as (one, other, target, status):
                self.keeper.apply(other, status, self._attributes(one))
                os.rename(tree.partial_name(goal), goal, src_dir_fd=target, dst_dir_fd=target)
                self.report.counts.copied += 1
        except _Changed:
            self.report.changed.append(path)
        except OSError as error:
            self.fail(path, error)

    # Files with several names

    def do_link(self, first: str, others: list[str]) -> None:
        """Give a copied file its other names."""
        above, _, name = first.rpartition("/")
        for path in others:
            below, _, goal = path.rpartition("/")
            try:
                with (
                    tree.folder(self.destination, above) as one,
                    tree.folder(self.destination, below) as target,
                ):
                    self._link(one, name, target, goal, path)
            except OSError as error:
                self.problem(path, error)

    def _link(self, one: int, name: str, target: int, goal: str, path: str) -> None:
        status = os.stat(name, dir_fd=one, follow_symlinks=False)
        try:
            own = os.stat(goal, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            own = None
        if own is not None and os.path.samestat(status, own):
            self.report.counts.unchanged += 1
            return
        if own is not None and stat.S_ISDIR(own.st_mode):
            self.problem(path, "a folder of that name is in the way at the destination")
            return
        self.operations.take(1)
        writing = tree.partial_name(goal)
        with contextlib.suppress(FileNotFoundError):
            tree.remove(target, writing)
        os.link(name, writing, src_dir_fd=one, dst_dir_fd=target, follow_symlinks=False)
        os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
        self.report.counts.copied += 1


def join(path: str, name: str) -> str:
    """The path of an entry of a folder."""
    return f"{path}/{name}" if path else name


def _kind(entry: os.DirEntry[str]) -> str:
    """The letter of an entry, see `Entry`; asking the file system for no more than the folder says."""
    if entry.is_symlink():
        return "o"
    if entry.is_dir(follow_symlinks=False):
        return "d"
    return "f" if entry.is_file(follow_symlinks=False) else "o"


def _kind_of(status: os.stat_result) -> str:
    if stat.S_ISDIR(status.st_mode):
        return "d"
    return "f" if stat.S_ISREG(status.st_mode) else "o"


def statuses(folder: int | None, names: list[str]) -> list[os.stat_result | None]:
    """The status of each name in a folder; None for what is not there.

    The process goes into the folder: with plain names, and without a loop of Python where all are there, that
    takes half the time.
    """
    if folder is None:
        return [None] * len(names)
    os.fchdir(folder)
    try:
        return list(map(os.lstat, names))
    except OSError:
        return [_status(name) for name in names]


_size = operator.attrgetter("st_size")
_links = operator.attrgetter("st_nlink")
_changed = operator.attrgetter("st_ctime_ns")
_kept = operator.attrgetter("st_mode", "st_size", "st_mtime_ns", "st_uid", "st_gid")
_modes = operator.attrgetter("st_mode")


def _all_the_same(theirs: list[os.stat_result | None], ours: list[os.stat_result | None]) -> bool:
    """Whether all are files that have not changed, as they mostly have not; without a loop of Python."""
    if not theirs or None in ours or None in theirs:
        return False
    return (
        max(map(_links, theirs)) == 1
        and max(map(_changed, theirs)) <= min(map(_changed, ours))
        and all(map(stat.S_ISREG, set(map(_modes, theirs))))
        and all(map(operator.eq, map(_kept, theirs), map(_kept, ours)))
    )


def _status(name: str) -> os.stat_result | None:
    try:
        return os.lstat(name)
    except FileNotFoundError:
        return None


def _turned(batch: Batch, turn: float) -> Batch:
    """The same entries, begun at another one."""
    if isinstance(batch, Entries):
        return batch.begun_at(int(turn * len(batch)))
    begin = int(turn * len(batch))
    return batch[begin:] + batch[:begin]


def _create(name: str, mode: int, folder: int) -> int:
    """A new file; what an interrupted run has left under that name is removed."""
    try:
        return os.open(name, _WRITE, mode, dir_fd=folder)
    except FileExistsError:
        tree.remove(folder, name)
        return os.open(name, _WRITE, mode, dir_fd=folder)


def _same(before: os.stat_result, after: os.stat_result) -> bool:
    return (
        before.st_mtime_ns == after.st_mtime_ns
        and before.st_size == after.st_size
        and before.st_ctime_ns == after.st_ctime_ns
    )


def _identity(status: os.stat_result) -> str:
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_dev}:{status.st_ino}"


def _data(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The ranges that hold data, not holes."""
    while start < end:
        try:
            begin = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        if begin >= end:
            return
        start = min(end, os.lseek(descriptor, begin, os.SEEK_HOLE))
        yield begin, start


def _fill(descriptor: int, block: bytearray, place: int) -> int:
    """Read as much as the block holds; how much there was."""
    got = os.preadv(descriptor, [block], place)
    while 0 < got < len(block):
        more = os.preadv(descriptor, [memoryview(block)[got:]], place + got)
        if not more:
            break
        got += more
    return got


def _write(descriptor: int, block: bytearray, place: int) -> None:
    written = os.pwrite(descriptor, block, place)
    while written < len(block):
        written += os.pwrite(descriptor, memoryview(block)[written:], place + written)


def _drop(descriptor: int, start: int, size: int) -> None:
    """Have it on the device, and no longer in this host's memory."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
