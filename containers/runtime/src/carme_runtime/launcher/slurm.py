"""What Slurm says of a job that has no agents of Carme: `carme-run` then starts ranks on this host alone."""

from collections.abc import Mapping

from carme_runtime.launcher.help import Section, help_link

_BY_SRUN = "or start the ranks by srun with CARME_KEY_FILE set: srun python train.py"


def nodes_of_job(environment: Mapping[str, str]) -> int:
    """How many nodes the Slurm job has that this process is part of; 1 outside of jobs."""
    return _number(environment, "SLURM_JOB_NUM_NODES")


def warning(environment: Mapping[str, str]) -> str | None:
    """What a user of several nodes or tasks may not expect of a run on this host alone."""
    step = environment.get("SLURM_STEP_ID", "")
    # The highest numbers are those of the job's script and of shells, which `srun` did not start.
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS") if step.isdecimal() and int(step) < 2**32 - 16 else 1
    if tasks > 1:
        if environment.get("SLURM_PROCID") != "0":
            return None
        return (
            f"srun started carme-run {tasks} times: each is a run of its own, with ranks on its node alone. "
            f"Start it once, {_BY_SRUN}.{help_link(Section.LAUNCHERS, environment)}"
        )
    nodes = nodes_of_job(environment)
    if nodes > 1:
        return (
            f"This job has {nodes} nodes, but no agents of Carme that join them: all ranks start on "
            f"this one. Submit the job with carme submit and an image, {_BY_SRUN}."
            f"{help_link(Section.LAUNCHERS, environment)}"
        )
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 1
