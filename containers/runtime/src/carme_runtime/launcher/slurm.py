"""What Slurm says of a job that has no agents of Carme: whether `carme-run` can start them, and where."""

import re
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from carme_runtime.launcher.help import Section, help_link

_BY_SRUN = "or start the ranks by srun with CARME_KEY_FILE set: srun python train.py"
#: The highest numbers of steps are those of the job's script and of shells, which `srun` did not start.
_FIRST_OWN_STEP = 2**32 - 16
_GROUP = re.compile(r"\[([\d,-]+)\]")


def nodes_of_job(environment: Mapping[str, str]) -> int:
    """How many nodes the Slurm job has that this process is part of; 1 outside of jobs."""
    return _number(environment, "SLURM_JOB_NUM_NODES")


def node_names(environment: Mapping[str, str]) -> list[str]:
    """The job's nodes, this one first and then in Slurm's order, from a list such as `n[01-03,7],gpu1`."""
    listed = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", environment.get("SLURM_JOB_NODELIST", ""))
    names = [name for part in listed for name in _expanded(part)]
    own_host = environment.get("SLURMD_NODENAME", "")
    return [own_host, *(name for name in names if name != own_host)]


def takes_all_nodes(environment: Mapping[str, str], nodes: int | None) -> bool:
    """Whether `carme-run` is to start agents on other nodes of the job, and can.

    Args:
        environment: This process's.
        nodes: How many nodes were requested; None: nobody did.
    """
    in_job = "SLURM_JOB_ID" in environment and nodes_of_job(environment) > 1
    return in_job and nodes != 1 and obstacle(environment, nodes) is None


class Obstacle(NamedTuple):
    """What keeps `carme-run` from starting agents on the job's other nodes, what follows, and what to do."""

    reason: str
    consequence: str
    remedy: str


def obstacle(environment: Mapping[str, str], nodes: int | None) -> Obstacle | None:
    """What keeps `carme-run` from the job's other nodes; None: nothing, or there are none.

    Args:
        environment: This process's.
        nodes: How many nodes were requested; None: nobody did.
    """
    step = environment.get("SLURM_STEP_ID", "")
    in_step = step.isdecimal() and int(step) < _FIRST_OWN_STEP
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS") if in_step else 1
    if tasks > 1:
        return Obstacle(
            f"srun started carme-run {tasks} times",
            "each is a run of its own, with ranks on its node alone",
            f"Start it once, {_BY_SRUN}.",
        )
    count = nodes_of_job(environment)
    if count < 2:
        return None
    if not environment.get("SLURMD_NODENAME"):
        return Obstacle(
            f"carme-run was started on none of the job's {count} nodes",
            "all ranks start on this host",
            f"Start it in the job's script, or by: srun --nodes=1 --ntasks=1 carme-run --nodes {count}",
        )
    if in_step and nodes is None:
        return Obstacle(
            f"srun gave carme-run one of the job's {count} nodes",
            "all ranks start on it",
            f"For ranks on all of them, leave srun out or add --nodes {count} to carme-run.",
        )
    if not shutil.which("srun", path=environment.get("PATH")):
        return Obstacle(
            f"This job has {count} nodes, but there is no srun here to start agents on the others",
            "all ranks start on this one",
            "Start carme-run outside of the container and the container behind it, or submit the job with "
            f"carme submit and an image, {_BY_SRUN}.",
        )
    return None


def warning(environment: Mapping[str, str], nodes: int | None) -> str | None:
    """What a user of several nodes or tasks may not expect of a run on this host alone.

    Args:
        environment: This process's.
        nodes: How many nodes were requested; None: nobody did.
    """
    found = obstacle(environment, nodes)
    if found is None or nodes == 1 or environment.get("SLURM_PROCID", "0") != "0":
        return None
    link = help_link(Section.LAUNCHERS, environment)
    return f"{found.reason}: {found.consequence}. {found.remedy}{link}"


def _expanded(part: str) -> list[str]:
    """The names that `rack[1-2]n[01,3]` stands for."""
    group = _GROUP.search(part)
    if group is None:
        return [part]
    names: list[str] = []
    for numbers in group[1].split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += _expanded(f"{part[: group.start()]}{number:0{len(first)}}{part[group.end() :]}")
    return names


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 1
