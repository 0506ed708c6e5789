"""The small program that reads and changes a user's files, run as that user: never root follows a path.

Standard input and output are one connection. On it comes one line of JSON, {"do": ..., "path": ...}, and
goes one line, {"ok": {...}} or {"error": errno, "message": ...}; after the line of `read` follow the bytes
that it names, and after the line of `write` come those. Paths are text as Python has it for bytes that are
no UTF-8 (surrogates). It needs the standard library alone, and of Carme what needs no more.
"""

import errno
import json
import os
import re
import shutil
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

MOST_ENTRIES = 20_000  # of a folder that are reported
MOST_SPACES = 20
MOST_DATASETS = 200
MOST_TEXT = 1 << 18  # bytes of a file that is read whole
CHUNK = 1 << 20
INPUTS = ".local/share/carme/inputs"
INPUTS_LIFETIME = 90 * 86400.0  # seconds
PARTIAL = ".carme-upload-"
SIGN_OF_LIFE = 5.0  # seconds between two blanks before an answer that takes long


class Refused(Exception):
    """Something that is not to be done."""


def main() -> int:
    """Carry out a request."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        requested = json.loads(source.readline(1 << 16))
        action = ACTIONS[requested.pop("do")]
        answer = action(source, sink, **requested)
    except OSError as error:
        return _answer(sink, {"error": error.errno or 0, "message": error.strerror or str(error)})
    except Refused as error:
        return _answer(sink, {"error": 0, "message": str(error)})
    except (KeyError, TypeError, ValueError) as error:
        return _answer(sink, {"error": errno.EINVAL, "message": f"not understood: {error}"})
    if answer is not None:
        _answer(sink, {"ok": answer})
    return 0


def _answer(sink: BinaryIO, answer: dict[str, Any]) -> int:
    sink.write(json.dumps(answer).encode() + b"\n")
    sink.flush()
    return 0


def _fields(status: os.stat_result) -> dict[str, Any]:
    kind = "folder" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"
    return {"kind": kind, "size": status.st_size, "changed": status.st_mtime}


def show(source: BinaryIO, sink: BinaryIO, path: str) -> dict[str, Any]:
    """A folder's entries; those of uploads that are not complete are left out."""
    entries: list[dict[str, Any]] = []
    more = False
    with os.scandir(path) as found:
        for entry in found:
            if entry.name.startswith(PARTIAL):
                continue
            if len(entries) == MOST_ENTRIES:
                more = True
                break
            try:
                reported = _fields(entry.stat())
            except OSError:  # a link to nowhere, or gone by now
                reported = {"kind": "other", "size": 0, "changed": 0.0}
            entries.append({"name": entry.name, "link": entry.is_symlink(), **reported})
    return {"entries": entries, "more": more}


def home(source: BinaryIO, sink: BinaryIO) -> dict[str, Any]:
    """Where the user is at home."""
    return {"path": os.environ["HOME"]}


def space(source: BinaryIO, sink: BinaryIO, paths: list[str]) -> dict[str, Any]:
    """How much room the user has in each of these folders; those that cannot be read are left out."""
    # It was started by its path, without the packages of the site.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from carme.storage.space import space_of

    found = []
    for path in paths[:MOST_SPACES]:
        try:
            found.append(asdict(space_of(path)))
        except OSError:
            continue
    return {"spaces": found}


