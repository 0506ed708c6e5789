"""BeeGFS 7 (`beegfs-ctl`) and 8 (`beegfs`): its mounts, how folders are striped, quotas, free space.

Everything runs as the caller; changing stripe patterns takes root, or a folder whose owner BeeGFS lets do it.
Source of the programs' outputs and options: the documentation of BeeGFS 7.4 and 8; of quotas, targets
and where files begin in release 8 the columns that its program `beegfs` has (github.com/ThinkParQ/beegfs-go).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from carme.errors import CarmeError

__all__ = [
    "BeeGFS",
    "Mount",
    "Pattern",
    "Quota",
    "Target",
    "balanced",
    "first_targets",
    "fit",
    "mounts",
    "parse_first_target",
    "parse_first_target_8",
    "parse_pattern",
    "parse_quota",
    "parse_quota_8",
    "parse_targets",
    "parse_targets_8",
    "suited",
    "system_of",
]

Item = TypeVar("Item")

_SECONDS = 30
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
#: Of files whose mean size is below this (bytes), each lies on one target in small chunks.
SMALL = 1 << 20
#: From this mean size on (bytes), each file lies on all the targets that are useful for one reader.
LARGE = 256 << 20
#: The pool that every BeeGFS has.
FIRST_POOL = "1"
#: The place of so many files at most is queried: each time a program is run.
QUERY_BATCH = 128


@dataclass(frozen=True)
class Mount:
    """A mounted BeeGFS; `configuration` is the client's file, where the mount names one."""

    path: str
    configuration: str = ""


@dataclass(frozen=True)
class Pattern:
    """How new files in a folder are spread. `chunk` is in bytes; `pool` is a storage pool's number."""

    kind: Literal["raid0", "buddymirror"] = "raid0"
    chunk: int = 512 << 10
    targets: int = 4
    pool: int | None = None


@dataclass(frozen=True)
class Quota:
    """What a user uses and may use, in one storage pool. Sizes in bytes; None: no limit."""

    pool: str
    used: int
    limit: int | None
    files: int
    files_limit: int | None
    #: By what BeeGFS's program knows the pool; release 7 prints a name that it does not take.
    reference: str = FIRST_POOL

    @property
    def share(self) -> float:
        """The larger part that is used up, from 0 on; above 1 nothing can be written."""
        parts = [self.used / self.limit if self.limit else 0.0]
        parts.append(self.files / self.files_limit if self.files_limit else 0.0)
        return max(parts)


@dataclass(frozen=True)
class Target:
    """A storage target's number, size and free space in bytes."""

    number: str
    size: int
    free: int


def mounts(table: str | None = None) -> list[Mount]:
    """The BeeGFS file systems that are mounted here.

    Args:
        table: The content of `/proc/self/mountinfo`; None: the present one.
    """
    text = Path("/proc/self/mountinfo").read_text(errors="replace") if table is None else table
    found = []
    for line in text.splitlines():
        fields, _, about = line.partition(" - ")
        if about.split(" ", 1)[0] == "beegfs":
            options = about.split()[2].split(",") if len(about.split()) > 2 else []
            named = [option.partition("=")[2] for option in options if option.startswith("cfgFile=")]
            path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
            found.append(Mount(path, named[0] if named else ""))
    return found


def suited(files: int, size: int, targets: int, pool: int | None = None) -> Pattern:
    """The pattern for what is in a folder, or will be.

    Many small files: one target each, so that opening one asks one server, and small chunks. Few large ones:
    spread over as many targets as there are, up to 16, in large chunks, so that one reader gets many servers.

    Args:
        files: How many files.
        size: Their bytes in all.
        targets: Storage targets of the file system, or of the pool.
        pool: The storage pool to use.
    """
    mean = size / files if files else 0
    if mean < SMALL:
        return Pattern(chunk=64 << 10 if mean < 64 << 10 else 512 << 10, targets=1, pool=pool)
    if mean < LARGE:
        return Pattern(chunk=1 << 20, targets=max(1, min(4, targets)), pool=pool)
    return Pattern(chunk=4 << 20, targets=max(1, min(16, targets)), pool=pool)


