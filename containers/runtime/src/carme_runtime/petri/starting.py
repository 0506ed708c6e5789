"""What a run starts with: its workers, its folder, its tokens."""

import os
import pickle
from pathlib import Path
from typing import Any

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core.sizes import parse_size
from carme_runtime.petri.dask import is_client, threads_of
from carme_runtime.petri.definition import Definition
from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.model import Place, Transition, show_amount
from carme_runtime.petri.observed import Observed
from carme_runtime.petri.slurm_jobs import SlurmJobs

#: As workers: processes on all nodes of the job, one for each processor, or as many on each as "job:4" says.
JOB = "job"


def is_job(workers: Any) -> bool:
    """Whether these workers are on all nodes of the job."""
    return isinstance(workers, str) and (workers == JOB or per_node(workers) is not None)


def per_node(workers: Any) -> int | None:
    """How many "job:4" means on each node; None for other workers."""
    kind, _, count = workers.partition(":") if isinstance(workers, str) else ("", "", "")
    return int(count) if kind == JOB and count.isdecimal() and 1 <= int(count) <= 1024 else None


def number_of(workers: Any) -> int:
    """The processes on this node that `workers` means. Raises PetriError where it means none."""
    if workers in ("here", JOB):
        return len(os.sched_getaffinity(0))
    if is_job(workers):
        return per_node(workers) or 1
    if is_client(workers):
        return min(threads_of(workers), 1024)
    if isinstance(workers, SlurmJobs):
        return workers.count
    if isinstance(workers, int) and not isinstance(workers, bool) and 1 <= workers <= 1024:
        return workers
    raise PetriError(
        f"{workers!r} are not workers.",
        "Give 'here', 'job', 'job:4', a number from 1 to 1024, a Dask client, or SlurmJobs(carme.Client).",
    )


def still_running(run: Observed, timeout: float | None) -> PetriError:
    """What to say of a run that has not ended in time."""
    running = ", ".join(f"{name} ({count})" for name, count in run.status()["running"].items())
    tasks = f": tasks of {running}" if running else ""
    return PetriError(
        f"Net {run.net.name} still runs after {timeout} s{tasks}.",
        "Wait longer, or close the run, which ends them: their tokens are where they were, and run again "
        "when it is resumed.",
    )


def still_full(place: Place) -> PetriError:
    """What to say of a place without room, from which nothing will take a token."""
    return PetriError(
        f"Place {place.name} is full with its capacity of {place.capacity}, and nothing runs that takes "
        "from it.",
        "Raise the capacity, or put what its transitions wait for.",
    )


def check_units(net: Definition, units: dict[str, int]) -> None:
    """Raise PetriError where a transition needs more than a node of the run offers."""
    able = set[Transition]()
    for transition in net.transitions.values():
        if all(units.get(name, 0) >= count for name, count in transition.needs.items()):
            able.add(first_of(transition))
    for transition in net.transitions.values():
        if first_of(transition) in able:  # of several implementations one is enough
            continue
        for name, count in transition.needs.items():
            if units.get(name, 0) < count:
                wanted, offered = show_amount(count), show_amount(units.get(name, 0))
                raise PetriError(
                    f"Transition {transition.name} needs {name}:{wanted}, and this run offers {offered}.",
                    f'Start it with offers="{name}:{wanted}" or more.',
                )


def first_of(transition: Transition) -> Transition:
    """What a transition is another implementation of, or itself."""
    while transition.instead_of:
        transition = transition.instead_of
    return transition


def limit_of(memory: int | str | None) -> int | None:
    """Bytes of a size that a person has written. Raises PetriError where it is none."""
    try:
        return None if memory is None else parse_size(memory)
    except CarmeRuntimeError as error:
        raise PetriError(error.message, error.remedy) from None


def run_folder(net: Definition, folder: str | os.PathLike[str] | None, resume: bool) -> Path:
    """The folder of a run, made where it is missing. Raises PetriError where it cannot be used."""
    try:
        if folder is not None:
            path = Path(folder).absolute()
            path.mkdir(parents=True, exist_ok=True)
            if (path / "journal").exists() and not resume:
                raise PetriError(
                    f"There is a run in {path} already.",
                    "Resume it with Net.resume, or choose another folder.",
                )
            return path
        number = 1
        while True:
            path = Path(f"{net.name}-{number}").absolute()
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        raise PetriError(
            f"The folder {error.filename} for the run cannot be made: {error.strerror}.",
            "Name another folder.",
        ) from None


def pickled(place: Place, token: Any) -> bytes:
    """A token as it travels. Raises PetriError where it cannot be pickled."""
    try:
        return pickle.dumps(token, 5)
    except Exception as error:
        raise PetriError(
            f"A {type(token).__name__} for place {place.name} cannot be pickled: {error}.",
            "Put what can be pickled, such as the path of a file.",
        ) from None
