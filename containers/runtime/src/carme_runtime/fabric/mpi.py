"""What makes `mpirun` reach the nodes of a job without ssh: variables that it reads, and lists of hosts.

MPI's launchers start a daemon on every other node by a command that is used as ssh would be; `carme-remote`
is one that goes by the job's agents. An agent imports this when it starts, which is to be short.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from carme_runtime.addresses import interface_of, is_loopback

REMOTE = "carme-remote"
CONTAINER = "SINGULARITY_CONTAINER"
OPEN_MPI_HOSTS, HYDRA_HOSTS = "hosts.openmpi", "hosts.hydra"


def remote_command() -> str:
    """Where `carme-remote` is; empty where it was not installed."""
    # Not by `shutil.which`: an agent's start is to be short, and that module's own takes some milliseconds.
    beside = [Path(sys.executable).parent, Path(sys.argv[0]).absolute().parent]
    for folder in (*beside, *map(Path, os.get_exec_path())):
        if os.access(folder / REMOTE, os.X_OK):
            return str(folder / REMOTE)
    return ""


def variables(remote: str, address: str) -> dict[str, str]:
    """For Open MPI 4 and 5, MPICH and Intel MPI: start daemons by `remote`, whatever Slurm says.

    `address`: at which other nodes reach this one. Daemons are to meet at it, as names of hosts need not lead
    there, and other addresses may be those of networks that only one of the nodes has.
    """
    interface = interface_of(address)
    met = {"HYDRA_IFACE": interface, "I_MPI_HYDRA_IFACE": interface} if interface else {}
    if interface and not is_loopback(address):  # which Open MPI would not take
        met |= {
            "OMPI_MCA_oob_tcp_if_include": interface,
            "OMPI_MCA_btl_tcp_if_include": interface,
            "PRTE_MCA_prte_if_include": interface,
        }
    return met | {
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": remote,
        "OMPI_MCA_ras": "^slurm",
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": remote,
        "PRTE_MCA_ras": "^slurm",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": remote,
        "HYDRA_RMK": "user",
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": remote,
        "I_MPI_HYDRA_RMK": "user",
    }


def without_container(environment: Mapping[str, str]) -> dict[str, str]:
    """The same without the variable by which Intel MPI knows that it is in a container.

    It would start its daemons by `singularity exec`, a command of the host that no image has. `carme-remote`
    starts them in the image anyway.
    """
    return {name: value for name, value in environment.items() if name != CONTAINER}


def host_variables(folder: Path) -> dict[str, str]:
    """Where launchers find the job's hosts, which `hosts.write` keeps in the same folder."""
    slots, plain = str(folder / OPEN_MPI_HOSTS), str(folder / HYDRA_HOSTS)
    return {
        "OMPI_MCA_orte_default_hostfile": slots,
        "PRTE_MCA_prte_default_hostfile": slots,
        "HYDRA_HOST_FILE": plain,
        "I_MPI_HYDRA_HOST_FILE": plain,
    }


def session_variables(folder: Path, address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What lets `mpirun`, typed in a session, reach the job's nodes; what is set already stays.

    `folder`: that of the agent's socket; `address`: this node's. Nothing where `carme-remote` is missing.
    """
    remote = remote_command()
    reported = variables(remote, address) | host_variables(folder) if remote else {}
    return {name: value for name, value in reported.items() if name not in environment}
