"""The state that lies in files of the active head, and its copy on the standby.

The active head writes all of it to standard output, as the one program that the standby's key may start; the
standby reads it over ssh. The format is that of a backup, unsealed: owners by name, SQLite as of one moment.
The audit log is not among it: each head's log is its own, and may be added to only.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from carme.backup.archive import (
    place_member,
    put_file,
    remove_beside,
    require_safe,
    set_mode,
    unknown_owners,
)
from carme.backup.contents import BESIDE_DATABASE, SQLITE
from carme.backup.databases import copy_sqlite
from carme.config import Settings
from carme.errors import CarmeError

__all__ = ["HEADS_FOLDER", "StateCopy", "last_copy", "pull", "receive", "send"]

#: Each head's own: its key for ssh and what the others are known by.
HEADS_FOLDER = Path("/etc/carme/heads")
#: The last member: what ends before it was cut off.
END = "end"
PULL_SECONDS = 120
#: What each head makes itself, and what only says that something runs.
OWN_OF_A_HEAD = {"static", "prepared", "sync.lock", "celerybeat-schedule", "jupyterhub-proxy.pid", "lock"}


@dataclass(frozen=True)
class StateCopy:
    """The last copy of the active head's state.

    Attributes:
        source: The head that it was copied from.
        epoch: Of the lease at that time.
        time: Seconds since 1970, when it had arrived.
    """

    source: str
    epoch: int
    time: float


def roots(settings: Settings, config: Path) -> list[Path]:
    """Folders whose files both heads must have the same."""
    return [
        settings.secrets.directory,
        config.parent / "tls",
        config.parent / "monitoring",
        settings.broker.state_directory,
        settings.hub.state_directory,
        settings.portal.state_directory,
    ]


def send(settings: Settings, config: Path, out: BinaryIO) -> int:
    """Write this head's state; the number of files.

    A database that is broken or locked is left out, with a line on standard error: the standby keeps the copy
    that it has.
    """
    count = 0
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(fileobj=out, mode="w|gz") as archive:
        for path in _files(roots(settings, config)):
            try:
                if path.suffix in SQLITE and path.is_file() and not path.is_symlink():
                    copy = Path(scratch, "copy.sqlite")
                    copy.unlink(missing_ok=True)
                    copy_sqlite(path, copy)
                    put_file(archive, path, copy)
                else:
                    put_file(archive, path)
            except FileNotFoundError:
                continue  # it has gone meanwhile
            except CarmeError as error:
                # The accounts of portal and hub may write what they like; it must not stop the copy.
                print(f"Left out: {str(error)!r}", file=sys.stderr)
                continue
            count += 1
        member = tarfile.TarInfo(END)
        text = json.dumps({"files": count}).encode()
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return count


def _files(folders: list[Path]) -> Iterator[Path]:
    """Each folder before what is in it."""
    for folder in folders:
        if not folder.is_dir():
            continue
        yield folder
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder).parts
            if inside[0] not in OWN_OF_A_HEAD and not path.name.endswith(BESIDE_DATABASE):
                yield path


def receive(settings: Settings, config: Path, stream: BinaryIO) -> int:
    """Put another head's state in place; the number of files.

    Nothing is written before all of it has arrived. The accounts of portal and hub can change their folders
    on the other head, so links are copied but never followed. Certificates of a reader that this head does
    not have, such as Zabbix, are root's here.

    Raises:
        CarmeError: It was cut off, names a file that is none of the state, or has an owner without account.
    """
    allowed = roots(settings, config)
    cut = CarmeError("The state of the other head did not arrive completely.", "Try again.")
    try:
        with tarfile.open(fileobj=stream, mode="r:gz") as archive:
            members = archive.getmembers()
            if not members or members[-1].name != END:
                raise cut
            _adopt(members[:-1], config.parent / "monitoring")
            placed = _places(members[:-1], allowed)
            for member, path, root in placed:
                place_member(archive, member, path, owned=True, below=root, clear=True)
                if member.isfile() and path.suffix in SQLITE:
                    remove_beside(path, below=root)
            for member, path, root in reversed(placed):
                if member.isdir():
                    set_mode(path, member, below=root)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise cut from None
    return len(placed)


def _adopt(members: list[tarfile.TarInfo], folder: Path) -> None:
    """Give what is in a folder to root's group where this head does not know its own."""
    unknown = {name for name in {member.gname for member in members} if unknown_owners((), (name,))}
    for member in members:
        if member.gname in unknown and folder in _path(member).parents:
            member.gname, member.gid = "", 0


def _places(members: list[tarfile.TarInfo], allowed: list[Path]) -> list[tuple[tarfile.TarInfo, Path, Path]]:
    """Each member with its path and the root that this is in; see `receive`."""
    placed: list[tuple[tarfile.TarInfo, Path, Path]] = []
    no_folders: set[Path] = set()
    for member in members:
        require_safe(member)
        path = _path(member)
        root = next((root for root in allowed if path == root or root in path.parents), None)
        is_root_a_file = path == root and not member.isdir()
        if root is None or is_root_a_file or not no_folders.isdisjoint(path.parents):
            raise CarmeError(
                f"The other head sent {member.name!r}, which is not a state of a head.",
                "Both heads must run the same version of Carme: run site.yml.",
            )
        if not member.isdir():
            no_folders.add(path)
        placed.append((member, path, root))
    missing = unknown_owners({each.uname for each in members}, {each.gname for each in members})
    if missing:
        raise CarmeError(
            f"This head lacks owners of files: {', '.join(missing)}. Nothing was written.",
            "Give both heads the same accounts, or change the owner on the active head.",
        )
    return placed


def _path(member: tarfile.TarInfo) -> Path:
    return Path("/") / member.name.partition("/")[2]


def pull(settings: Settings, config: Path, source: str, ssh: list[str] | None = None) -> int:
    """Copy the state of the head `source` to this one; the number of files. Raises CarmeError."""
    command = ssh or [
        "ssh",
        *("-T", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=10"),
        # A head that died meanwhile must not keep `promote` waiting for the lock.
        *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2"),
        *("-o", f"UserKnownHostsFile={HEADS_FOLDER / 'known_hosts'}", "-o", "StrictHostKeyChecking=yes"),
        *("-i", str(HEADS_FOLDER / "id_ed25519"), f"root@{source}"),
    ]
    with tempfile.TemporaryFile() as stream, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=errors,
                timeout=PULL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CarmeError(
                f"{source} did not send its state within {PULL_SECONDS} s.", "Check that it can be reached."
            ) from None
        errors.seek(0)
        shown = errors.read(10_000).decode(errors="replace").strip()
        if done.returncode:
            reason = shown[:1000] or f"exit code {done.returncode}"
            raise CarmeError(
                f"The state of {source} cannot be copied: {reason}.",
                f"See that root reaches {source} by ssh with {HEADS_FOLDER / 'id_ed25519'}.",
            )
        if shown:
            print(f"{source}: {shown}", file=sys.stderr)
        stream.seek(0)
        return receive(settings, config, stream)


def note_copy(folder: Path, copied: StateCopy) -> None:
    """Note for `last_copy` what was copied."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "copied.json.new"
    draft.write_text(json.dumps(asdict(copied)))
    draft.replace(folder / "copied.json")


def last_copy(folder: Path) -> StateCopy | None:
    """What was copied last, or None."""
    try:
        return StateCopy(**json.loads((folder / "copied.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def age(copied: StateCopy) -> float:
    """Seconds since it was copied."""
    return max(0.0, time.time() - copied.time)
