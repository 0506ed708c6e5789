"""How much room a user has left where a folder lies: the user's quota, and the file system's free space.

Queried as the user and for the user alone, which needs no privilege: quotactl(2) for local file systems, the
program `quota` (quota-tools, which asks the server's rquotad) for NFS, BeeGFS's own. It needs the standard
library alone.
"""

import ctypes
import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carme.errors import CarmeError
from carme.storage import beegfs

__all__ = ["Limits", "Space", "limit", "parse_quota", "space_of"]

KIBI = 1024  # bytes of a block, of quotactl and of `quota` alike
NEAR = 0.9  # share of a quota from which it counts as nearly used up
#: Bytes free in the whole file system below which it is nearly full, or full.
FEW, NONE = 1 << 30, 1 << 20
SECONDS = 10  # for a program to answer

# QCMD(Q_GETQUOTA, USRQUOTA), QCMD(Q_SETQUOTA, USRQUOTA) and QIF_LIMITS of linux/quota.h
_GET_USER_QUOTA, _SET_USER_QUOTA = 0x800007 << 8, 0x800008 << 8
_THE_LIMITS = 5
_QUOTACTL_FD = (
    443  # the system call's number, since Linux 5.14 and on all architectures; C libraries have no name
)


@dataclass(frozen=True)
class Limits:
    """What a user uses and may use of a file system: bytes and files, None: no limit.

    Attributes:
        limit, files_limit: Beyond these nothing can be written.
        soft, files_soft: Beyond these nothing can be written once the days of grace are over.
    """

    used: int
    soft: int | None = None
    limit: int | None = None
    files: int = 0
    files_soft: int | None = None
    files_limit: int | None = None

    @property
    def share(self) -> float | None:
        """The larger part that is used up, of bytes or files, from 0 on; None without a limit."""
        parts = [
            amount / most
            for amount, most in (
                (self.used, _least(self.soft, self.limit)),
                (self.files, _least(self.files_soft, self.files_limit)),
            )
            if most
        ]
        return max(parts, default=None)

    @property
    def over(self) -> bool:
        """Whether nothing more can be written, by the hard limits."""
        return any(
            most is not None and amount >= most
            for amount, most in ((self.used, self.limit), (self.files, self.files_limit))
        )


@dataclass(frozen=True)
class Space:
    """A folder's room. `size` and `free` are the file system's bytes, for all its users together."""

    path: str
    size: int
    free: int
    quota: Limits | None = None

    @property
    def level(self) -> Literal["", "near", "full"]:
        """Whether writing fails already (`full`), or may before long (`near`)."""
        if self.free < NONE or (self.quota and self.quota.over):
            return "full"
        share = self.quota.share if self.quota else None
        return "near" if self.free < FEW or (share is not None and share >= NEAR) else ""

    @property
    def left(self) -> int:
        """Bytes that the user can still write: what is free, and what the quota leaves of it."""
        most = _least(self.quota.soft, self.quota.limit) if self.quota else None
        return (
            self.free
            if self.quota is None or most is None
            else max(0, min(self.free, most - self.quota.used))
        )


@dataclass(frozen=True)
class _Mount:
    path: str
    kind: str
    source: str


def space_of(path: str, *, programs: bool = True) -> Space:
    """The room that this process's user has in a folder.

    Args:
        path: The folder.
        programs: Whether to ask programs as well, which takes its time, and not the kernel alone.

    Raises:
        OSError: The folder is not there, or may not be read.
    """
    status = os.statvfs(path)
    mount = _mount_of(os.path.realpath(path))
    return Space(
        path, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize,
        _limits(path, mount, os.getuid(), programs) if mount else None,
    )  # fmt: skip


def _limits(path: str, mount: _Mount, uid: int, programs: bool) -> Limits | None:
    if mount.kind == "beegfs":
        return _of_beegfs(mount.path, uid) if programs else None
    if mount.kind in ("nfs", "nfs4"):
        return _of_program(mount.path) if programs else None
    return _of_kernel(path, mount.source, uid)


def _mount_of(path: str, table: str | None = None) -> _Mount | None:
    """Where a path lies; the last of several mounts in one place is the one that is seen."""
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape") if table is None else table
    found = None
    for line in text.splitlines():
        fields, _, about = line.partition(" - ")
        words = about.split(" ")
        if len(fields.split(" ")) < 5 or len(words) < 2:
            continue
        place = _plain(fields.split(" ")[4])
        inside = place == "/" or path == place or path.startswith(f"{place}/")
        if inside and (found is None or len(place) >= len(found.path)):
            found = _Mount(place, words[0], _plain(words[1]))
    return found


