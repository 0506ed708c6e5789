"""The files of ranges: for each its bytes, and beside them what they are.

FOLDER/NAME            the bytes
FOLDER/.range-NAME     what they are, which is written first
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK, NEW = ".range-", ".new-"
#: More than a description has, and what Linux writes at once.
_DESCRIPTION_BYTES, _WRITTEN_AT_ONCE = 1 << 16, 1 << 30


@dataclass(frozen=True)
class Description:
    """What a range is.

    Attributes:
        name: By which tasks and programs find it.
        size: In bytes.
        lifetime: `task`, `net` or `kept`.
        dtype: Of its elements, as NumPy writes it.
        shape: Of the array that it holds.
        task: The number of the task that has made it, 0 for the program that runs the net.
        node: The host in whose memory it was made.
        copies: On how many nodes it is to lie when a task has ended that has written to it.
        copy: Which copy of it this is, where several nodes have had it.
    """

    name: str
    size: int
    lifetime: str
    dtype: str = "|u1"
    shape: tuple[int, ...] = ()
    task: int = 0
    node: str = ""
    copies: int = 1
    copy: int = field(default=0, compare=False)

    def fields(self) -> tuple[Any, ...]:
        """What makes it again, in order; `dataclasses.astuple`, which copies each, takes far longer."""
        return tuple(vars(self).values())


def descriptions_in(folder: Path) -> list[Description]:
    """The ranges whose files are in a folder."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.glob(f"{MARK}*"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                description = description_of(path.read_text())
                if has_bytes(folder, description):
                    found.append(description)
    return found


def description_of(text: str) -> Description:
    """What a range is, of the text beside it. Raises ValueError or TypeError where it is none."""
    values = json.loads(text)
    return Description(**{**values, "shape": tuple(values["shape"])})


def read_small(path: Path) -> str:
    """A small file, without what `open` makes of it for text."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _DESCRIPTION_BYTES).decode()
    finally:
        os.close(file)


def write_all(file: int, content: memoryview) -> None:
    """Write to a file from its beginning. Raises OSError where it has no room."""
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done : done + _WRITTEN_AT_ONCE], done)


def describe_range(folder: Path, description: Description) -> None:
    """Write beside a range what it is."""
    mark = folder / f"{MARK}{description.name}"
    mark.write_text(json.dumps(vars(description)))
    # The system's own times may be the same for all that it makes within milliseconds: see `Store`.
    now = time.time_ns()
    os.utime(mark, ns=(now, now))


def make_file(folder: Path, description: Description) -> int:
    """The file of a new range, whose bytes have no memory yet; where it cannot be made nothing is left."""
    path, mark = folder / description.name, folder / f"{MARK}{description.name}"
    if mark.exists():  # who began to make it was killed
        path.unlink(missing_ok=True)
    file = -1
    try:
        describe_range(folder, description)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, description.size)
    except OSError:
        if file >= 0:
            os.close(file)
            path.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
        raise
    return file


def has_bytes(folder: Path, description: Description) -> bool:
    """Whether the bytes of a range are there, and not the description alone."""
    found = (folder / description.name).lstat()
    return stat.S_ISREG(found.st_mode) and found.st_size == description.size


def move(source: Path, target: Path, name: str) -> None:
    """Move a range; anyone who kills this finds it whole in one of the two."""
    copy(source, target, name)
    (source / f"{MARK}{name}").unlink()
    (source / name).unlink()


def copy(source: Path, target: Path, name: str) -> None:
    """Copy a range. Raises OSError where there is no room, or a file of this name that is not a range."""
    if os.path.lexists(target / name) and not (target / f"{MARK}{name}").exists():
        raise FileExistsError(errno.EEXIST, f"{target / name} is in its way")
    new = target / f"{NEW}{name}"
    try:
        shutil.copyfile(source / name, new)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    new.chmod(0o600)
    (target / f"{MARK}{name}").write_text((source / f"{MARK}{name}").read_text())
    new.rename(target / name)
