"""What must be there before a job's command starts: its specification, a home, folders that are its own."""

import errno
import json
import os
import socket
import stat
from collections.abc import Callable
from typing import Any, TypeVar

from carme.errors import CarmeError
from carme.launch.exits import Exit, LaunchError
from carme.launch.spec import JobSpec

T = TypeVar("T")

TASKS = "tasks"  # in the folder of an array: one folder for each task


class Allocation:
    """What Slurm gave the job, from the environment of its first node. Raises CarmeError outside of one."""

    def __init__(self) -> None:
        self.job_id = os.environ.get("SLURM_JOB_ID", "")
        if not self.job_id.isdecimal():
            raise CarmeError("This is not inside a Slurm job.", "Start jobs with 'carme submit'.")
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        #: The job's own folder on this node.
        self.private = f"/tmp/carme-{self.job_id}"


def read_spec(folder: str) -> JobSpec:
    """The specification in a job's folder. Raises LaunchError."""
    return read_json(f"{folder}/spec.json", JobSpec.load)


def read_json(file: str, load: Callable[[Any], T]) -> T:
    try:
        with open(file, encoding="utf-8") as opened:
            return load(json.load(opened))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise LaunchError(
            Exit.HOME_NOT_WRITABLE,
            f"{file} cannot be read on {socket.gethostname()}: {reason}.",
            "See that your home directory is mounted on the compute nodes, and start the job again.",
        ) from None


def home() -> str:
    """The home directory of the job's owner."""
    return os.path.expanduser("~")


def check_home(home: str) -> None:
    """Refuse a home directory into which nothing can be written: few programs would say so themselves."""
    name = f"{home}/.carme-{os.urandom(8).hex()}"
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(name)
            os.write(file, b"\0" * 4096)
        finally:
            os.close(file)
    except OSError as error:
        raise LaunchError(
            Exit.HOME_NOT_WRITABLE,
            f"The home directory {home} cannot be written on {socket.gethostname()}: {error.strerror}.",
            "Delete what you do not need there, and start the job again."
            if error.errno in (errno.EDQUOT, errno.ENOSPC)
            else "See that it is yours and has space left, or tell an administrator.",
        ) from None


def as_task(folder: str, spec: JobSpec, task: str) -> tuple[str, JobSpec]:
    """The folder and the specification of a task of an array: it sees the files that all of them share.

    Args:
        folder: The array's, which all tasks share.
        spec: The array's.
        task: Its number.
    """
    if not task.isdecimal():
        raise CarmeError("This is not a task of a job array.", "Start it with 'carme submit --array'.")
    own = f"{folder}/{TASKS}/{int(task)}"
    try:
        os.makedirs(own, 0o700, exist_ok=True)
        for name in ("spec.json", "environment.json", "fabric.key", "fabric.pem", "request.json", "files"):
            if not os.path.lexists(f"{own}/{name}"):
                os.symlink(f"../../{name}", f"{own}/{name}")
    except OSError as error:
        raise LaunchError(
            Exit.HOME_NOT_WRITABLE,
            f"The folder {own} cannot be made on {socket.gethostname()}: {error.strerror}.",
            "See that your home directory is yours and has space left, or tell an administrator.",
        ) from None
    return own, of_task(spec, own)


def of_task(spec: JobSpec, own: str) -> JobSpec:
    """The specification of the task of an array that has this folder."""
    parent, task = own.rsplit(f"/{TASKS}/", 1)
    results = f"{spec.results}/{task}" if spec.results else None
    return spec._replace(results=results, log=f"{parent}/output-{task}.log")


def begin(folder: str, submission: str) -> None:
    """Let one submission of the job of this folder begin, and no other.

    Slurm may lose a job that it has just started, and the broker may then submit it again: whatever either of
    them believes, its command does not run twice at a time. That each submission does not, Slurm sees to.
    """
    try:
        os.symlink(submission, f"{folder}/begun")  # made together with what it says
    except FileExistsError:
        if os.readlink(f"{folder}/begun") == submission:
            return
        raise LaunchError(
            Exit.BEGUN_BEFORE,
            "This job ran before, so it does not start again: Slurm lost it when it was restarted.",
            "Start a new one.",
        ) from None
    except OSError as error:
        raise LaunchError(
            Exit.HOME_NOT_WRITABLE,
            f"The folder {folder} cannot be written on {socket.gethostname()}: {error.strerror}.",
            "See that your home directory is yours and has space left, or tell an administrator.",
        ) from None


def make_private(path: str) -> None:
    """Make a folder that only we can enter; in /tmp others may have been there before us."""
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise CarmeError(
                f"{path} on {socket.gethostname()} is in the way and is not a private folder of yours.",
                "Tell an administrator; another user created it.",
            ) from None
    except OSError as error:
        raise CarmeError(
            f"{path} cannot be made on {socket.gethostname()}: {error.strerror}.", "Tell an administrator."
        ) from None


def remove_private(folder: str, staged: Any) -> None:
    import shutil  # the job is over: now there is time

    for path in (folder, *(staged.folders if staged else ())):
        shutil.rmtree(path, ignore_errors=True)


def credentials(folder: str) -> list[str]:
    """The options by which the job's agents know each other."""
    return ["--key-file", f"{folder}/fabric.key", "--certificate", f"{folder}/fabric.pem"]


def address_of(node: str) -> str:
    """The node's address on the cluster's network, never a loopback one."""
    try:
        found = socket.getaddrinfo(node, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        found = []
    for *_, (address, *_) in found:
        if not str(address).startswith("127."):
            return str(address)
    raise CarmeError(
        f"The name of node {node} does not lead to an address that other nodes can reach.",
        "Tell an administrator: the node's name must not stand for 127.x in /etc/hosts.",
    )
