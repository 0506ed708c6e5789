"""Folders reached without following a symlink, however deep; and what may be copied where."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.staging.options import shown
from carme.translation import message as _

__all__ = [
    "PARTIAL",
    "STATE",
    "check",
    "folder",
    "is_network",
    "partial_name",
    "reason",
    "remove",
    "write_out",
]

#: The folder at the destination's top that holds what an unfinished run needs to be resumed.
STATE = ".carme-staging"
#: What is not complete yet has a name that begins so.
PARTIAL = ".carme-partial-"

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASSING = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

#: How many levels deep a descriptor is held for each while a tree is removed.
_HELD = 200

_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "beegfs", "lustre", "gpfs", "ceph", "9p", "afs", "panfs", "pvfs2",
    "wekafs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs",
}  # fmt: skip


def partial_name(name: str) -> str:
    """What `name` is called until it is complete: always short, and the same in the next run."""
    try:
        # The same function, without the library that hashlib loads for all the others.
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b

    return PARTIAL + blake2b(os.fsencode(name), digest_size=16).hexdigest()


@contextlib.contextmanager
def folder(root: int, relative: str) -> Iterator[int]:
    """The descriptor of a folder below `root`, with no symlink on the way.

    Raises:
        OSError: It is not there, cannot be read, or a part of the way is a symlink or no folder.
    """
    parts = relative.split("/") if relative else ["."]
    here = root
    try:
        for number, part in enumerate(parts, 1):
            flags = FOLDER if number == len(parts) else _PASSING
            deeper = os.open(part, flags, dir_fd=here)
            if here != root:
                os.close(here)
            here = deeper
        yield here
    finally:
        if here != root:
            os.close(here)


def remove(parent: int, name: str) -> int:
    """Remove an entry with all that is below it, following no symlink; how many entries that were."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return 1
    # By descriptors and without recursion: as deep as the file system lets it be.
    removed = 0
    above: list[tuple[int, str]] = []
    here = os.open(name, FOLDER, dir_fd=parent)
    try:
        while True:
            deeper = None
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        deeper = entry.name
                        break
                    os.unlink(entry.name, dir_fd=here)
                    removed += 1
            if deeper is not None:
                if len(above) < _HELD:
                    above.append((here, deeper))
                    here = os.open(deeper, FOLDER, dir_fd=here)
                else:
                    # Too deep to hold a descriptor for each level: lift the rest up to the top.
                    os.rename(
                        deeper, f"{PARTIAL}{os.getpid()}-{removed}", src_dir_fd=here, dst_dir_fd=above[0][0]
                    )
                continue
            os.close(here)
            if not above:
                break
            here, emptied = above.pop()
            os.rmdir(emptied, dir_fd=here)
            removed += 1
        here = -1
        os.rmdir(name, dir_fd=parent)
    finally:
        for descriptor in [here, *(each for each, _ in above)]:
            if descriptor >= 0:
                os.close(descriptor)
    return removed + 1


def check(source: str, destination: str) -> tuple[str, str]:
    """The real paths of both, if one can be copied to the other.

    Raises:
        NotFound: There is no such source, or the destination's parent is not there.
        InvalidRequest: They are the same or lie in one another, or are not of one kind.
    """
    try:
        source = os.path.realpath(source, strict=True)
    except OSError as error:
        raise NotFound(
            _("The source {source} cannot be reached: {why}.", source=shown(source), why=reason(error)),
            _("Check the path."),
        ) from None
    kind = os.stat(source).st_mode
    if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
        raise InvalidRequest(
            _("The source {source} is neither a folder nor a file.", source=shown(source)),
            _("Name a folder or a file."),
        )
    destination = os.path.realpath(destination)
    if not os.path.isdir(parent := os.path.dirname(destination)):
        raise NotFound(
            _("There is no folder {parent} to put the copy into.", parent=shown(parent)),
            _("Create it: mkdir -p {parent}", parent=shown(parent)),
        )
    if stat.S_ISDIR(kind):
        if os.path.lexists(destination) and not os.path.isdir(destination):
            raise InvalidRequest(
                _(
                    "The source is a folder, but the destination {destination} is a file.",
                    destination=shown(destination),
                ),
                _("Name a folder as the destination."),
            )
        if os.path.lexists(os.path.join(source, STATE)):
            raise InvalidRequest(
                _("The source {source} is itself a copy that is not finished.", source=shown(source)),
                _(
                    "Finish that copy first. If nobody does, remove {source}.",
                    source=shown(os.path.join(source, STATE)),
                ),
            )
        if _within(destination, source):
            raise InvalidRequest(
                _("The destination {destination} is inside the source.", destination=shown(destination)),
                _("Name one outside of it."),
            )
        if _within(source, destination):
            raise InvalidRequest(
                _("The source {source} is inside the destination.", source=shown(source)),
                _("Name a destination beside it."),
            )
    return source, destination


def _within(path: str, top: str) -> bool:
    """Whether `path` is `top` or below it, under whatever name."""
    wanted = os.stat(top) if os.path.isdir(top) else None
    while wanted is not None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), wanted):
                return True
        if path == "/":
            return False
        path = os.path.dirname(path)
    return False


def is_network(path: str) -> bool:
    """Whether a path is on a file system whose every operation goes over a network."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
        for line in mounts:
            fields, _, about = line.partition(" - ")
            if fields.split()[2] == number:
                return about.split()[0] in _NETWORK
    return False


_REASONS = {
    errno.ENOENT: "it vanished, or a folder on the way to it did",
    errno.EACCES: "you have no permission",
    errno.EPERM: "the system does not permit it",
    errno.ELOOP: "a symlink is in the way",
    errno.ENOTDIR: "something that is not a folder is in the way",
    errno.EISDIR: "a folder is in the way",
    errno.EEXIST: "something is in the way",
    errno.ENOSPC: "there is no space left",
    errno.EDQUOT: "your quota is used up",
    errno.EROFS: "the file system can only be read",
    errno.EIO: "the device reported an error",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.EFBIG: "the file is too large for this file system",
}


def reason(error: OSError) -> str:
    """Why a call failed, in words."""
    number = error.errno or 0
    return _REASONS.get(number) or os.strerror(number)


def write_out(descriptor: int) -> None:
    """Have a whole file system written to its device.

    Raises:
        CarmeError: The device does not take it.
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
        error = OSError(ctypes.get_errno(), "")
        raise CarmeError(
            _("The destination could not be written to its device: {why}.", why=reason(error)),
            _("Check the device, then copy again and compare the contents."),
        )
