"""Files and folders of the kernel that are read at every scrape."""

import os
import resource

__all__ = ["OpenFiles", "OpenFolders", "text_of", "whole_text_of"]

MOST_BYTES = 1 << 16
#: A longer part of a list of processes may not be its end: the kernel reports less than a page at a time.
SURELY_ALL = 3072
SPARE = 512  # descriptors that are left for everything else


class OpenFiles:
    """Reads files that it keeps open: finding one by its path takes several times as long as reading it.

    Made for control groups, which answer anew whenever they are read from the beginning, and say ENODEV once
    they are gone. As many stay open as the process may have; others are opened each time.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._used: set[str] = set()
        self._most = max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE)

    def text(self, path: str) -> str:
        """What the file says now; empty when it is not there (any more) or must not be read."""
        descriptor = self._open.get(path)
        if descriptor is not None:
            try:
                text = os.pread(descriptor, MOST_BYTES, 0).decode("ascii", "replace")
            except OSError:
                del self._open[path]
                os.close(descriptor)
            else:
                self._used.add(path)
                return text
        if len(self._open) >= self._most:
            return text_of(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            text = os.pread(descriptor, MOST_BYTES, 0).decode("ascii", "replace")
        except OSError:
            os.close(descriptor)
            return ""
        self._open[path] = descriptor
        self._used.add(path)
        return text

    def lines(self, path: str) -> int | None:
        """How many lines the file has; None when it is not there. The kernel may give a part at a time."""
        text = part = self.text(path)
        descriptor = self._open.get(path)
        if not text and descriptor is None:
            # It may be empty, and not kept open.
            return 0 if os.access(path, os.R_OK) and os.path.isfile(path) else None  # noqa: PTH113
        lines, offset = text.count("\n"), len(text)
        try:
            while descriptor is not None and len(part) > SURELY_ALL:
                part = os.pread(descriptor, MOST_BYTES, offset)
                lines, offset = lines + part.count(b"\n"), offset + len(part)
        except OSError:
            pass  # the group went meanwhile
        return lines

    def close_unused(self) -> None:
        """Close what has not been read since the last call."""
        for path in self._open.keys() - self._used:
            os.close(self._open.pop(path))
        self._used = set()


class OpenFolders:
    """Knows the folders in a folder, and lists them anew only when some came or went.

    Made for control groups: each has some thirty files that the kernel lists with its folders. The
    number of folders shows in the links of their parent (Linux, fs/kernfs); where a file system does not
    count them, all is listed each time.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], list[str]]] = {}
        self._used: set[str] = set()
        self._listed: dict[
            str, tuple[int, int]
        ] = {}  # at folders in a folder, since the last `forget_unused`

    def names(self, path: str) -> list[str]:
        """The names of the folders in it; none when it is not there or must not be read."""
        try:
            seen = self._listed.pop(path, None) or _inode_and_links(path)
        except OSError:
            return []
        self._used.add(path)
        known = self._known.get(path)
        if known and known[0] == seen and seen[1] == len(known[1]) + 2 and self._all_there(path, known[1]):
            return known[1]
        try:
            with os.scandir(path) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        self._known[path] = (seen, names)
        return names

    def forget_unused(self) -> None:
        """End of a look: forget the folders that nobody requested since the last one."""
        self._known = {path: known for path, known in self._known.items() if path in self._used}
        self._used, self._listed = set(), {}

    def _all_there(self, path: str, names: list[str]) -> bool:
        """One that went while another came leaves the number as it was."""
        try:
            for name in names:
                folder = f"{path}/{name}"
                self._listed[folder] = _inode_and_links(folder)
        except OSError:
            return False
        return True


def _inode_and_links(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116  many calls in one scrape
    return found.st_ino, found.st_nlink


def text_of(path: str) -> str:
    """A file of the kernel; empty when it is not there (any more) or must not be read."""
    # One system call for each step and no decoding layers: a scrape reads many of these.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, MOST_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def whole_text_of(path: str) -> str:
    """The same of a file of any length, such as a list of processes."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  many calls in one scrape
            return file.read().decode("ascii", "replace")
    except OSError:
        return ""
