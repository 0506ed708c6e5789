"""Making, checking and restoring a backup: an encrypted, compressed tar archive with names of owners.

Numbers of system accounts differ between hosts, so only names count. A backup is read as a whole, and every
account is looked for, before a restore writes the first file.
"""

import contextlib
import grp
import io
import itertools
import json
import logging
import os
import pwd
import re
import shutil
import socket
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from carme import __version__
from carme.backup.append_only import replaceable
from carme.backup.contents import BESIDE_DATABASE, Contents, contents
from carme.backup.databases import copy_sqlite, dump_postgresql, is_intact, load_postgresql
from carme.backup.sealing import Opened, Sealed, read_key
from carme.config import load
from carme.errors import CarmeError

__all__ = ["MAKES_OWNERS", "Manifest", "check", "create", "restore"]

_log = logging.getLogger(__name__)

ABOUT = "about.json"  # the first member
FILES = "files"
DATABASES = "databases"
#: What to do where accounts of owners are missing.
MAKES_OWNERS = (
    "Make the accounts before the restore, without starting services: run site.yml for this host with "
    "-e carme_awaits_restore=true."
)
#: What a file is written as before it takes its place.
_DRAFT = ".carme-restored"
LOG = ".jsonl"
ASIDE = "-before-restore"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class Manifest:
    """What a backup is: `postgresql` has the account that owns each database of a server."""

    version: str
    host: str
    time: str
    config: str
    sqlite: list[str]
    postgresql: dict[str, str]


def create(target: Path, key: Path, config: Path, also: list[Path], images: bool = False) -> int:
    """Make a backup while the site runs; the number of files in it. Raises CarmeError."""
    secret, settings = read_key(key), load(config)
    what = contents(settings, config, also, images)
    owners = {"hub": settings.hub.state_directory, "portal": settings.portal.state_directory}
    draft = target.with_name(f"{target.name}.part")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            copies, files = _copy_optional(what, Path(scratch))
            about = Manifest(
                version=__version__,
                host=socket.gethostname(),
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                config=str(config),
                sqlite=[str(path) for path in [*what.sqlite, *copies]],
                postgresql={name: owners[name].owner() for name in what.postgresql},
            )
            sealed = Sealed(file, secret)
            with tarfile.open(fileobj=cast(BinaryIO, sealed), mode="w|gz") as archive:
                _put_text(archive, ABOUT, json.dumps(asdict(about)))
                for path in what.sqlite:
                    copy = Path(scratch, "copy.sqlite")
                    copy_sqlite(path, copy)
                    put_file(archive, path, copy)
                    copy.unlink()
                for path, copy in copies.items():
                    with contextlib.suppress(FileNotFoundError):
                        put_file(archive, path, copy)
                for name, address in what.postgresql.items():
                    copy = Path(scratch, f"{name}.dump")
                    dump_postgresql(address, copy, about.postgresql[name])
                    archive.add(copy, f"{DATABASES}/{name}.dump", recursive=False)
                for path in files:
                    with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                        put_file(archive, path)
            sealed.close()
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return len(files) + len(about.sqlite)


def _copy_optional(what: Contents, scratch: Path) -> tuple[dict[Path, Path], list[Path]]:
    """Copies of the databases that no service needs, and what is to be kept file by file.

    A service's account may write what it likes into its folder; that must not stop the backup.
    """
    copies, files = dict[Path, Path](), list(what.files)
    for number, path in enumerate(what.optional):
        copy = scratch / f"{number}.sqlite"
        try:
            copy_sqlite(path, copy)
            copies[path] = copy
        except CarmeError as error:
            copy.unlink(missing_ok=True)
            if path.exists():
                _log.warning("%s It is copied as a plain file.", error)
                files += [path, *(Path(f"{path}{end}") for end in BESIDE_DATABASE)]
    return copies, files


