"""Files of the kernel that are read at every scrape."""

import os
import resource

__all__ = ["KeptFiles", "text_of"]

MOST_BYTES = 1 << 16
SPARE = 512  # descriptors that are left for everything else


class KeptFiles:
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

    def close_unused(self) -> None:
        """Close what has not been read since the last call."""
        for path in self._open.keys() - self._used:
            os.close(self._open.pop(path))
        self._used = set()


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
