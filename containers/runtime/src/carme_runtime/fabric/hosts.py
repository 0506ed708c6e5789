"""The lists of a job's nodes that MPI's launchers read (see `mpi`)."""

import contextlib
import os
from pathlib import Path

from carme_runtime.fabric.members import Members
from carme_runtime.fabric.mpi import HYDRA_HOSTS, OPEN_MPI_HOSTS


def write(folder: Path, members: Members) -> None:
    """Lists of the nodes that are there, each with a slot for every GPU of the job, or else every core."""
    counts = [(member.host, member.devices or member.cpus) for member in members.present]
    for name, separator in ((OPEN_MPI_HOSTS, " slots="), (HYDRA_HOSTS, ":")):
        draft = folder / f".{name}.{os.getpid()}"
        with contextlib.suppress(OSError):  # a full disk is not to end the agent
            draft.write_text("".join(f"{host}{separator}{count}\n" for host, count in counts))
            draft.replace(folder / name)


def remove(folder: Path) -> None:
    """Undo `write`."""
    for name in (OPEN_MPI_HOSTS, HYDRA_HOSTS):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