def put_file(archive: tarfile.TarFile, path: Path, copy: Path | None = None) -> None:
    """Add a file under its own name; with `copy`, what is in that one."""
    # None for a socket.
    member: tarfile.TarInfo | None = archive.gettarinfo(str(path), f"{FILES}{path}")
    if member is None or not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return
    if not member.isfile() and not member.islnk():
        archive.addfile(member)
        return
    member.type, member.linkname = tarfile.REGTYPE, ""
    # The folder's owner may have put a link there since it was checked.
    with os.fdopen(os.open(copy or path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        # As much as there is now: a log may grow meanwhile.
        member.size = os.fstat(file.fileno()).st_size
        archive.addfile(member, file)


def _put_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    archive.addfile(member, io.BytesIO(text.encode()))


@contextlib.contextmanager
def _opened(backup: Path, key: Path) -> Iterator[tuple[Manifest, tarfile.TarFile]]:
    secret = read_key(key)
    try:
        with backup.open("rb") as file:
            opened = Opened(file, secret)
            with tarfile.open(fileobj=cast(BinaryIO, opened), mode="r|gz") as archive:
                first = archive.next()
                if first is None or first.name != ABOUT:
                    raise CarmeError("The backup does not say what it is.", "Use another backup.")
                text = archive.extractfile(first)
                assert text is not None
                yield Manifest(**json.load(text)), archive
            if opened.read():  # to its marked end, so that nothing is missing
                raise CarmeError("The backup holds more than its archive.", "Use another backup.")
    except OSError as error:
        raise CarmeError(f"{error.filename or backup} failed: {error.strerror}.", "See its disk.") from None
    except tarfile.TarError as error:
        raise CarmeError(f"The backup cannot be read: {error}.", "Use another backup.") from None


def check(backup: Path, key: Path) -> tuple[Manifest, list[str], list[str]]:
    """Read a backup as a whole.

    Returns:
        What it is, the paths in it, and the accounts and groups of owners that this host does not have.

    Raises:
        CarmeError: The key is another one, or something is missing or broken.
    """
    paths, accounts, groups = list[str](), set[str](), set[str]()
    with _opened(backup, key) as (about, archive), tempfile.TemporaryDirectory() as scratch:
        for member in archive:
            require_safe(member)
            if not member.name.startswith(f"{FILES}/"):
                continue
            path = member.name.removeprefix(FILES)
            paths.append(path)
            accounts.add(member.uname)
            groups.add(member.gname)
            if path in about.sqlite:
                copy = Path(scratch, "copy.sqlite")
                _write(archive, member, copy)
                if not is_intact(copy):
                    raise CarmeError(f"The database {path} in the backup is broken.", "Use another backup.")
                copy.unlink()
    return about, paths, unknown_owners(accounts, groups)


def unknown_owners(accounts: Iterable[str], groups: Iterable[str]) -> list[str]:
    """Those of them that this host does not have, like `account carme-hub`."""
    missing = [f"account {name}" for name in sorted(accounts) if name and not _is_known(pwd.getpwnam, name)]
    return missing + [
        f"group {name}" for name in sorted(groups) if name and not _is_known(grp.getgrnam, name)
    ]


def _is_known(find: Any, name: str) -> bool:
    try:
        find(name)
    except KeyError:
        return False
    return True


def require_safe(member: tarfile.TarInfo) -> None:
    parts = Path(member.name).parts
    if (
        member.name.startswith("/")
        or ".." in parts
        or not (member.isfile() or member.isdir() or member.issym())
    ):
        raise CarmeError(
            f"The backup names {member.name!r}, which no backup of Carme does.", "Use another backup."
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def restore(backup: Path, key: Path, into: Path | None = None) -> tuple[Manifest, int]:
    """Put back what is in a backup, with its owners by name; what the backup is, and the number of files.

    What is there and not in the backup stays. The site's services must be stopped.

    Args:
        into: A folder below which all is written instead, to look at it; databases of a server are left out
            and owners stay ours.

    Raises:
        CarmeError: It cannot be opened, is broken, was made by a newer version, or an owner has no account
            here; then nothing is written.
    """
    about, _paths, missing = check(backup, key)
    if into is None and _numbers(about.version) > _numbers(__version__):
        # Databases are brought forward only.
        raise CarmeError(
            f"The backup was made by Carme {about.version}, and this host has {__version__}. "
            "Nothing was written.",
            f"Install Carme {about.version} or newer on this host first, and restore then.",
            code="version",
        )
    if missing and into is None:
        raise CarmeError(
            f"This host lacks owners of files: {', '.join(missing)}. Nothing was written.",
            MAKES_OWNERS,
            code="accounts",
        )
    count, folders = 0, list[tuple[Path, tarfile.TarInfo]]()
    with _opened(backup, key) as (_about, archive), tempfile.TemporaryDirectory() as scratch:
        for member in archive:
            require_safe(member)
            if member.name.startswith(f"{DATABASES}/"):
                if into is None:
                    _load_database(archive, member, about, Path(scratch))
                continue
            if not member.name.startswith(f"{FILES}/"):
                continue
            path = Path(member.name.removeprefix(FILES))
            place = path if into is None else into / path.relative_to("/")
            place_member(archive, member, place, owned=into is None, below=into, logs=into is None)
            if member.isdir():
                folders.append((place, member))
            elif str(path) in about.sqlite:
                remove_beside(place, below=into)
            count += 1
        for place, member in reversed(folders):  # after what is in them was written
            set_mode(place, member, below=into)
    return about, count


def place_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    place: Path,
    owned: bool,
    below: Path | None = None,
    clear: bool = False,
    logs: bool = False,
) -> None:
    """Put a member of an archive in its place, and follow no link on the way that another account made.

    Root does this in folders of other accounts, which may have made a folder a link since the archive was
    made. A folder's mode is set by `set_mode`, after what is in it.

    Args:
        owned: with the archive's owner, where we are root.
        below: A folder, which is trusted; below it no link is followed at all. By default a link is followed
            that belongs to root or to us.
        clear: remove what stands in its place and is a folder where the member is none, or the reverse.
        logs: lose no record that a log (`*.jsonl`, such as the audit log) got since the archive was made: a
            log that has only become longer stays, and another one is kept beside it under a further name.

    Raises:
        CarmeError: The way leads over a link that is not followed.
    """
    if member.isdir():
        if place != below:
            with _folder(place.parent, below) as parent:
                _clear_place(place.name, parent, True, below is None, clear)
        with _folder(place, below, 0o700) as folder:
            _own(".", member, owned, folder)
        return
    with _folder(place.parent, below) as folder:
        _remove(_DRAFT, folder)
        if member.issym():
            os.symlink(member.linkname, _DRAFT, dir_fd=folder)
            _own(_DRAFT, member, owned, folder)
        else:
            _write_with_mode(archive, member, owned, folder)
        _clear_place(place.name, folder, False, False, clear)
        aside = ""
        if logs and member.isfile() and place.suffix == LOG and _exists(place.name, folder):
            if _is_prefix_of(place.name, _DRAFT, folder):
                os.unlink(_DRAFT, dir_fd=folder)
                return
            if not _is_prefix_of(_DRAFT, place.name, folder):  # it was rotated, or is that of another head
                aside = _free_name(place.name, folder)
        with replaceable(place.name, folder, aside):
            if aside:
                os.rename(place.name, aside, src_dir_fd=folder, dst_dir_fd=folder)
            os.rename(_DRAFT, place.name, src_dir_fd=folder, dst_dir_fd=folder)


def set_mode(place: Path, member: tarfile.TarInfo, below: Path | None = None) -> None:
    """Give a folder that was placed its mode; `below` as for `place_member`."""
    with _folder(place, below) as folder:
        os.chmod(".", stat.S_IMODE(member.mode), dir_fd=folder)


def remove_beside(place: Path, below: Path | None = None) -> None:
    """Remove what SQLite kept beside a database that was replaced; `below` as for `place_member`."""
    with _folder(place.parent, below) as folder:
        for end in BESIDE_DATABASE:
            _remove(f"{place.name}{end}", folder)


@contextlib.contextmanager
def _folder(path: Path, below: Path | None, mode: int = 0o777) -> Iterator[int]:
    """A descriptor of a folder, which is made with `mode` if it is missing; see `place_member`."""
    path = path.absolute()
    if below is not None:
        below.mkdir(parents=True, exist_ok=True)
    base = Path("/") if below is None else below.absolute()
    folder = os.open(base, _FOLDER)
    try:
        for part in path.relative_to(base).parts:
            inner = _enter(folder, part, path, below is None, mode)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _enter(folder: int, part: str, path: Path, follow: bool, mode: int) -> int:
    """A descriptor of a folder in a folder."""
    status = _status(part, folder)
    if status is None:
        os.mkdir(part, mode, dir_fd=folder)
    elif stat.S_ISLNK(status.st_mode):
        if not (follow and _is_ours(status)):
            raise CarmeError(
                f"{path} leads over the link {part!r}, which Carme does not follow. It was not written.",
                "Remove the link, and find out who created it.",
            )
        return os.open(part, _FOLDER, dir_fd=folder)
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _clear_place(name: str, folder: int, for_folder: bool, follow: bool, clear: bool) -> None:
    """Remove what keeps a member from its place, as far as that is allowed."""
    status = _status(name, folder)
    if status is None or stat.S_ISDIR(status.st_mode) == for_folder:
        return
    is_link = stat.S_ISLNK(status.st_mode)
    if is_link and follow and _is_ours(status):
        return
    if is_link or clear:
        _remove(name, folder)


def _remove(name: str, folder: int) -> None:
    """Remove what has a name in a folder, of whatever type; no link is followed."""
    status = _status(name, folder)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _exists(name: str, folder: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _free_name(name: str, folder: int) -> str:
    """A name for a log that another one takes the place of."""
    names = itertools.chain([f"{name}{ASIDE}"], (f"{name}{ASIDE}-{number}" for number in itertools.count(2)))
    return next(each for each in names if not _exists(each, folder))


def _is_prefix_of(name: str, beginning: str, folder: int) -> bool:
    """Whether a file holds what another one does, and perhaps more after that."""

    def opened(path: str) -> BinaryIO:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb")

    with opened(name) as longer, opened(beginning) as shorter:
        while part := shorter.read(1 << 20):
            if longer.read(len(part)) != part:
                return False
    return True


def _write_with_mode(archive: tarfile.TarFile, member: tarfile.TarInfo, owned: bool, folder: int) -> None:
    source = archive.extractfile(member)
    assert source is not None
    descriptor = os.open(_DRAFT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        owner = _owner(member, owned)
        if owner is not None:
            os.chown(descriptor, *owner)
        os.fchmod(descriptor, stat.S_IMODE(member.mode))
        os.utime(descriptor, (member.mtime, member.mtime))


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(source, file)


def _own(name: str, member: tarfile.TarInfo, owned: bool, folder: int) -> None:
    owner = _owner(member, owned)
    if owner is not None:
        os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)


def _owner(member: tarfile.TarInfo, owned: bool) -> tuple[int, int] | None:
    """Numbers of the account and the group here."""
    if not owned or os.geteuid() != 0:
        return None
    uid = pwd.getpwnam(member.uname).pw_uid if member.uname else member.uid
    gid = grp.getgrnam(member.gname).gr_gid if member.gname else member.gid
    return uid, gid


def _load_database(archive: tarfile.TarFile, member: tarfile.TarInfo, about: Manifest, scratch: Path) -> None:
    """Into the server that the restored configuration names."""
    name = Path(member.name).stem
    settings = load(about.config)
    address = settings.database("hub" if name == "hub" else "portal")
    copy = scratch / f"{name}.dump"
    _write(archive, member, copy)
    load_postgresql(address, copy, about.postgresql[name])
