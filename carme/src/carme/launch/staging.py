"""What a job's nodes do about its data: bring it near before the command runs, and say where results go.

Only jobs that ask for it import this and what it needs.
"""

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any

from carme.errors import CarmeError
from carme.launch.exits import DATA_LINE, Exit, LaunchError
from carme.launch.spec import JobSpec, StageSpec, StagingPlaces
from carme.staging import Options, Progress, sync
from carme.staging.cache import Cache
from carme.staging.progress import Rates, duration, progress_text

LOG_SECONDS = 2.0

__all__ = ["Staged", "stage"]


class Staged:
    """What is there for a job on this node.

    `held` are descriptors that keep copies in use until this process ends.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        #: Where it is on the node, and in the container.
        self.read_only: list[tuple[str, str]] = []
        self.binds: list[str] = []
        self.folders: list[str] = []
        self.held: list[int] = []


def stage(spec: JobSpec, folder: str, job_id: str, nodes: int, private: str) -> Staged:
    """Bring the job's data to this node, and make the folder of its results.

    Args:
        spec: The job's.
        folder: Its private folder in the home.
        job_id: Slurm's number.
        nodes: How many nodes it has.
        private: Its own folder in /tmp of this node, which is there.

    Raises:
        LaunchError: It cannot; the message says why.
    """
    staged = Staged()
    places = spec.staging
    own = f"{places.cache}/jobs/{job_id}"
    if spec.stage:
        os.makedirs(f"{private}/data", 0o700, exist_ok=True)
        staged.environment["CARME_DATA"] = f"{private}/data"
    for wanted in spec.stage:
        path = _copy_stage(wanted, places, job_id, staged)
        if spec.image and wanted.target == "ram":
            # A container has a /dev/shm of its own, into which nothing of this one can be bound.
            mounted = f"{private}/memory-{wanted.key}"
            os.makedirs(mounted, 0o700, exist_ok=True)
            staged.read_only.append((path, mounted))
            path = mounted
        else:
            staged.read_only.append((path, path))
        with contextlib.suppress(FileExistsError):  # left by an agent that was lost on this node
            os.symlink(path, f"{private}/data/{wanted.name}")
    if spec.stage:
        _mark(f"{own}/staged")
    if spec.results:
        results = f"{own}/results"
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        try:
            os.mkdir(results, 0o700)
            with open(f"{own}/results.json", "w", encoding="utf-8") as file:
                to = f"{spec.results}/{node}" if nodes > 1 else spec.results
                json.dump({"to": to, "log": spec.log or f"{folder}/output.log"}, file)
        except FileExistsError:
            pass
        except OSError as error:
            raise _refused(
                f"There is no folder for results on {socket.gethostname()}: {own}: {error.strerror}.",
                "Tell an administrator; the prolog makes it.",
            ) from None
        staged.environment["CARME_RESULTS"] = results
        staged.binds.append(results)
    return staged


def _copy_stage(wanted: StageSpec, places: StagingPlaces, job_id: str, staged: Staged) -> str:
    name, source = wanted.name, wanted.source
    start, printed, speed = time.monotonic(), 0.0, Rates()

    def report(what: Any) -> None:
        nonlocal printed
        if isinstance(what, Progress):
            rates = speed(what)
            if time.monotonic() - printed >= LOG_SECONDS:
                printed = time.monotonic()
                _log(f"{name}: {progress_text(what, rates)}")

    if not os.path.exists(source):
        raise _refused(
            f"{source} is not there on {socket.gethostname()}, or you may not read it.",
            "Check the path, and that all nodes have it.",
        )
    try:
        if wanted.target == "ram":
            path = f"/dev/shm/carme-{job_id}-{wanted.key}"
            result = sync(source, path, Options(estimate=True), notify=report)
            staged.folders.append(path)
            if not result.ok:
                raise CarmeError(f"{result.problems[0].path}: {result.problems[0].reason}.")
            was_there = False
        elif wanted.target == "beeond":
            path, was_there = _into_beeond(wanted, places, job_id, report)
            place = os.path.dirname(path)
            if place not in staged.binds:
                staged.binds.append(place)
            staged.environment["CARME_BEEOND"] = place
        else:
            place, limit = _cache_place(wanted.target, places)
            path, held, was_there = Cache(place, limit).hold(
                wanted.key, source, wanted.version, job=job_id, notify=report
            )
            staged.held.append(held)
    except CarmeError as error:
        raise LaunchError(Exit.NOT_STAGED, error.message, error.remedy) from None
    taken = duration(time.monotonic() - start)
    if was_there:
        _log(f"{name}: it was there already ({taken}).")
    else:
        _log(f"{name}: copied to {wanted.target} in {taken}.")
    return path


def _into_beeond(wanted: StageSpec, places: StagingPlaces, job_id: str, notify: Any) -> tuple[str, bool]:
    """Where it is in the job's own file system, which the prolog has made, and whether it was there.

    The job's first node copies it before the others begin.
    """
    place = f"{places.beeond}/{job_id}"
    if not os.path.ismount(place) or os.stat(place).st_uid != os.getuid():
        raise CarmeError(
            f"The job's own file system (BeeOND) is not there on {socket.gethostname()}: {place}.",
            "Start it again; if that does not help, tell an administrator, or stage to 'local'.",
        )
    path, done = f"{place}/{wanted.key}", f"{place}/.{wanted.key}.complete"
    if os.path.exists(done):
        return path, True
    result = sync(wanted.source, path, Options(estimate=True), notify=notify)
    if not result.ok:
        raise CarmeError(f"{result.problems[0].path}: {result.problems[0].reason}.")
    os.close(os.open(done, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return path, False


def _cache_place(target: str, places: StagingPlaces) -> tuple[str, int]:
    if target == "local":
        return f"{places.cache}/users/{os.getuid()}", places.cache_gb << 30
    if not places.scratch:
        raise CarmeError("This site has no scratch for staging.", "Stage to 'local' instead.")
    place = f"{places.scratch}/carme-{os.getuid()}"
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        pass  # whether it is ours is checked below
    except OSError as error:
        raise CarmeError(f"{place} cannot be made: {error.strerror}.", "Tell an administrator.") from None
    return place, 0


def _mark(path: str) -> None:
    """Notify the epilog that this node has copies; without the prolog's folder there is no notice."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError:
        return


def _log(text: str) -> None:
    print(f"{DATA_LINE}{socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _refused(message: str, remedy: str) -> LaunchError:
    return LaunchError(Exit.NOT_STAGED, message, remedy)
