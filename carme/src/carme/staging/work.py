"""What a worker does: folders, and what is in them, from the source to the destination."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from carme.staging import tree
from carme.staging.attributes import DEFAULT, attribute_names, extended
from carme.staging.contents import ContentCopier
from carme.staging.entries import (
    READ,
    Batch,
    Task,
    all_unchanged,
    join,
    kind_of,
    rotated,
    size_of,
    statuses,
)
from carme.staging.native import Entries
from carme.staging.options import BATCH

if TYPE_CHECKING:
    pass


class Copier(ContentCopier):
    """Copies folders with all that is in them; its arguments are those of ContentCopier."""

    def __call__(self, task: Task) -> None:
        """Do one task.

        Raises:
            Stop: The destination takes no more.
        """
        kind, *rest = task
        getattr(self, f"do_{kind}")(*rest)
        self.report.warnings |= self.copier.lost

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
                    first = rotated(first, self.options.turn)
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
                        added |= self._remove_surplus(source, target, path)
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
                status = os.fstat(target)
                self.plain_owner = (
                    empty
                    and status.st_uid == self.copier.user
                    and status.st_gid == self.copier.group
                    and not status.st_mode & stat.S_ISGID
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
        if not empty and os.fstat(target).st_uid != self.copier.user:
            os.close(target)
            raise FileExistsError(errno.EEXIST, "")
        return target, empty

    def _settle(self, source: int, target: int, status: os.stat_result) -> None:
        if not self.dry:
            self.copier.settle(source, target, status, self.unit)

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
            self._remove_surplus(source, target, path)
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
        """A folder on both sides; what goes wrong with them is reported. None: missing, in a dry run."""
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

    def _remove_surplus(self, source: int, target: int, path: str) -> bool:
        """Remove what the source does not have; whether there was any."""
        surplus = []
        with os.scandir(target) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(tree.PARTIAL) or (not path and name.startswith(tree.STATE)):
                    continue
                try:
                    os.stat(name, dir_fd=source, follow_symlinks=False)
                except FileNotFoundError:
                    surplus.append(name)
        for name in surplus:
            self._remove(target, path, name)
        return bool(surplus)

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

    def _fresh(self, source: int, target: int, path: str, batch: Batch) -> bool:
        """All entries of a folder that is new at the destination; whether more comes into it later."""
        # Not visible under its name yet, so its files can have theirs at once.
        direct = bool(path)
        if direct:
            batch = self._natively(source, target, batch, None)
        # Not before: what was found until then may have been reported meanwhile.
        waits = len(self.report.large) + len(self.report.links) + len(self.report.folders)
        for kind, name in batch:
            try:
                if kind == "?":
                    kind = kind_of(os.stat(name, dir_fd=source, follow_symlinks=False))
                if kind == "f":
                    self._file(source, name, target, path, direct)
                elif kind == "d":
                    self.report.folders.append((join(path, name), True))
                else:
                    self._copy_node(source, name, target, path, None)
            except OSError as error:
                self.problem(join(path, name), error)
        return waits != len(self.report.large) + len(self.report.links) + len(self.report.folders)

    def _batch(self, source: int, target: int | None, path: str, batch: Batch) -> bool:
        """Entries, some of them perhaps at the destination; whether more comes into it, now or later."""
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

        def report(files: int, size: int) -> None:
            self.report.counts.copied += files
            self.report.counts.bytes_copied += size
            self.flush_if_due()

        return native.copy(source, target, batch, writing, writing is None and self.plain_owner, report)

    def _names(self, source: int, target: int | None, path: str, names: list[str]) -> bool:
        """Entries, some of them perhaps at the destination; whether more comes into it, now or later."""
        counts, unit, user, group = self.report.counts, self.unit, self.copier.user, self.copier.group
        contents = self.options.contents
        added = False
        if not names:
            return added
        sources = statuses(source, names)
        copies = statuses(target, [self.goal(name) for name in names] if self.rename else names)
        if not contents and all_unchanged(sources, copies):
            counts.unchanged += len(names)
            counts.bytes_unchanged += sum(map(size_of, sources))
            return False
        for name, its, own in zip(names, sources, copies, strict=True):
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
                    added |= self._copy_entry(source, name, target, path, its, own)
            except OSError as error:
                self.problem(join(path, name), error)
        return added

    def _copy_entry(
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
                kinds = ("a folder", "something that is not a folder")
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
        return self._copy_node(source, name, target, path, own)

    def _update(self, source: int, name: str, target: int, goal: str, where: str) -> None:
        """A file whose contents are the same: set what else is not."""
        counts = self.report.counts
        original = self.open_source(name, source)
        try:
            # Reading is enough to set all of it, and one may not be allowed to write to it.
            copy = os.open(goal, READ, dir_fd=target)
            try:
                status, now = os.fstat(original), os.fstat(copy)
                attributes = self._attributes(original)
                same = (
                    status.st_mode == now.st_mode
                    and self.copier.owner(status) == (now.st_uid, now.st_gid)
                    and status.st_mtime_ns // self.unit == now.st_mtime_ns // self.unit
                    and (not self.options.attributes or attributes == extended(copy))
                )
                if same:
                    counts.unchanged += 1
                    counts.bytes_unchanged += status.st_size
                    return
                counts.updated += 1
                if self.dry:
                    self.report.actions.append(("update", where))
                else:
                    self.copier.apply(copy, status, attributes, now=now)
            finally:
                os.close(copy)
        finally:
            os.close(original)

    def _copy_node(self, source: int, name: str, target: int, path: str, own: os.stat_result | None) -> bool:
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
        owner, group = self.copier.owner(status)
        now = os.stat(name, dir_fd=target, follow_symlinks=False)
        if (now.st_uid, now.st_gid) != (owner, group):
            os.chown(name, owner, group, dir_fd=target, follow_symlinks=False)
        if now.st_mtime_ns // self.unit != status.st_mtime_ns // self.unit:
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)

    def do_link(self, first: str, aliases: list[str]) -> None:
        """Give a copied file its other names."""
        above, _, name = first.rpartition("/")
        for path in aliases:
            below, _, goal = path.rpartition("/")
            try:
                with (
                    tree.folder(self.destination, above) as folder,
                    tree.folder(self.destination, below) as target,
                ):
                    self._link(folder, name, target, goal, path)
            except OSError as error:
                self.problem(path, error)

    def _link(self, folder: int, name: str, target: int, goal: str, path: str) -> None:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
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
        os.link(name, writing, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
        os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
        self.report.counts.copied += 1
