"""Where the ranges of a run lie: files in shared memory, and on disk what has no room there.

    /dev/shm/carme-net-USER-RUN@NODE/NAME      the bytes, for any program of this user on this node
                                    /.range-NAME   what they are
                                    /.run, .alive, .lock

Processes change it one after the other (`.lock`). The coordinator and its workers hold `.alive` together: the
kernel frees it when the last of them is gone, in whatever way, and not before.

Folders that are open to other users are not used. The one in a run's folder may hold files of the user, too:
there a range is what has a description, which is written first.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from carme_runtime.out_of_core.sizes import show_size
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.range_files import (
    MARK,
    NEW,
    Description,
    copy,
    describe_range,
    description_of,
    descriptions_in,
    has_bytes,
    make_file,
    move,
    read_small,
    write_all,
)

SHARED = Path("/dev/shm")
#: Ranges on disk, in the folder of their run.
DISK = "memory"
#: Copies for the case that a node is lost, there as well.
COPIES = "copies"
#: Seconds that the workers of a killed coordinator may take to end.
ENDING_SECONDS = 30.0
_COUNT = struct.Struct("<q")
_UNKNOWN = -1
#: Ends the identity of a folder that somebody is removing.
_REMOVED = ".removed"
#: The copy of a range that all nodes map, in the run's folder.
ON_DISK = -1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: (folder of a run, its identity, a node) -> names of ranges.
Lasting = Callable[[Path, str, str], set[str]]


def node_name() -> str:
    """This node, as its job calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Store:
    """The ranges of a run.

    Args:
        identity: Of the run.
        folder: Of the run.
        limit: Bytes that may lie in shared memory; None: half of what is free.
        spills: Folders for what has no room; the first one takes it, in the others are earlier ones.
        node: Of a job, other than that of the program that runs the net: it has folders of its own.
    """

    def __init__(
        self, identity: str, folder: Path, limit: int | None, spills: list[Path], node: str = ""
    ) -> None:
        self.identity, self.folder = identity, folder
        self.node = node or node_name()
        self.shared = SHARED / f"carme-net-{os.getuid()}-{identity}@{self.node}"
        #: What lasts, for all nodes.
        self.disk = folder / DISK
        end = f"@{node}" if node else ""
        own = folder / f"{DISK}{end}"
        self.spills = [*(each / f"carme-net-{identity}{end}" for each in spills), own]
        #: Whether other nodes have ranges of the run, too.
        self.has_peers = False
        self.limit = usual_limit() if limit is None else limit
        #: What says to others that processes of this run are there.
        self.alive = -1
        self._locked = -1

    @property
    def folders(self) -> list[Path]:
        """Where ranges may lie."""
        return list(dict.fromkeys((self.shared, *self.spills, self.disk)))

    @property
    def begun(self) -> bool:
        """Whether it is this process, or one that it was forked from, that has the ranges."""
        return self.alive >= 0

    def begin(self) -> None:
        """Take the ranges over, once the workers of an earlier coordinator are gone.

        Raises:
            PetriError: They do not go, or shared memory cannot be used.
        """
        end = time.monotonic() + ENDING_SECONDS
        while not self.begun:
            try:
                self.shared.mkdir(mode=0o700, exist_ok=True)
                _refuse_others(self.shared)
                alive = os.open(self.shared / ".alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # moved away just now
                continue
            except OSError as error:
                raise _unusable(self.shared, error) from None
            if _take(alive) and _is_there(self.shared / ".alive", alive):
                self.alive = alive
                (self.shared / ".run").write_text(json.dumps(str(self.folder)))
                self._count(_UNKNOWN)
                return
            os.close(alive)
            if time.monotonic() > end:
                raise PetriError(
                    f"Workers of the run in {self.folder} are still there.", "End them, and resume the run."
                )
            time.sleep(0.01)

    def end(self) -> None:
        """Free shared memory, which nobody has any more."""
        _remove(self.shared)
        for folder in self._own_folders():
            with contextlib.suppress(OSError):  # it has ranges that last
                folder.rmdir()

    def let_go(self) -> None:
        """Leave the ranges to the process that resumes the run."""
        if self.begun:
            os.close(self.alive)
            self.alive = -1

    def create(self, description: Description, content: memoryview | None = None) -> int:
        """Make a range.

        Args:
            description: Of it.
            content: Its bytes; None: all are 0.

        Returns:
            Its file, opened so that nobody deletes or moves it until it is closed.

        Raises:
            PetriError: It is there already, or there is no room.
        """
        with self.locked():
            if self.find(description.name):
                raise PetriError(
                    f"There is a range {description.name} already.",
                    "Choose another name, or delete it in a task that ends before.",
                )
            folder, spilled = self._room_for(description)
            counted = self._counted()
            self._count(_UNKNOWN)  # for the next process, if this one is killed here
            try:
                file = make_file(folder, description)
            except OSError as error:
                raise _unusable(folder, error) from None
            fcntl.flock(file, fcntl.LOCK_SH)
            self._count(counted if spilled else counted + description.size)
        try:
            # So that a lack of memory is an error here, and not a signal in the middle of a task.
            if content is None:
                os.posix_fallocate(file, 0, description.size)
            else:
                write_all(file, content)
            if spilled:
                os.fdatasync(file)  # a file server may say only now that a quota is used up
        except BaseException as error:  # also somebody's Ctrl-C
            unlock(file)
            self.remove(description.name)
            if isinstance(error, OSError):
                raise self._too_large(description, folder, error) from None
            raise
        return file

    def receive(self, description: Description, fill: Callable[[mmap.mmap], None]) -> None:
        """Take a copy of a range that another node has, in the place of an older one.

        Raises:
            PetriError: There is no room.
            OSError, EOFError: What `fill` raises, as its bytes do not come.
        """
        with self.locked():
            folder, _ = self._room_for(description)
        new = folder / f"{NEW}{description.name}"
        try:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, description.size)
                with mmap.mmap(file, description.size) as mapped:
                    fill(mapped)
            finally:
                os.close(file)
        except BaseException as error:
            new.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise self._too_large(description, folder, error) from None
            raise
        with self.locked():
            self._count(_UNKNOWN)
            for own_folder in self._own_folders():
                if own_folder != folder:
                    (own_folder / f"{MARK}{description.name}").unlink(missing_ok=True)
                    (own_folder / description.name).unlink(missing_ok=True)
            describe_range(folder, description)
            new.rename(folder / description.name)

    def save_copy(self, name: str) -> None:
        """Copy a range into the run's folder, from where `take_copies` takes it when this node is lost.

        Raises:
            OSError: The disk is full or fails.
        """
        with self.locked():
            for folder in self._own_folders():
                if folder != self.disk and (folder / f"{MARK}{name}").exists():
                    _make(self.folder / COPIES)
                    copy(folder, self.folder / COPIES, name)

    def take_copy(self, name: str) -> bool:
        """Make the copy of a range in the run's folder the range itself: whether there was one."""
        if not (self.folder / COPIES / f"{MARK}{name}").exists():
            return False
        with self.locked():
            _make(self.disk)
            move(self.folder / COPIES, self.disk, name)
        return True

    def remove_copy(self, name: str) -> None:
        """Remove the copy of a range in the run's folder, which is old."""
        for each in (f"{MARK}{name}", name):  # first what makes it a copy
            with contextlib.suppress(OSError):
                (self.folder / COPIES / each).unlink()

    def clean_copies(self, names: set[str]) -> None:
        """Remove copies in the run's folder but those of these names."""
        folder = self.folder / COPIES
        if not folder.exists():
            return
        for path in folder.iterdir():
            if path.name.removeprefix(MARK).removeprefix(NEW) not in names:
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()

    def find(self, name: str) -> tuple[Path, Description] | None:
        """A range, wherever it lies."""
        for folder in self._folders():
            with contextlib.suppress(OSError, ValueError, TypeError):
                found = description_of(read_small(folder / f"{MARK}{name}"))
                if has_bytes(folder, found):
                    return folder / name, found
        return None

    def remove(self, name: str) -> None:
        """Free a range on this node. Who has it mapped still sees its bytes."""
        with self.locked():
            for folder in self._own_folders():
                path, mark = folder / name, folder / f"{MARK}{name}"
                size = _size_of(path) if folder != self.disk else None
                if size is None and not mark.exists():
                    continue
                counted = self._noted()
                self._count(_UNKNOWN)  # for the next process, if this one is killed here
                path.unlink(missing_ok=True)
                mark.unlink(missing_ok=True)
                if counted != _UNKNOWN and folder == self.shared:
                    counted -= size or 0
                self._count(counted)

    def descriptions(self) -> dict[str, Description]:
        """All ranges of this node by their names."""
        found: dict[str, Description] = {}
        # From memory to the disk: what another process moves there meanwhile is in one of the two.
        for folder in self._own_folders():
            for each in descriptions_in(folder):
                found.setdefault(each.name, each)
        return found

    def clean(self, names: set[str], task: int | None = None) -> None:
        """Remove all ranges but those of these names; with a number those that this task has made alone."""
        descriptions = self.descriptions()
        for description in descriptions.values():
            if description.name not in names and task in (None, description.task):
                self.remove(description.name)
        if task is None:
            for folder in self._own_folders():
                with contextlib.suppress(OSError):  # not there
                    for path in folder.iterdir():
                        if self._is_left(path, descriptions):
                            path.unlink()

    def move_to_disk(self, name: str) -> None:
        """Move a range into the run's folder.

        Raises:
            OSError: The disk is full or fails; the range is where it was.
        """
        with self.locked():
            for folder in self._own_folders():
                if folder != self.disk and (folder / f"{MARK}{name}").exists():
                    _make(self.disk)
                    self._count(_UNKNOWN)
                    move(folder, self.disk, name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes anything meanwhile. Not to be nested."""
        try:
            file = os.open(self.shared / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a run that has ended: nobody changes it
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._locked = file
            yield
        finally:
            self._locked = -1
            unlock(file)

    def _own_folders(self) -> list[Path]:
        return [each for each in (self.shared, *self.spills) if _is_own(each)]

    def _folders(self) -> Iterator[Path]:
        last = () if self.disk in self.spills else (self.disk,)
        return (each for each in (self.shared, *self.spills, *last) if _is_own(each))

    def _is_left(self, path: Path, descriptions: dict[str, Description]) -> bool:
        """Whether a process that was killed has left a file, which belongs to no range."""
        name = path.name.removeprefix(MARK)
        if name.startswith(NEW):
            return True
        if name == path.name and path.parent == self.disk:
            return False
        return name not in descriptions and not name.startswith(".")

    def _room_for(self, description: Description) -> tuple[Path, bool]:
        """The folder for a new range, and whether it is on disk."""
        if self._counted() + description.size > self.limit:
            self._spill(self._counted() + description.size - self.limit)
        if self._counted() + description.size <= self.limit:
            return self.shared, False
        folder = self.spills[0]
        try:
            _make(folder, parents=True)
            disk = os.statvfs(folder)
        except OSError as error:
            raise _unusable(folder, error) from None
        if disk.f_bavail * disk.f_frsize < description.size:
            raise self._too_large(description, folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return folder, True

    def _spill(self, shortage: int) -> None:
        """Move ranges that no task has mapped to the disk, the oldest first."""
        movable = [each for each in descriptions_in(self.shared) if each.size <= self.limit]
        by_age = sorted(movable, key=lambda each: (self.shared / f"{MARK}{each.name}").stat().st_mtime_ns)
        if sum(each.size for each in by_age) < shortage:
            return
        for each in by_age:
            if shortage <= 0:
                return
            if not is_mapped(self.shared / each.name):
                with contextlib.suppress(OSError):
                    _make(self.spills[0], parents=True)
                    self._count(_UNKNOWN)
                    move(self.shared, self.spills[0], each.name)
                    shortage -= each.size

    def _noted(self) -> int:
        """Bytes in shared memory as the last process has noted them, or `_UNKNOWN`."""
        data = os.pread(self._locked, _COUNT.size, 0) if self._locked >= 0 else b""
        return _COUNT.unpack(data)[0] if data else _UNKNOWN

    def _counted(self) -> int:
        """Bytes in shared memory."""
        known = self._noted()
        if known == _UNKNOWN:
            known = sum(
                each.stat().st_size for each in os.scandir(self.shared) if not each.name.startswith(".")
            )
        return known

    def _count(self, size: int) -> None:
        with contextlib.suppress(OSError):
            if self._locked >= 0:
                os.pwrite(self._locked, _COUNT.pack(size), 0)
                return
            file = os.open(self.shared / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(file, _COUNT.pack(size), 0)
            os.close(file)

    def _too_large(self, description: Description, folder: Path, error: OSError) -> PetriError:
        if error.errno not in _NO_ROOM:
            return _unusable(folder, error)
        return PetriError(
            f"Range {description.name} of {show_size(description.size)} is too large: memory for ranges has "
            f"a limit of {show_size(self.limit)}, and {folder} has no room for it.",
            'Delete ranges, or start the net with a larger memory="..." or with spill= on a larger disk.',
        )


def sweep(own: str, lasting: Lasting) -> None:
    """Free shared memory that nets of this user have left on this node whose processes are all dead.

    What a run may still be resumed with goes to the disk in its folder; what no run is left for goes.

    Args:
        own: The identity of a run that takes its ranges over itself.
        lasting: Says which ranges of a folder, an identity and a node a run may be resumed with.
    """
    for shared in SHARED.glob(f"carme-net-{os.getuid()}-*"):
        if _identity_of(shared) == own:
            continue
        with contextlib.suppress(OSError, ValueError):
            _refuse_others(shared)
            if _identity_of(shared).endswith(_REMOVED):
                shutil.rmtree(shared, ignore_errors=True)  # who removed it was killed, or is about it
                continue
            alive = os.open(shared / ".alive", os.O_RDWR | os.O_CLOEXEC)
            try:
                if _take(alive):
                    _evacuate(shared, Path(json.loads((shared / ".run").read_text())), lasting)
            finally:
                unlock(alive)


def is_mapped(path: Path) -> bool:
    """Whether a task has a range mapped."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _take(file)
    finally:
        unlock(file)


def unlock(file: int) -> None:
    """Close a file that this process has locked."""
    with contextlib.suppress(OSError):
        # To close it is not enough: a process that was forked meanwhile has the lock, too.
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _identity_of(shared: Path) -> str:
    return shared.name.split("-", 3)[3].partition("@")[0]


def _evacuate(shared: Path, folder: Path, lasting: Lasting) -> None:
    names = lasting(folder, _identity_of(shared), shared.name.partition("@")[2])
    if names:
        _make(folder / DISK)
        for description in descriptions_in(shared):
            if description.name in names:
                move(shared, folder / DISK, description.name)
    _remove(shared)


def _remove(shared: Path) -> None:
    """Free a folder of shared memory, into which nothing comes any more.

    Under another name, so that who makes files by its path meanwhile finds none, or a new one.
    """
    run, _, node = shared.name.partition("@")
    with contextlib.suppress(OSError):
        shared = shared.rename(shared.with_name(f"{run}{_REMOVED}@{node}"))
    shutil.rmtree(shared, ignore_errors=True)


def _size_of(path: Path) -> int | None:
    """Of a file; None: there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_there(path: Path, file: int) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_ino == os.fstat(file).st_ino
    return False


def _refuse_others(folder: Path) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(errno.EPERM, "it must be this user's alone (chmod 700)")


def _is_own(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        _refuse_others(folder)
        return True
    return False


def _make(folder: Path, parents: bool = False) -> None:
    """Make a folder for ranges. Raises OSError where it cannot be, or is not this user's alone."""
    folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
    _refuse_others(folder)


def usual_limit() -> int:
    """Bytes that may lie in shared memory where nobody says how many: half of what it could take now."""
    return _free() // 2


def _free() -> int:
    """Bytes that shared memory could take now."""
    with contextlib.suppress(OSError):
        found = os.statvfs(SHARED)
        free = found.f_bavail * found.f_frsize
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) << 10)
        return free
    return 0


def _unusable(folder: Path, error: OSError) -> PetriError:
    return PetriError(
        f"The folder {folder} for ranges cannot be used: {error.strerror or error}.",
        "Name another one with spill=, or ask the site for /dev/shm.",
    )