def _plain(text: str) -> str:
    """A word of mountinfo, in which spaces and the like are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


class _Block(ctypes.Structure):
    """`struct if_dqblk` of linux/quota.h."""

    _fields_ = (
        ("hard", ctypes.c_uint64),
        ("soft", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("files_hard", ctypes.c_uint64),
        ("files_soft", ctypes.c_uint64),
        ("files", ctypes.c_uint64),
        ("grace", ctypes.c_uint64),
        ("files_grace", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


def _of_kernel(path: str, device: str, uid: int) -> Limits | None:
    """The kernel's own account; None where the file system keeps none."""
    block = _Block()
    if _quotactl(_GET_USER_QUOTA, path, device, uid, block):
        return None
    return Limits(
        used=block.used,
        soft=block.soft * KIBI or None,
        limit=block.hard * KIBI or None,
        files=block.files,
        files_soft=block.files_soft or None,
        files_limit=block.files_hard or None,
    )


def _quotactl(command: int, path: str, device: str, uid: int, block: _Block) -> int:
    """Ask the kernel, or set its values; 0, or the number of the error."""
    library = ctypes.CDLL(None, use_errno=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # By the folder: who has no /dev of the host's can ask, too.
        failed = library.syscall(_QUOTACTL_FD, folder, command, uid, ctypes.byref(block))
    finally:
        os.close(folder)
    if failed and ctypes.get_errno() == errno.ENOSYS and device.startswith("/dev/"):
        failed = library.quotactl(command, os.fsencode(device), uid, ctypes.byref(block))
    return ctypes.get_errno() if failed else 0


def limit(path: str, uid: int, *, most: int, soft: int = 0, files: int = 0) -> bool:
    """Give a user limits where the kernel or BeeGFS keeps quotas, as root; limits that are there stay.

    Args:
        path: A folder of the file system.
        most, soft: Bytes beyond which nothing can be written, or only for a while; 0: no such limit. BeeGFS
            knows none for a while.
        files: How many files; 0: any number.

    Returns:
        Whether there were none before.

    Raises:
        CarmeError: It keeps no quotas, or refuses.
        OSError: The folder is not there.
    """
    mount = _mount_of(os.path.realpath(path))
    kind, device = (mount.kind, mount.source) if mount else ("", "")
    if system := beegfs.system_of(path) if kind == "beegfs" else None:
        return system.limit(uid, most, files)
    block = _Block()
    failed = _quotactl(_GET_USER_QUOTA, path, device, uid, block)
    if failed not in (0, errno.ENOENT):
        raise CarmeError(
            f"{path} ({kind or 'no mount'}) keeps no quotas here: {os.strerror(failed)}.",
            "Mount it with usrquota, install BeeGFS's tools for one, or leave it out of [quotas].",
            code="quota",
        )
    if block.hard or block.soft or block.files_hard or block.files_soft:
        return False
    block.hard, block.soft = most // KIBI, soft // KIBI
    block.files_hard, block.valid = files, _THE_LIMITS
    if failed := _quotactl(_SET_USER_QUOTA, path, device, uid, block):
        raise CarmeError(
            f"The quota on {path} cannot be set: {os.strerror(failed)}.", "It takes root.", code="quota"
        )
    return True


def _of_program(mount: str) -> Limits | None:
    program = shutil.which("quota", path="/usr/bin:/bin")
    if program is None:
        return None
    try:
        # It says by its exit code that a limit is exceeded, too.
        done = subprocess.run(
            [program, "--no-wrap", "--raw-grace", "--verbose", "--filesystem", mount],
            capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_quota(done.stdout)


def parse_quota(output: str) -> Limits | None:
    """The last line that `quota --no-wrap --raw-grace` prints: a file system, and eight numbers."""
    for line in reversed(output.splitlines()):
        # What exceeds a limit has a star.
        words = [word.removesuffix("*") for word in line.split()][-8:]
        if len(words) == 8 and len(line.split()) > 8 and all(word.isdecimal() for word in words):
            used, soft, hard, _, files, files_soft, files_hard, _ = map(int, words)
            return Limits(
                used * KIBI,
                soft * KIBI or None,
                hard * KIBI or None,
                files,
                files_soft or None,
                files_hard or None,
            )
    return None


def _of_beegfs(path: str, uid: int) -> Limits | None:
    """BeeGFS's account; of several storage pools the fullest one."""
    for mount in beegfs.mounts():
        if mount.path == path:
            try:
                quotas = beegfs.BeeGFS(mount).quota(uid)
            except CarmeError:
                return None
            if quotas:
                fullest = max(quotas, key=lambda quota: quota.share)
                return Limits(
                    fullest.used, None, fullest.limit, files=fullest.files, files_limit=fullest.files_limit
                )
    return None


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit), default=None)
