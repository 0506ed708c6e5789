"""What other launchers than `carme-run` and `torchrun` tell the processes that they start.

Open MPI (`OMPI_COMM_WORLD_...`), MPICH and Intel MPI (`PMI_...`, `MPI_...`) and `srun` (`SLURM_...`) number
the ranks, but name no place where these could find each other. On one node they need none; on several
MASTER_ADDR and MASTER_PORT must be set, but for `srun`, which tells of all nodes.
"""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping

PORTS = range(20_000, 32_000)  # below those that systems give to clients
AGENT_STEP = "CARME_AGENT_STEP"
# Rank, ranks, rank on its node, ranks there; in the order in which they are believed.
_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_HOST = re.compile(r"([^\[\],]+)(?:\[(\w+))?")


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `carme-run` that follow from another launcher's; none where they are set."""
    if "RANK" in environment:
        return {}
    for rank, size, local_rank, local_size in _MPI:
        if rank in environment and size in environment:
            return _told(
                environment, environment[rank], environment[size], environment.get(local_rank),
                environment.get(local_size), "",
            )  # fmt: skip
    # The command of a batch job and the agents of one are tasks of Slurm, too, but not ranks.
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= 2**32 - 16 or step == environment.get(AGENT_STEP):
        return {}
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    here = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes = environment.get("SLURM_STEP_NUM_NODES", "")
    local = environment["SLURM_STEP_NUM_TASKS"] if nodes == "1" else None
    found = _HOST.match(environment.get("SLURM_STEP_NODELIST", ""))
    first = f"{found[1]}{found[2] or ''}" if found else ""
    job = f"{environment.get('SLURM_JOB_ID')}.{step} {here}"
    return _told(
        environment, environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"],
        environment.get("SLURM_LOCALID"), local, first, job,
    )  # fmt: skip


def complete(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what `translated` finds, for libraries that read the variables themselves."""
    environment.update(translated(environment))


def _told(
    environment: Mapping[str, str],
    rank: str,
    size: str,
    local_rank: str | None,
    local_size: str | None,
    first: str,
    job: str = "",
) -> dict[str, str]:
    told = {"RANK": rank, "WORLD_SIZE": size}
    if local_rank is not None:
        told["LOCAL_RANK"] = local_rank
    if local_size is not None:
        told["LOCAL_WORLD_SIZE"] = local_size
    if local_size == size:
        # Some launchers name the run; and ranks of one node have one parent, unless a shell came in between.
        job = job or environment.get("PMIX_NAMESPACE") or f"{os.getppid()}"
        first = "127.0.0.1"
    if first and "MASTER_PORT" not in environment:
        told["MASTER_PORT"] = str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    if first and "MASTER_ADDR" not in environment:
        told["MASTER_ADDR"] = first
    return told