def datasets(source: BinaryIO, sink: BinaryIO, path: str) -> dict[str, Any]:
    """What is entered in the catalogue that lies in a folder of the home, as its files have it.

    With it comes who may read the folders that are named there, which only the user can see.
    """
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from carme.storage.readers import readers

    found: dict[str, Any] = {}
    readers_by_path: dict[str, str] = {}
    folder = os.path.join(os.environ["HOME"], path)
    for name in sorted(os.listdir(folder) if os.path.isdir(folder) else ()):
        if not name.endswith(".json") or len(found) == MOST_DATASETS:
            continue
        try:
            with open(os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                values = json.loads(file.read(MOST_TEXT))
            paths = [str(version["path"]) for version in values["versions"]]
        except (OSError, ValueError, TypeError, KeyError):
            continue  # it is not a dataset
        found[name.removesuffix(".json")] = values
        readers_by_path |= {each: readers(each) for each in paths}
    return {"datasets": found, "readers": readers_by_path}


def read(source: BinaryIO, sink: BinaryIO, path: str, offset: int = 0, length: int | None = None) -> None:
    """Bytes of a file."""
    # O_NONBLOCK: opening a FIFO must not wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(file)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise Refused("it is not a plain file")
    if offset < 0 or (length is not None and length < 0):
        raise ValueError("a negative place")
    most = max(0, status.st_size - offset)
    left = most if length is None else min(length, most)
    _answer(sink, {"ok": {"length": left, **_fields(status)}})
    # What is cut off meanwhile is reported by the connection's end before `length`.
    while left and (sent := os.sendfile(sink.fileno(), file, offset, min(left, 1 << 30))):
        offset, left = offset + sent, left - sent


def _partial(path: str, upload: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", upload):
        raise ValueError("the upload's name")
    return os.path.join(os.path.dirname(path), PARTIAL + upload)


def begun(source: BinaryIO, sink: BinaryIO, path: str, upload: str) -> dict[str, Any]:
    """How much of an upload has arrived, and whether there is a file of that name already."""
    try:
        offset = os.lstat(_partial(path, upload)).st_size
    except FileNotFoundError:
        offset = 0
        if not os.path.isdir(os.path.dirname(path)):
            raise
    return {"offset": offset, "exists": os.path.lexists(path)}


def write(
    source: BinaryIO,
    sink: BinaryIO,
    path: str,
    upload: str,
    offset: int,
    length: int,
    size: int,
    replace: bool,
) -> dict[str, Any]:
    """Take a part of an upload; the last one makes it the file, which is there whole or not at all."""
    if not 0 <= offset <= offset + length <= size:
        raise ValueError("a part that is not within the file")
    partial = _partial(path, upload)
    if os.path.isdir(path):
        raise Refused("there is a folder of that name")
    if not replace and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    there = os.fstat(file).st_size
    if there < offset:
        raise Refused(f"{there} bytes have arrived, so the next part begins there")
    if there > offset:
        os.ftruncate(file, offset)  # what an interrupted part left
    os.lseek(file, offset, os.SEEK_SET)
    left = length
    while left:
        part = source.read(min(CHUNK, left))
        if not part:
            raise Refused("the connection ended too soon")
        view = memoryview(part)
        while view:
            view = view[os.write(file, view) :]
        left -= len(part)
    done = offset + length == size
    if done:
        os.fsync(file)
        if replace:
            os.replace(partial, path)
        else:
            os.link(partial, path)  # unlike a rename, it replaces nothing that came meanwhile
            os.unlink(partial)
    return {"offset": offset + length, "done": done}


def keep(source: BinaryIO, sink: BinaryIO, name: str, offset: int, length: int, size: int) -> dict[str, Any]:
    """Take a part of what a job is to read, in a folder that its owner alone can open.

    What lies there for so long that no job can want it any more is removed.
    """
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise ValueError("the input's name")
    os.umask(0o077)
    folder = os.path.join(os.environ["HOME"], INPUTS)
    os.makedirs(folder, exist_ok=True)
    if offset == 0:
        _remove_old(folder)
    path = os.path.join(folder, name)
    return {"path": path, **write(source, sink, path, name, offset, length, size, replace=True)}


def _remove_old(folder: str) -> None:
    oldest = time.time() - INPUTS_LIFETIME
    with os.scandir(folder) as found:
        for entry in found:
            try:
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)
            except OSError:
                continue  # gone by now, or no file of ours


def make(source: BinaryIO, sink: BinaryIO, path: str) -> dict[str, Any]:
    """A new folder."""
    os.mkdir(path)
    return {}


def move(source: BinaryIO, sink: BinaryIO, path: str, to: str) -> dict[str, Any]:
    """Another name; what has that name stays."""
    if os.path.lexists(to):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(path, to)
    return {}


def copy(source: BinaryIO, sink: BinaryIO, path: str, to: str, shared: bool = False) -> dict[str, Any]:
    """Another file with the same bytes, there whole or not at all; all may read it when it is `shared`."""
    folder, name = os.path.split(to)
    partial = os.path.join(folder, f".{name}.partial")
    from_file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(from_file).st_mode):
            raise Refused("it is not a plain file")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        to_file = os.open(partial, flags, 0o600)
        try:
            reported = time.monotonic()
            while os.sendfile(to_file, from_file, None, 16 * CHUNK):
                if time.monotonic() - reported > SIGN_OF_LIFE:
                    sink.write(b" ")
                    sink.flush()
                    reported = time.monotonic()
            if shared:
                os.fchmod(to_file, 0o644)
            os.fsync(to_file)
            os.link(partial, to)  # unlike a rename, it replaces nothing
        finally:
            os.close(to_file)
            os.unlink(partial)
    finally:
        os.close(from_file)
    return {}


def remove(source: BinaryIO, sink: BinaryIO, path: str) -> dict[str, Any]:
    """A file, a link, or a folder with all that is in it."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    return {}


ACTIONS = {
    "show": show, "home": home, "read": read, "begun": begun, "write": write, "make": make, "move": move,
    "keep": keep, "copy": copy, "remove": remove, "space": space, "datasets": datasets,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
