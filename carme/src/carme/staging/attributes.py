"""Owner, mode, times, extended attributes and ACLs, from one file or folder to another."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct

__all__ = ["ACCESS", "DEFAULT", "AttributeCopier", "attribute_names", "extended"]

ACCESS = "system.posix_acl_access"
DEFAULT = "system.posix_acl_default"
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_OWNING_GROUP, _MASK = 0x04, 0x10


def extended(descriptor: int) -> dict[str, bytes]:
    """A file's extended attributes, ACLs among them; empty where the file system has none."""
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return {}
        raise
    found = {}
    for name in names:
        # Another one may have removed it meanwhile; SELinux labels belong to the place, not to the file.
        if name != "security.selinux":
            with contextlib.suppress(OSError):
                found[name] = os.getxattr(descriptor, name)
    return found


def attribute_names(descriptor: int) -> list[str]:
    """Their names alone; none where they cannot be requested."""
    try:
        return os.listxattr(descriptor)
    except OSError:
        return []


class AttributeCopier:
    """Sets attributes as far as this process may, and remembers what could not be kept.

    Args:
        attributes: Whether extended attributes and ACLs are kept.
    """

    def __init__(self, attributes: bool = True) -> None:
        self.attributes = attributes
        self.user = os.geteuid()
        self.group = os.getegid()
        self.groups = {self.group, *os.getgroups()}
        self.lost: set[str] = set()

    def owner(self, status: os.stat_result) -> tuple[int, int]:
        """Owner and group that a copy can get: as root all, else one's own and a group that one is in."""
        if self.user == 0:
            return status.st_uid, status.st_gid
        return self.user, status.st_gid if status.st_gid in self.groups else self.group

    def apply(
        self,
        target: int,
        status: os.stat_result,
        attributes: dict[str, bytes],
        *,
        now: os.stat_result | None = None,
        times: bool = True,
    ) -> None:
        """Give the open file or folder `target` what the source has, the times last.

        Args:
            target: Its descriptor.
            status: The source's status.
            attributes: The source's extended attributes.
            now: What `target` has, if that is known.
            times: Set the times as well.
        """
        now = now or os.fstat(target)
        owner, group = self.owner(status)
        if (now.st_uid, now.st_gid) != (owner, group):
            os.fchown(target, owner, group)
        mode = stat.S_IMODE(status.st_mode)
        if owner != status.st_uid:
            mode &= ~stat.S_ISUID
        if group != status.st_gid:
            mode &= ~stat.S_ISGID
        if self.attributes:
            mode = self._extended(target, mode, attributes)
        if stat.S_IMODE(os.fstat(target).st_mode) != mode:
            os.fchmod(target, mode)
        if times:
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def settle(self, source: int, target: int, status: os.stat_result, unit: int = 1) -> None:
        """Give a folder in which nothing changes any more its attributes.

        Args:
            source: Its source's descriptor.
            target: Its descriptor.
            status: The source's status when it was begun to be read.
            unit: Times count in so many nanoseconds.
        """
        now = os.fstat(target)
        same = (
            now.st_mode == status.st_mode
            and now.st_mtime_ns // unit == status.st_mtime_ns // unit
            and (now.st_uid, now.st_gid) == self.owner(status)
            and now.st_ctime_ns >= status.st_ctime_ns
        )
        if not same:
            self.apply(target, status, extended(source) if self.attributes else {}, now=now)

    def _extended(self, target: int, mode: int, wanted: dict[str, bytes]) -> int:
        """Set them, remove others; the mode that may be set besides."""
        present = extended(target)
        for name in present.keys() - wanted.keys():
            with contextlib.suppress(OSError):
                os.removexattr(target, name)
        for name, value in wanted.items():
            if present.get(name) == value:
                continue
            try:
                os.setxattr(target, name, value)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT) and name.startswith("user."):
                    self.lost.add(f"not kept: {name}: the destination has no room for it")
                elif error.errno in (*_UNSUPPORTED, errno.EPERM, errno.EACCES, errno.EINVAL):
                    what = "ACLs" if name in (ACCESS, DEFAULT) else f"{name.split('.')[0]}.* attributes"
                    why = "may be set by root only" if error.errno in (errno.EPERM, errno.EACCES) else ""
                    self.lost.add(f"not kept: {what}: {why or 'the destination does not support them'}")
                else:
                    raise
                if name == ACCESS:
                    mode = without_acl(mode, value)
        return mode


def without_acl(mode: int, acl: bytes) -> int:
    """The mode of a file that loses its ACL: the owning group gets no more than the ACL gave it.

    In the mode of a file with an ACL the group's bits are the ACL's mask, which may be wider.
    """
    bits = {tag: permissions for tag, permissions, _ in struct.iter_unpack("<HHI", acl[4:])}
    group = bits.get(_OWNING_GROUP, 0) & bits.get(_MASK, 7)
    return (mode & ~0o070) | (group << 3)