class BeeGFS:
    """One mounted BeeGFS.

    Args:
        mount: Which one.

    Raises:
        CarmeError: Neither of its programs is installed.
    """

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        #: 8: the program `beegfs`; 7: `beegfs-ctl`.
        self.version = 8 if shutil.which("beegfs") else 7
        if self.version == 7 and not shutil.which("beegfs-ctl"):
            raise CarmeError(
                "Neither beegfs nor beegfs-ctl is installed here.",
                "Install BeeGFS's tools (beegfs-tools, beegfs-utils).",
            )

    def pattern(self, folder: str) -> Pattern:
        """How new files in a folder are spread. Raises CarmeError."""
        return parse_pattern(self._entry(folder))

    def _entry(self, path: str) -> str:
        if self.version == 8:
            return self._run("beegfs", "entry", "info", "--retro", "--verbose", path)
        return self._run("beegfs-ctl", *self._mount_options(), "--getentryinfo", "--verbose", path)

    def set_pattern(self, folder: str, pattern: Pattern) -> None:
        """Have new files in a folder spread so; files that are there stay as they are. Raises CarmeError."""
        if self.version == 8:
            words = ["beegfs", "entry", "set"]
            words += [f"--num-targets={pattern.targets}", f"--chunk-size={pattern.chunk}"]
            if pattern.pool is not None:
                words.append(f"--pool=storage:{pattern.pool}")
            if pattern.kind == "buddymirror":
                words.append("--pattern=mirrored")
        else:
            words = ["beegfs-ctl", *self._mount_options(), "--setpattern"]
            words += [f"--numtargets={pattern.targets}", f"--chunksize={pattern.chunk}"]
            if pattern.pool is not None:
                words.append(f"--storagepoolid={pattern.pool}")
            if pattern.kind == "buddymirror":
                words.append("--pattern=buddymirror")
        self._run(*words, folder)

    def first_target(self, file: str) -> str:
        """The number of the target, or of the buddy group, that a file begins on. Raises CarmeError."""
        if self.version == 8:
            # What it prints in the style of release 7 has them in no order.
            words = ["entry", "info", "--output=ndjson", file]
            return parse_first_target_8(self._run("beegfs", f"--mount={self.mount.path}", *words))
        return parse_first_target(self._entry(file))

    def quota(self, uid: int) -> list[Quota]:
        """A user's quotas, one for each pool; all but root may ask for their own alone. Raises CarmeError."""
        if self.version == 8:
            user_option = "current" if uid == os.getuid() else str(uid)
            words = ["quota", "list-usage", f"--uids={user_option}", "--raw", "--output=ndjson"]
            return parse_quota_8(self._run("beegfs", f"--mount={self.mount.path}", *words), uid)
        return parse_quota(self._run("beegfs-ctl", *self._mount_options(), "--getquota", "--uid", str(uid)))

    def limit(self, uid: int, most: int, files: int = 0) -> bool:
        """Give a user limits in each pool in which there are none yet, which takes root.

        Args:
            most: Bytes.
            files: How many chunk files; 0: any number.

        Returns:
            Whether there was such a pool.

        Raises:
            CarmeError: BeeGFS refuses.
        """
        known = self.quota(uid)
        free = [each.reference for each in known if each.limit is None and each.files_limit is None]
        for pool in free if known else [FIRST_POOL]:  # it may not know users who have no files yet
            if self.version == 8:
                words = ["quota", "set-limits", f"--uid={uid}", f"--space={most}"]
                words += [f"--inode={files}"] if files else []
                self._run("beegfs", f"--mount={self.mount.path}", *words, pool)
            else:
                words = ["--setquota", "--uid", str(uid), f"--sizelimit={most >> 10}K"]
                words += [f"--inodelimit={files or 'unlimited'}", f"--storagepoolid={pool}"]
                self._run("beegfs-ctl", *self._mount_options(), *words)
        return bool(free) or not known

    def space(self) -> tuple[int, int]:
        """Bytes in all, and bytes that are free."""
        status = os.statvfs(self.mount.path)
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def targets(self) -> list[Target]:
        """The storage targets with their free space. Raises CarmeError."""
        if self.version == 8:
            words = ["target", "list", "--node-type=storage", "--capacity", "--raw", "--output=ndjson"]
            return parse_targets_8(self._run("beegfs", f"--mount={self.mount.path}", *words))
        words = ["--listtargets", "--nodetype=storage", "--spaceinfo"]
        return parse_targets(self._run("beegfs-ctl", *self._mount_options(), *words))

    def _mount_options(self) -> list[str]:
        if self.mount.configuration:
            return [f"--cfgFile={self.mount.configuration}"]
        return [f"--mount={self.mount.path}"]

    def _run(self, *words: str) -> str:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CarmeError(f"{words[0]} cannot be queried: {error}.", "Tell an administrator.") from None
        if done.returncode:
            message = (done.stderr.strip() or done.stdout.strip()).splitlines()
            why = message[-1][:200] if message else "it says nothing"
            raise CarmeError(f"{words[0]} failed: {why}.", "Tell an administrator.")
        return done.stdout


