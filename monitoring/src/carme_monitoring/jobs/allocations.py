"""What Slurm's prolog wrote down about each job of this node.

The prolog runs as root with the allocation in its environment (Slurm: Prolog and Epilog Guide), so that
neither Slurm nor the job itself has to be queried who it is and which GPUs it may use.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Allocation", "Allocations"]

_log = logging.getLogger("carme.monitoring")


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job on this node.

    Attributes:
        gpus: Its GPUs: numbers of device files (minors); None if nothing is known.
        uuids: Those that Slurm names otherwise, such as MIG instances.
        cpus: Processors of this node that it was given; None if that is not known.
    """

    job_id: int
    user: str
    account: str = ""
    partition: str = ""
    gpus: frozenset[int] | None = None
    uuids: frozenset[str] = frozenset()
    cpus: int | None = None


class Allocations:
    """The folder of these records, one `JOBID.json` for each job:
    `{"user", "account", "partition", "gpus", "cpus"}`.

    Args:
        folder: Where the prolog writes and the epilog deletes; only root may write there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, tuple[int, Allocation]] = {}

    def all(self) -> dict[int, Allocation]:
        """The records that there are; each file is read once."""
        found: dict[int, tuple[int, Allocation]] = {}
        for file in self._files():
            try:
                job_id, changed = int(file.stem), file.stat().st_mtime_ns
                known = self._read.get(job_id)
                found[job_id] = (
                    known if known and known[0] == changed else (changed, _allocation(job_id, file))
                )
            except (OSError, ValueError, TypeError, KeyError) as error:
                _log.warning("The record %s cannot be used: %s", file, error)
        self._read = found
        return {job_id: allocation for job_id, (_, allocation) in found.items()}

    def _files(self) -> list[Path]:
        try:
            return [file for file in self._folder.iterdir() if file.suffix == ".json"]
        except OSError:
            return []


def _allocation(job_id: int, file: Path) -> Allocation:
    values = json.loads(file.read_bytes().decode("utf-8", "replace"))
    gpus = [word.strip() for word in str(values.get("gpus", "")).split(",") if word.strip()]
    cpus = values.get("cpus")
    return Allocation(
        job_id=job_id,
        user=_text(values["user"]),
        account=_text(values.get("account", "")),
        partition=_text(values.get("partition", "")),
        gpus=frozenset(int(word) for word in gpus if word.isdecimal()),
        uuids=frozenset(word for word in gpus if not word.isdecimal()),
        cpus=int(cpus) if cpus is not None else None,
    )


def _text(value: object) -> str:
    """Half of a pair of surrogates can be written down in JSON, but not in UTF-8."""
    return str(value).encode("utf-8", "replace").decode("utf-8")
