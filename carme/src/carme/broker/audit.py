"""The record of who did what for whom."""

import json
import logging
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carme.broker.access import Peer

_log = logging.getLogger("carme.broker")


class AuditLog:
    """One JSON object a line, appended; the file is opened anew each time, so it may be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record(self, peer: Peer, action: str, user: str | None, result: str, **what: Any) -> None:
        """Append one action; `what` must hold no command, environment or other value of the user's own."""
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
        line = json.dumps(entry, ensure_ascii=True) + "\n"
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o640)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
        except OSError as error:
            # An action that has been done must still be on record somewhere: the journal.
            _log.error("The audit log %s cannot be written: %s. Record: %s", self._path, error, line.strip())

    def prepare(self) -> None:
        """Make the file, readable by the group adm where that exists."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o640))
        if os.geteuid() == 0:
            try:
                shutil.chown(self._path, group="adm")
            except LookupError:
                _log.info("There is no group adm; only root reads %s.", self._path)