def system_of(path: str) -> BeeGFS | None:
    """The BeeGFS that a path lies on; None if on none, or if its programs are not here."""
    path = os.path.realpath(path)
    around = [
        mount for mount in mounts() if path == mount.path or path.startswith(f"{mount.path.rstrip('/')}/")
    ]
    if not around:
        return None
    try:
        return BeeGFS(max(around, key=lambda mount: len(mount.path)))
    except CarmeError:
        return None


def fit(folder: str, files: int, size: int) -> bool:
    """Have a folder's new files spread as suits what is to come, where it is on a BeeGFS that allows that.

    Args:
        folder: The folder, which is there.
        files, size: How many files will come, and their bytes in all.

    Returns:
        Whether it was done. What keeps it from being done is not an error: data can be read in any pattern.
    """
    system = system_of(folder)
    if system is None:
        return False
    path = os.path.realpath(folder)
    try:
        now = system.pattern(path)
        wanted = suited(files, size, len(system.targets()), now.pool)
        if (wanted.chunk, wanted.targets) == (now.chunk, now.targets):
            return False
        system.set_pattern(path, replace(wanted, kind=now.kind))
    except CarmeError:
        return False
    return True


def first_targets(files: Sequence[str], most: int = QUERY_BATCH) -> dict[str, str]:
    """The target that each file begins on, for the first so many of them that lie on a BeeGFS.

    What BeeGFS does not report is left out: files can be read in any order.
    """
    found: dict[str, str] = {}
    system = system_of(files[0]) if files else None
    if system is None:
        return found
    with contextlib.suppress(CarmeError):
        for file in files[:most]:
            found[file] = system.first_target(file)
    return found


def balanced(items: Sequence[Item], target: Callable[[Item], str | None]) -> list[Item]:
    """An order in which readers who take one after the other read from as many targets as there are at once.

    In turn one of each target, those with most that is left first; what is not known to lie on one comes in
    its own turn.

    Args:
        items: What is to be read; the order among those of one target stays.
        target: Where each begins; None: that is not known.
    """
    waiting: dict[str | None, deque[Item]] = {}
    for item in items:
        waiting.setdefault(target(item), deque()).append(item)
    order: list[Item] = []
    while waiting:
        for key in sorted(waiting, key=lambda each: -len(waiting[each])):
            order.append(waiting[key].popleft())
            if not waiting[key]:
                del waiting[key]
    return order


def parse_pattern(output: str) -> Pattern:
    """`beegfs-ctl --getentryinfo` and `beegfs entry info --retro`. Raises CarmeError."""
    kind = re.search(r"\+ Type: (\w[\w ]*)", output)
    chunk = re.search(r"\+ Chunksize: ([0-9.]+ ?\w*)", output)
    targets = re.search(r"\+ Number of storage targets: desired: (\d+)", output)
    pool = re.search(r"\+ Storage Pool: (\d+)", output)
    if not (kind and chunk and targets):
        raise CarmeError(
            "The stripe pattern cannot be read from what BeeGFS's program says.", "Tell an administrator."
        )
    mirrored = "mirror" in kind[1].lower()
    return Pattern(
        kind="buddymirror" if mirrored else "raid0",
        chunk=_size(chunk[1]) or 0,
        targets=int(targets[1]),
        pool=int(pool[1]) if pool else None,
    )


