"""MPI programs, by the `mpirun` that the job's image has, over the nodes of the job and without ssh."""

import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import mpi
from carme_runtime.launcher.placement import Place, is_spread
from carme_runtime.ranks import without_secrets

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra")
KNOWN_BY = ((INTEL, "Intel(R) MPI"), (OPEN_MPI, "Open MPI"), (OPEN_MPI, "PRRTE"), (MPICH, "HYDRA"))


def find(environment: Mapping[str, str]) -> tuple[str, str]:
    """The launcher on PATH, and whose it is. Raises CarmeRuntimeError."""
    message = ""
    for name in LAUNCHERS:
        program = shutil.which(name, path=environment.get("PATH"))
        if not program:
            continue
        reported = subprocess.run(
            [program, "--version"], env=dict(environment), capture_output=True, text=True, check=False
        )
        for kind, mark in KNOWN_BY:
            if mark in reported.stdout:
                return program, kind
        message = message or program
    raise CarmeRuntimeError(
        f"{message} is not of Open MPI, MPICH or Intel MPI." if message else "There is no mpirun on PATH.",
        "Load or install one of Open MPI, MPICH and Intel MPI, in the image of all nodes.",
    )


def command(
    places: list[Place],
    program: list[str],
    environment: Mapping[str, str],
    passed: Mapping[str, str],
    port: int,
) -> tuple[list[str], dict[str, str]]:
    """The launcher's argument list and variables.

    Args:
        places: Where the ranks run.
        program: What they run, an argument list.
        environment: The caller's.
        passed: Variables that all ranks are to have.
        port: At which `carme_runtime` in the ranks may find the first one.

    Raises:
        CarmeRuntimeError: There is no launcher, or no `carme-remote`.
    """
    remote = mpi.remote_command()
    if not remote:
        raise CarmeRuntimeError(
            f"{mpi.REMOTE}, by which MPI reaches other nodes, is not installed.",
            "Install carme-runtime again.",
        )
    launcher, kind = find(environment)
    spread = is_spread(places)
    first = places[0].member
    passed = dict(passed) | {
        "MASTER_ADDR": first.address if spread else "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if spread:
        passed["CARME_KEY_FILE"] = first.key_file
    counts: dict[str, int] = {}
    for place in places:
        # Where all runs here, launchers need no name of this host: it may be one that nobody can look up.
        host = place.member.host if spread or place.member.host != _own_host(environment) else "localhost"
        counts[host] = place.local_size
    own = mpi.without_container(without_secrets(environment)) | mpi.variables(remote, first.address) | passed
    for name in mpi.host_variables(Path()):  # the hosts are those of the places
        own.pop(name, None)
    hosts = ",".join(f"{host}:{count}" for host, count in counts.items())
    line = [launcher, "-n", str(len(places))]
    if kind == OPEN_MPI:
        line += ["--host", hosts]
        for name in passed:
            line += ["-x", name]
    elif kind == INTEL:
        for host, count in counts.items():  # the only form in which it takes different counts on one line
            line += ["-host", host, "-n", str(count), *program, ":"]
        return [launcher, *line[3:-1]], own
    else:
        line += ["-hosts", hosts]
    return [*line, *program], own


def _own_host(environment: Mapping[str, str]) -> str:
    return environment.get("SLURMD_NODENAME") or socket.gethostname()
