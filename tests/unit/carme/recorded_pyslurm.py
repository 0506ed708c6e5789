"""Stands in for pyslurm 24.11 with what the real one answered (slurm_24_11.json), for the worker alone.

`mode` beside it says how it is: empty, `dies` at its import, `ends` or is `killed` in the first question,
`away` (slurmctld), `unauthenticated` (munge), `hangs`, `unreadable`, or `version X.Y`.
"""

import json
import os
import pwd
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
RECORDED = json.loads((FOLDER / "slurm_24_11.json").read_text())
LIBRARY = RECORDED["pyslurm"]


class RPCError(Exception):
    """As pyslurm's newer interface says that Slurm refused."""


def _mode() -> str:
    return (FOLDER / "mode").read_text()


def _met(refuse: type[Exception]) -> None:
    """What Slurm, or the library, does instead of answering."""
    words = {
        "away": ("Unable to contact slurm controller (connect failure)", 1800),
        "unauthenticated": ("Protocol authentication error", 1007),
    }
    mode = _mode()
    if mode in words:
        raise refuse(*words[mode][: 1 if refuse is RPCError else 2])
    if mode == "hangs":
        time.sleep(3600)
    if mode == "ends":
        os.write(2, b"python: fatal: prolog of the end\n")
        os._exit(1)
    if mode == "warned":
        os.write(2, b"python: error: a warning of before\n")
    if mode in ("killed", "warned"):
        os.kill(os.getpid(), signal.SIGTERM)  # the broker itself ends it with another one
    if mode == "unreadable":
        b"\xff".decode()


class _Older:
    """The older interface: dictionaries."""

    kind = ""

    def get(self) -> dict[Any, Any]:
        _met(ValueError)
        known = LIBRARY[self.kind]
        return {int(key) if key.isdecimal() else key: row for key, row in known.items()}


class _Newer:
    """The newer interface: objects."""

    kind = ""

    @classmethod
    def load(cls) -> dict[Any, SimpleNamespace]:
        _met(RPCError)
        return dict(enumerate(SimpleNamespace(**row) for row in LIBRARY[cls.kind]))


def _named(uid: int) -> SimpleNamespace:
    return SimpleNamespace(pw_name=RECORDED["users"][str(uid)])


if _mode() == "dies":
    os.write(2, b"python: error: ClusterName needs to be specified\n")
    os.write(2, b"python: fatal: Unable to process configuration file\n")
    os._exit(1)
setattr(pwd, "getpwuid", _named)  # noqa: B010  the worker's own, in its process
__version__ = _mode().partition("version ")[2] or LIBRARY["version"]
job, node, reservation = (type(kind, (_Older,), {"kind": kind}) for kind in ("job", "node", "reservation"))
Jobs, Nodes, Partitions = (type(kind, (_Newer,), {"kind": kind}) for kind in ("Jobs", "Nodes", "Partitions"))


def slurm_api_version() -> list[int]:
    """Of the library that it is linked with."""
    return LIBRARY["api"]