def parse_first_target(output: str) -> str:
    """`beegfs-ctl --getentryinfo` of a file: the first target or, where they are mirrored, buddy group.

    Raises:
        CarmeError: BeeGFS does not report it; that of a folder it never does.
    """
    found = re.search(r"\+ Storage (?:targets|mirror buddy groups):\s+\+ (\d+)", output)
    return _known_target(found[1] if found else "")


def parse_first_target_8(output: str) -> str:
    """`beegfs entry info --output=ndjson` of a file: the same.

    Raises:
        CarmeError: BeeGFS does not report it; that of a folder it never does.
    """
    for values in _lines(output):
        for column in ("storage targets", "buddy groups"):
            first = str(values.get(column, "")).partition(",")[0].strip()
            if first.isdecimal():
                return first
    return _known_target("")


def _known_target(number: str) -> str:
    if not number:
        raise CarmeError(
            "The target cannot be read from what BeeGFS's program says.", "Tell an administrator."
        )
    return number


def parse_quota(output: str) -> list[Quota]:
    """`beegfs-ctl --getquota`: a table for each storage pool."""
    found, pool, number = [], "", FIRST_POOL
    for line in output.splitlines():
        if match := re.match(r"Quota information for storage pool (.*) \(ID: (\d+)\):", line):
            pool, number = match.groups()
        cells = [cell.strip() for part in line.split("||") for cell in part.split("|")]
        if len(cells) == 6 and cells[1].isdecimal():
            used, files = _size(cells[2]) or 0, int(_size(cells[4]) or 0)
            found.append(Quota(pool, used, _size(cells[3]), files, _size(cells[5]), number))
    return found


def parse_quota_8(output: str, uid: int) -> list[Quota]:
    """`beegfs quota list-usage --raw --output=ndjson`: a line for each user and storage pool."""
    found = []
    for values in _lines(output):
        used, _, most = str(values.get("space", "")).partition("/")
        files, _, files_most = str(values.get("inode", "")).partition("/")
        if values.get("type") == "user" and str(values.get("id")) == str(uid) and _number(used) is not None:
            pool = str(values.get("pool", ""))
            counts = _number(used) or 0, _number(most), _number(files) or 0, _number(files_most)
            found.append(Quota(pool, *counts, reference=pool))
    return found


def parse_targets(output: str) -> list[Target]:
    """`beegfs-ctl --listtargets --spaceinfo`: a table, whose columns depend on the other options."""
    found, columns = [], list[str]()
    for line in output.splitlines():
        words = line.split()
        if "TargetID" in words:
            columns = words
        elif columns and len(words) >= len(columns) and words[columns.index("TargetID")].isdecimal():
            size, free = (_size(words[columns.index(name)]) for name in ("Total", "Free"))
            if size is not None and free is not None:
                found.append(Target(words[columns.index("TargetID")], size, free))
    return found


def parse_targets_8(output: str) -> list[Target]:
    """`beegfs target list --capacity --raw --output=ndjson`."""
    found = []
    for values in _lines(output):
        size, free = _number(values.get("space")), _number(values.get("sfree"))
        if size is not None and free is not None:
            found.append(Target(str(values.get("id", "")).rpartition(":")[2], size, free))
    return found


def _lines(output: str) -> list[dict[str, Any]]:
    """The objects of a program that prints one a line, and a remark here and there."""
    found = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict):
                found.append(values)
    return found


def _number(value: Any) -> int | None:
    """A number of BeeGFS 8; None for what is unlimited or not known: words, -1, and the largest there is."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) < (1 << 63) - 1 else None


def _size(text: str) -> int | None:
    """Bytes, or a number, in `601.03 GiB`, `512k`, `17688628`; None for `unlimited` and the like."""
    match = re.fullmatch(r"([0-9.]+) ?([KMGTP]?)(?:I?B|B)?", text.strip().upper())
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
