"""The record of who did what for whom."""

import errno
import grp
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carme.broker.operations import Operation
from carme.broker.peers import Peer
from carme.errors import CarmeError

_log = logging.getLogger("carme.broker")

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

#: Refusals of one user that are recorded in a minute; what was done is always recorded.
REFUSALS_A_MINUTE = 60


@dataclass
class _Refusals:
    """What one user was refused in the current minute."""

    minute: int
    recorded: int = 0
    left_out: int = 0


class AuditEntry:
    """What the audit log will say about an operation that succeeds, besides its request."""

    def __init__(self) -> None:
        self.results: dict[str, Any] | None = {}

    def add(self, **results: Any) -> None:
        """Record these results as well."""
        self.results = {**(self.results or {}), **results}

    def drop(self) -> None:
        """Nothing was changed, so nothing is recorded."""
        self.results = None


class AuditLog:
    """One JSON object a line, appended; the file is opened anew each time, so it may be rotated.

    The log cannot be flooded: of the refusals of one ordinary user only so many a minute are written, and
    the next line about that user says how many were `left_out`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refusals: dict[int, _Refusals] = {}

    def record(self, peer: Peer, action: str, user: str | None, result: str, **what: Any) -> None:
        """Append one action; `what` must hold no command, environment or other value of the user's own."""
        left_out = self._count_omitted(peer, result)
        if left_out is None:
            return
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "by": peer.account.name,
            "by_uid": peer.account.uid,
            "by_pid": peer.pid,
            "action": action,
            "user": user,
            "result": result,
            **what,
        }
        if left_out:
            entry["left_out"] = left_out
        line = (json.dumps(entry, ensure_ascii=True) + "\n").encode()
        try:
            file = os.open(self._path, _FLAGS, 0o640)
            try:
                written = os.write(file, line)
            finally:
                os.close(file)
            if written != len(line):
                raise OSError(errno.ENOSPC, "only a part of the record fits")
        except OSError as error:
            # An action that has been done must still be on record somewhere: the journal.
            _log.error(
                "The audit log %s cannot be written: %s. Record: %s", self._path, error, line.decode().strip()
            )

    @contextmanager
    def audited(
        self, peer: Peer, request: Operation[Any], user: str | None, **what: Any
    ) -> Iterator["AuditEntry"]:
        """Record how an operation ends, with what its declaration says.

        Args:
            user: Whom it concerns.
            what: What is known better than the request says it.
        """
        entry = AuditEntry()
        what = request.audit() | what
        try:
            yield entry
        except CarmeError as error:
            self.record(peer, request.method, user, error.code, message=error.message, **what)
            raise
        if entry.results is not None:
            self.succeeded(peer, request, user, **entry.results, **what)

    def succeeded(self, peer: Peer, request: Operation[Any], user: str | None, **what: Any) -> None:
        """Record an operation that has succeeded, with what its declaration says."""
        self.record(peer, request.method, user, "ok", **(request.audit() | what))

    def _count_omitted(self, peer: Peer, result: str) -> int | None:
        """How many refusals of this user went unrecorded before this record; None: this one does too."""
        uid, minute = peer.account.uid, int(time.monotonic() // 60)
        seen = self._refusals.get(uid)
        if seen is None or seen.minute != minute:
            left_out = seen.left_out if seen else 0
            # Who is long quiet is forgotten.
            self._refusals = {
                key: entry
                for key, entry in self._refusals.items()
                if entry.minute == minute or entry.left_out
            }
            seen = self._refusals[uid] = _Refusals(minute, left_out=left_out)
        if result != "ok" and not peer.trusted:
            if seen.recorded >= REFUSALS_A_MINUTE:
                seen.left_out += 1
                return None
            seen.recorded += 1
        left_out, seen.left_out = seen.left_out, 0
        return left_out

    def prepare(self) -> None:
        """Make the file, readable by the group adm where that exists."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, _FLAGS, 0o640)
        try:
            if os.geteuid() == 0:
                _set_group(file, "adm")
        except KeyError:
            _log.info("There is no group adm; only root reads %s.", self._path)
        finally:
            os.close(file)


def _set_group(file: int, group: str) -> None:
    """Give an open file to a group; of an append-only one nothing may be set, not even what it is already."""
    wanted = grp.getgrnam(group).gr_gid
    if os.fstat(file).st_gid != wanted:
        os.fchown(file, -1, wanted)
