"""Copies what is in files: small ones at once, large ones in parts that several workers share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from carme.staging import tree
from carme.staging.attributes import AttributeCopier, extended
from carme.staging.entries import (
    BLOCK,
    FICLONE,
    FULL,
    READ,
    SMALL,
    STEP,
    create,
    data_ranges,
    drop_cached,
    fill,
    identity_of,
    join,
    same_file,
    write,
)
from carme.staging.native import hasher
from carme.staging.options import PART, TRIES
from carme.staging.walker import CorruptCopy, SourceChanged, Walker

if TYPE_CHECKING:
    from carme.staging.digests import Digest


class ContentCopier(Walker):
    """Copies what is in files.

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
        self.copier = AttributeCopier(self.options.attributes)
        self.replace, self.dry, self.leftovers, self.rename = replace, dry, leftovers, rename
        self.unit = 10**9 if seconds else 1
        self.native = self.compiled(self.copier, self.unit)
        self.top = os.fstat(self.destination)
        self.verify = self.options.verify
        # The compiled part knows no digest but one. Where none is requested, to compare bytes is as good.
        self.hashes = (
            self.verify == "none" or not self.options.hash or (self.options.hash == "xxh3" and bool(hasher()))
        )
        # Until the file systems refuse it. What is cloned is neither read nor written, so no limit holds it.
        self.clone = True
        self.links = True
        self.plain_owner = False
        #: How much of the part at hand is reported already, in bytes; None: it is reported at its end.
        self.reported: int | None = None

    def goal(self, name: str) -> str:
        """What a source's name is at the destination."""
        return self.rename[1] if self.rename else name

    def _attributes(self, descriptor: int) -> dict[str, bytes]:
        return extended(descriptor) if self.options.attributes else {}

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
            except SourceChanged:
                if attempt == TRIES:
                    self.problem(join(path, name), "it changed while it was read")
            except CorruptCopy:
                if attempt == TRIES:
                    self.problem(
                        join(path, name), "what was read back from the destination is not what was written"
                    )

    def _attempt(self, source: int, name: str, target: int, path: str, direct: bool) -> None:
        copier, report = self.copier, self.report
        original = self.open_source(name, source)
        try:
            status = os.fstat(original)
            mode, size = status.st_mode, status.st_size
            if not stat.S_ISREG(mode):
                raise SourceChanged
            if status.st_nlink > 1 and self.links:
                report.links.append((status.st_dev, status.st_ino, join(path, name)))
                return
            if size >= PART:
                self._begin_large(original, status, name, target, path)
                return
            self.operations.take(1)
            sparse = status.st_blocks * 512 < size
            data = None
            if size <= SMALL and not sparse:
                data = os.read(original, size + 1)
                if len(data) != size:
                    raise SourceChanged
            attributes = extended(original) if self.options.attributes else {}
            plain = (
                direct
                and self.plain_owner
                and not attributes
                and not mode & 0o7000
                and status.st_uid == copier.user
                and status.st_gid == copier.group
            )
            goal = self.goal(name)
            writing = goal if direct else tree.partial_name(goal)
            copy = create(writing, mode & 0o777 if plain else 0o600, target)
            try:
                try:
                    if data is None:
                        self._copy_medium(original, copy, size, sparse)
                    elif size:
                        self._small(data, copy)
                    if not same_file(status, os.fstat(original)):
                        raise SourceChanged
                    if plain:
                        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
                    else:
                        copier.apply(copy, status, attributes)
                finally:
                    # Some file systems report a full disk or quota only here.
                    os.close(copy)
                if not direct:
                    os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(writing, dir_fd=target)
                raise
            report.counts.copied += 1
            report.counts.bytes_copied += size
        finally:
            os.close(original)

    def _small(self, data: bytes, copy: int) -> None:
        """Write what is in memory, and read it back: it must have the same digest."""
        size = len(data)
        self.bandwidth.take(size)
        wanted = b"" if self.verify == "none" else self._hashed(data)
        written = os.write(copy, data)
        while written < size:
            written += os.write(copy, data[written:])
        if self.verify == "none":
            return
        if self.verify == "device":
            drop_cached(copy, 0, size)
        if self._hashed(os.pread(copy, size + 1, 0)) != wanted:
            raise CorruptCopy

    def _hashed(self, data: bytes | bytearray) -> bytes:
        digest = self.digest()
        digest.update(data)
        return digest.digest()

    def _copy_medium(self, original: int, copy: int, size: int, sparse: bool) -> None:
        if sparse:
            os.ftruncate(copy, size)
        elif self._cloned(original, copy):
            return
        self._transfer(original, copy, 0, size, sparse)

    def _cloned(self, original: int, copy: int) -> bool:
        """Whether the file system could share the contents of one file with another."""
        if self.clone:
            try:
                fcntl.ioctl(copy, FICLONE, original)
                return True
            except OSError as error:
                if error.errno in FULL:
                    raise
                self.clone = False
        return False

    def _transfer(self, original: int, copy: int, start: int, end: int, sparse: bool) -> str:
        """Copy a range and verify it; its digest, where one was made.

        Read back block by block, while it is near: faster than in a second go. From the device it takes that.
        """
        ranges = data_ranges(original, start, end) if sparse else [(start, end)]
        device, compare = self.verify == "device", self.verify == "read"
        native = self.native and self.hashes and not device and not self.options.bandwidth
        direct = native and self.direct and self.reported is not None
        if (
            self.verify == "none"
            and not direct
            and not self.options.bandwidth
            and self._by_kernel(original, copy, ranges)
        ):
            return ""
        if native:
            # The more blocks at a time, the longer a step, as each waits for all of them at its end.
            step = STEP * max(1, self.direct // 2) if direct else STEP
            for begin, finish in ranges:
                for place in range(begin, finish, step):
                    self._step(original, copy, place, min(place + step, finish), compare)
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
                if fill(original, block, place) != want:
                    raise SourceChanged
                if compare or device:
                    digest.update(block)
                write(copy, block, place)
                if compare:
                    if fill(copy, back, place) != want:
                        raise CorruptCopy
                    again.update(back)
                place += want
                self._progress(want)
            block, back = self.buffers
        if device:
            drop_cached(copy, start, end - start)
            again = self._digest_of(copy, list(ranges))
        if (compare or device) and again.digest() != digest.digest():
            raise CorruptCopy
        return digest.hexdigest() if compare or device else ""

    def _step(self, original: int, copy: int, start: int, end: int, compare: bool) -> None:
        """Copy a range by the compiled part."""
        assert self.native
        mode = "plain" if self.reported is None else "direct" if self.direct else "early"
        same = self.native.transfer(
            original, copy, start, end, compare=compare, mode=mode, threads=self.direct
        )
        if same is None:
            raise SourceChanged
        if not same:
            raise CorruptCopy
        self._progress(end - start)

    def _progress(self, size: int) -> None:
        """So many bytes of the part at hand are copied."""
        if self.reported is not None:
            self.reported += size
            self.report.counts.bytes_copied += size
            self.flush_if_due()

    def _by_kernel(self, original: int, copy: int, ranges: Any) -> bool:
        """Whether the kernel could copy, which a server may do by itself."""
        try:
            for begin, finish in ranges:
                while begin < finish:
                    copied = os.copy_file_range(original, copy, finish - begin, begin, begin)
                    if not copied:
                        raise SourceChanged
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
                size_read = os.preadv(descriptor, [block[: min(BLOCK, finish - place)]], place)
                if not size_read:
                    break
                digest.update(block[:size_read])
                place += size_read
        return digest

    def _equal(self, source: int, name: str, target: int, goal: str) -> bool:
        """Whether two files of one size have the same contents."""
        original = self.open_source(name, source)
        try:
            copy = os.open(goal, READ, dir_fd=target)
            try:
                return self.same_contents(original, copy, 0, os.fstat(original).st_size)
            finally:
                os.close(copy)
        finally:
            os.close(original)

    def _begin_large(self, original: int, status: os.stat_result, name: str, target: int, path: str) -> None:
        """Make ready what the parts of a large file are written into; or be done, if it can be cloned."""
        goal = self.goal(name)
        writing = tree.partial_name(goal)
        sparse = status.st_blocks * 512 < status.st_size
        try:
            copy = os.open(writing, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=target)
            there = os.fstat(copy)
            # What an interrupted run wrote may lie where a file with holes has none.
            usable = (
                stat.S_ISREG(there.st_mode)
                and there.st_uid == self.copier.user
                and there.st_nlink == 1
                and there.st_size == status.st_size
                and not sparse
            )
            if not usable:
                os.close(copy)
                raise FileNotFoundError
        except OSError:
            copy = create(writing, 0o600, target)
            try:
                if not sparse and self._cloned(original, copy) and same_file(status, os.fstat(original)):
                    self.copier.apply(copy, status, self._attributes(original))
                    os.rename(writing, goal, src_dir_fd=target, dst_dir_fd=target)
                    self.report.counts.copied += 1
                    self.report.counts.bytes_copied += status.st_size
                    return
                os.ftruncate(copy, status.st_size)
                if self.native and self.direct and not sparse:
                    self.native.reserve(copy, status.st_size)
                there = os.fstat(copy)
            finally:
                os.close(copy)
        else:
            os.close(copy)
        identity = f"{identity_of(status)}:{there.st_ino}"
        self.report.large.append((join(path, name), identity, sparse))

    @contextlib.contextmanager
    def _large(self, path: str, identity: str) -> Iterator[tuple[int, int, int, os.stat_result]]:
        """Source, partial copy, the copy's folder and the source's status.

        Raises:
            SourceChanged: The source is another one than when it was begun.
        """
        above, _, name = path.rpartition("/")
        with contextlib.ExitStack() as opened:
            source = opened.enter_context(tree.folder(self.source, above))
            target = opened.enter_context(tree.folder(self.destination, above))
            original = self.open_source(name, source)
            opened.callback(os.close, original)
            status = os.fstat(original)
            if identity.rpartition(":")[0] != identity_of(status):
                raise SourceChanged
            writing = tree.partial_name(self.goal(name))
            copy = os.open(writing, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
            opened.callback(os.close, copy)
            # Not something else that somebody has put there meanwhile.
            if str(os.fstat(copy).st_ino) != identity.rpartition(":")[2]:
                raise SourceChanged
            yield original, copy, target, status

    def do_part(self, path: str, identity: str, number: int, sparse: bool) -> None:
        """A part of a large file."""
        for attempt in range(1, TRIES + 1):
            self.reported = 0
            copied = 0
            try:
                with self._large(path, identity) as (original, copy, _, status):
                    self.operations.take(1)
                    start = number * PART
                    end = min(start + PART, status.st_size)
                    digest = self._transfer(original, copy, start, end, sparse)
                    if not same_file(status, os.fstat(original)):
                        raise SourceChanged
                    self.report.parts.append((path, number, digest))
                    copied = end - start
                    return
            except CorruptCopy:
                if attempt == TRIES:
                    self.fail(path, "what was read back from the destination is not what was written")
            except SourceChanged:
                self.report.changed.append(path)
                return
            except OSError as error:
                self.fail(path, error)
                return
            finally:
                # Holes count as well; what was in vain does not.
                self.report.counts.bytes_copied += copied - self.reported
                self.reported = None

    def do_complete(self, path: str, identity: str) -> None:
        """Give a large file its attributes and its name, once all its parts are there."""
        goal = self.goal(path.rpartition("/")[2])
        try:
            with self._large(path, identity) as (original, copy, target, status):
                self.copier.apply(copy, status, self._attributes(original))
                os.rename(tree.partial_name(goal), goal, src_dir_fd=target, dst_dir_fd=target)
                self.report.counts.copied += 1
        except SourceChanged:
            self.report.changed.append(path)
        except OSError as error:
            self.fail(path, error)
