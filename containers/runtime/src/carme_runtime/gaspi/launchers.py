"""What other launchers than `carme-run` and `torchrun` pass to the processes that they start.

Open MPI (`OMPI_COMM_WORLD_...`), MPICH and Intel MPI (`PMI_...`, `MPI_...`) and `srun` (`SLURM_...`) number
the ranks, but name no place where these could find each other. On one node they need none. On several the
first node that `srun` names is that of rank 0; under Open MPI and MPICH ranks meet on the host of `mpirun`,
where rank 0 is unless the list of hosts begins with another one. Otherwise MASTER_ADDR and MASTER_PORT must
be set.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

PORTS = range(20_000, 32_000)  # below those that systems give to clients
AGENT_STEP = "CARME_AGENT_STEP"
# Rank, ranks, rank on its node, ranks there; in the order in which they are believed.
_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_OPEN_MPI = re.compile(r"prterun-(.+)-\d+@\d+")
# Open MPI 4: where its daemons reach `mpirun`, at the first of its addresses.
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"
_FIRST_ADDRESS = re.compile(r"[\d.]+;tcp://([\d.]+)")
MPICH_PORT = "--control-port"
_GENERATIONS = 4  # there may be shells between a rank and what MPICH started on its node
_HOST = re.compile(r"([^\[\],]+)(?:\[(\w+))?")


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `carme-run` that follow from another launcher's; none where they are set."""
    if "RANK" in environment:
        return {}
    for rank, size, local_rank, local_size in _MPI:
        if rank in environment and size in environment:
            return _from_addresses(
                environment, environment[rank], environment[size], environment.get(local_rank),
                environment.get(local_size), "",
            )  # fmt: skip
    # The command of a batch job and the agents of one are tasks of Slurm, too, but not ranks.
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= 2**32 - 16 or step == environment.get(AGENT_STEP):
        return {}
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    tasks_per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes = environment.get("SLURM_STEP_NUM_NODES", "")
    local = environment["SLURM_STEP_NUM_TASKS"] if nodes == "1" else None
    found = _HOST.match(environment.get("SLURM_STEP_NODELIST", ""))
    first = f"{found[1]}{found[2] or ''}" if found else ""
    job = f"{environment.get('SLURM_JOB_ID')}.{step} {tasks_per_node}"
    return _from_addresses(
        environment, environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"],
        environment.get("SLURM_LOCALID"), local, first, job,
    )  # fmt: skip


def meeting_port(environment: Mapping[str, str]) -> str:
    """Where on rank 0's host the ranks meet: at MASTER_PORT, unless `torchrun` itself listens there."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return environment.get("MASTER_PORT", "0")
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return _port_of(" ".join(environment.get(name, "") for name in names))


def complete(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what `translated` finds, for libraries that read the variables themselves."""
    environment.update(translated(environment))


def _from_addresses(
    environment: Mapping[str, str],
    rank: str,
    size: str,
    local_rank: str | None,
    local_size: str | None,
    first: str,
    job: str = "",
) -> dict[str, str]:
    reported = {"RANK": rank, "WORLD_SIZE": size}
    if local_rank is not None:
        reported["LOCAL_RANK"] = local_rank
    if local_size is not None:
        reported["LOCAL_WORLD_SIZE"] = local_size
    if local_size == size:
        # Some launchers name the run; and ranks of one node have one parent, unless a shell came in between.
        job = job or environment.get("PMIX_NAMESPACE") or f"{os.getppid()}"
        first = "127.0.0.1"
    elif not first and not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        first, job = _mpirun(environment)
    if first and "MASTER_PORT" not in environment:
        reported["MASTER_PORT"] = _port_of(job)
    if first and "MASTER_ADDR" not in environment:
        reported["MASTER_ADDR"] = first
    return reported


def _mpirun(environment: Mapping[str, str]) -> tuple[str, str]:
    """The host of the `mpirun` that started this process, and what no other run has; empty where unknown."""
    name = environment.get("PMIX_NAMESPACE", "")
    if found := _OPEN_MPI.fullmatch(name):
        return found[1], name
    uri = environment.get(_OPEN_MPI_4, "") if "OMPI_COMM_WORLD_RANK" in environment else ""
    if found := _FIRST_ADDRESS.match(uri):
        return found[1], f"{uri} {name}"
    if "PMI_RANK" in environment:
        # What MPICH starts on each node has it from its arguments, and does not pass it to its children.
        for arguments in _ancestors():
            if MPICH_PORT in arguments[:-1]:
                port = arguments[arguments.index(MPICH_PORT) + 1]
                return port.rpartition(":")[0], port
    return "", ""


def _ancestors() -> Iterator[list[str]]:
    """The arguments of this process's parent, of that one's parent, and so on."""
    process = os.getppid()
    for _ in range(_GENERATIONS):
        folder = Path("/proc") / str(process)
        try:
            yield (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # not for this process to see
            return


def _port_of(job: str) -> str:
    """The same for all ranks of a job, and likely another one for another job."""
    return str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])
