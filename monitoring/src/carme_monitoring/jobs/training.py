"""What the ranks of training runs say of themselves, over a Unix datagram socket that all may write to.

Which job a message is from is the kernel's word (unix(7), SCM_CREDENTIALS): the sender's process, and the
control group that this one is in. What it says is the job's owner's word: it is checked, bounded, and shown
under that job alone. The messages are those of `carme_runtime.progress`.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["RankProgress", "Training"]

_log = logging.getLogger("carme.monitoring")

EXPIRES = 60.0  # seconds after the last word of a rank
SILENT = 15.0  # after so long another process may speak for a rank
MOST_RANKS = 256  # of one job on a node
MOST_JOBS = 256
MOST_BYTES = 2048  # of a message
MOST_EACH_SECOND = 1000  # messages; more wait in the socket, and are lost when that is full
_CREDENTIALS = struct.Struct("3i")
_WAITS = ("data", "ranks")
_LARGEST = 2**53
_LARGEST_LOSS = 1e100  # means of larger ones are more than a float holds


@dataclass(slots=True)
class RankProgress:
    """Sums since a rank's first step; None and missing waits: not measured.

    Attributes:
        seconds: Since its first step.
        wait: Seconds by what was waited for: `data` (its loader), `ranks` (the others).
        process, reported_at: Who reported it, and when (time.monotonic).
    """

    rank: int
    size: int
    seconds: float
    steps: int
    samples: int | None = None
    loss: float | None = None
    wait: dict[str, float] = field(default_factory=dict)
    process: int = 0
    reported_at: float = 0.0


class Training:
    """Listens; `jobs` reports.

    Args:
        path: Of the socket, which is made anew; its folder must be there.
        job_of: The job that a process belongs to.
        clock: Seconds.
    """

    def __init__(
        self,
        path: Path,
        job_of: Callable[[int], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job_of, self._clock = job_of, clock
        self._known: dict[int, dict[int, RankProgress]] = {}
        self._lock = threading.Lock()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        path.chmod(0o666)

    def listen(self) -> None:
        """Take in what comes, in a thread of its own, for as long as the process lives."""
        threading.Thread(target=self._listen, name="training", daemon=True).start()

    def jobs(self) -> dict[int, list[RankProgress]]:
        """The ranks' last reports, by job; those that have not been heard for a minute are gone."""
        oldest = self._clock() - EXPIRES
        with self._lock:
            for job_id, ranks in list(self._known.items()):
                for rank in [rank for rank, known in ranks.items() if known.reported_at < oldest]:
                    del ranks[rank]
                if not ranks:
                    del self._known[job_id]
            return {job_id: list(ranks.values()) for job_id, ranks in self._known.items()}

    def _listen(self) -> None:
        while True:
            # Anyone who floods the socket takes no more of a processor than this many messages do.
            end = time.monotonic() + 1
            for _ in range(MOST_EACH_SECOND):
                try:
                    self.take()
                except OSError as error:
                    _log.warning("Messages of training runs cannot be read: %s", error)
                    time.sleep(1)
            time.sleep(max(0.0, end - time.monotonic()))

    def take(self) -> None:
        """Wait for one message, and keep what it says if it is worth it.

        Raises:
            OSError: The socket cannot be read.
        """
        data, beside, flags, _ = self._socket.recvmsg(MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        process = 0
        for level, kind, value in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                process = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0]
            elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for (descriptor,) in struct.iter_unpack("i", value[: len(value) // 4 * 4]):
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
        if flags & socket.MSG_TRUNC or process <= 0:
            return
        message = _read(data)
        job_id = self._job_of(process) if message else None
        if message is None or job_id is None:
            return
        message.process, message.reported_at = process, self._clock()
        with self._lock:
            ranks = self._known.get(job_id)
            if ranks is None:
                if len(self._known) >= MOST_JOBS:
                    return
                ranks = self._known[job_id] = {}
            before = ranks.get(message.rank)
            if before is None and len(ranks) >= MOST_RANKS:
                return
            # Two runs in one job: sums that jump to and fro would be read as enormous rates.
            if before and before.process != process and message.reported_at - before.reported_at < SILENT:
                return
            ranks[message.rank] = message


def _read(data: bytes) -> RankProgress | None:
    """A message; None for one that is not as it should be."""
    try:
        message: Any = json.loads(data)
        wait = message.get("wait", {})
        samples, loss = message.get("samples"), message.get("loss")
        return RankProgress(
            rank=_count(message["rank"]),
            size=_count(message["size"]),
            seconds=_seconds(message["seconds"]),
            steps=_count(message["steps"]),
            samples=None if samples is None else _count(samples),
            loss=None if loss is None else _number(loss, -_LARGEST_LOSS, _LARGEST_LOSS),
            wait={name: _seconds(wait[name]) for name in _WAITS if name in wait},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError
    return value


def _number(value: Any, least: float, most: float) -> float:
    # Compared before it is turned into a float: that fails with a whole number of hundreds of digits.
    if type(value) not in (int, float) or not least <= value <= most:
        raise ValueError
    return float(value)


def _seconds(value: Any) -> float:
    return _number(value, 0, _LARGEST)
