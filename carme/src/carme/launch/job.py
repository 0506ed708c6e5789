"""The program `carme-job KEYFOLDER`: what a job does on its compute nodes.

It runs on the first node, starts the command there (in the job's container, under the node agent) and, in
a job of several nodes, joining agents on the others. Whatever fails is one sentence in the job's log.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carme.errors import CarmeError
from carme.launch.exits import Exit, LaunchError
from carme.launch.images import local_copy

ANNOUNCE_SECONDS = 120.0  # for the first agent to listen; images on a busy file system start slowly
BEGAN = time.time()  # the allocation's own preparations are over
STOP_SECONDS = 25.0  # between passing SIGTERM on and SIGKILL; less than Slurm's KillWait, so that we clean up
GRACE_SECONDS = 5.0  # between the end of the agents here and there; each hears of the other's
CONTROL_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def main(arguments: list[str] | None = None) -> int:
    """Run the job; its exit code."""
    parser = argparse.ArgumentParser(
        prog="carme-job", description="Run a job of Carme inside its Slurm allocation. Slurm starts it."
    )
    parser.add_argument("folder", type=Path, metavar="KEYFOLDER", help="the job's private folder")
    parser.add_argument("--join", metavar="HOST:PORT", help="only join the agent of the first node")
    options = parser.parse_args(arguments)
    try:
        return asyncio.run(_join(options.folder, options.join) if options.join else _run(options.folder))
    except CarmeError as error:
        print(f"carme-job: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, LaunchError) else Exit.FAILED


@dataclass(frozen=True)
class Allocation:
    """What Slurm gave the job, from the environment of its first node."""

    job_id: str
    node: str
    nodes: int
    private: Path  # the job's own folder on this node

    @classmethod
    def current(cls) -> "Allocation":
        """The allocation that this process runs in. Raises CarmeError outside of one."""
        job_id = os.environ.get("SLURM_JOB_ID", "")
        if not job_id.isdecimal():
            raise CarmeError("This is not inside a Slurm job.", "Start jobs with 'carme submit'.")
        return cls(
            job_id=job_id,
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
            private=Path(f"/tmp/carme-{job_id}"),
        )


async def _run(folder: Path) -> int:
    allocation = Allocation.current()
    spec = _read(folder / "spec.json")
    workdir = Path(spec["workdir"] or Path.home())
    check_home(Path.home())
    if spec["image"] is None:
        return await _directly(folder, spec, workdir)
    make_private(allocation.private)
    agent = [
        *["carme-agent", "--nodes", str(allocation.nodes)],
        *credentials(folder),
        *["--announce", str(allocation.private / "fabric.json")],
        *["--announce", str(folder / "fabric.json")],
        *["--listen", address_of(allocation.node)],
        *["--environment-file", str(folder / "environment.json")],
        *["--", *spec["command"]],
    ]
    try:
        with _passing_signals() as running:
            first = await _start([*container(spec, workdir), *agent], Path("/"), forwarded(folder))
            running.append(first)
            ended = asyncio.create_task(first.wait())
            if allocation.nodes > 1:
                await _with_others(first, ended, running, folder, spec, allocation)
            return _code(await ended)
    finally:
        shutil.rmtree(allocation.private, ignore_errors=True)


async def _join(folder: Path, where: str) -> int:
    """What a node other than the first does."""
    allocation = Allocation.current()
    spec = _read(folder / "spec.json")
    make_private(allocation.private)
    agent = ["carme-agent", *credentials(folder), "--join", where]
    try:
        arguments = [*container(spec, Path(spec["workdir"] or Path.home())), *agent]
        return await _only(arguments, Path("/"), forwarded(folder))
    finally:
        shutil.rmtree(allocation.private, ignore_errors=True)


async def _directly(folder: Path, spec: dict[str, Any], workdir: Path) -> int:
    environment = os.environ | {"CARME_JOB_FOLDER": str(folder)} | _read(folder / "environment.json")
    return await _only(spec["command"], workdir, _without_export(environment))


async def _only(arguments: list[str], cwd: Path, environment: dict[str, str]) -> int:
    """Run one program; its exit code."""
    with _passing_signals() as running:
        process = await _start(arguments, cwd, environment)
        running.append(process)
        return _code(await process.wait())


async def _with_others(
    first: asyncio.subprocess.Process,
    ended: asyncio.Task[int],
    running: list[asyncio.subprocess.Process],
    folder: Path,
    spec: dict[str, Any],
    allocation: Allocation,
) -> None:
    """Start the agents of the other nodes; returns when both the first and they have ended."""
    where = await _announced(allocation.private / "fabric.json", first, ended)
    if where is None:
        return
    program = [sys.executable, "-m", "carme.launch.job", "--join", where, str(folder)]
    others = await _start([*step(spec, allocation.nodes), *program], Path("/"), _without_export(os.environ))
    running.append(others)
    left = asyncio.create_task(others.wait())
    await asyncio.wait({ended, left}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        # When the first agent ends, the others may hear of it before we do.
        await asyncio.wait({ended}, timeout=GRACE_SECONDS)
    if not ended.done():
        await _end(first, ended)
        code = _code(left.result())
        raise LaunchError(
            Exit(code) if code in list(Exit) else Exit.FAILED,
            f"The agents on the other nodes ended with exit code {code}; the job was ended.",
            "See the lines above; if there are none, start the job again.",
        )
    # Agents leave by themselves when the first one does.
    await asyncio.wait({left}, timeout=GRACE_SECONDS)
    if not left.done():
        await _end(others, left)


def _without_export(environment: Mapping[str, str]) -> dict[str, str]:
    """Our `--export=NONE` must not hold for the steps that the job starts."""
    return {name: value for name, value in environment.items() if name != "SLURM_EXPORT_ENV"}


async def _announced(file: Path, first: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> str | None:
    """`HOST:PORT` of the first agent; None when it has ended instead."""
    end = asyncio.get_running_loop().time() + ANNOUNCE_SECONDS
    while not ended.done():
        with contextlib.suppress(OSError, ValueError):  # not there, or not whole yet
            where = json.loads(await asyncio.to_thread(file.read_text))
            return f"{where['host']}:{where['port']}"
        if asyncio.get_running_loop().time() > end:
            await _end(first, ended)
            raise CarmeError(
                f"The agent on the first node did not listen within {ANNOUNCE_SECONDS:.0f} seconds.",
                "See the lines above, and try again.",
            )
        await asyncio.wait({ended}, timeout=0.02)
    return None


async def _start(arguments: list[str], cwd: Path, environment: dict[str, str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(*arguments, cwd=cwd, env=environment)
    except OSError as error:
        if str(error.filename) == str(cwd):
            raise LaunchError(
                Exit.NO_WORKDIR,
                f"The folder {cwd} cannot be entered on {socket.gethostname()}: {error.strerror}.",
                "Choose another working directory.",
            ) from None
        raise LaunchError(
            Exit.NO_COMMAND,
            f"{arguments[0]!r} cannot be run on {socket.gethostname()}: {error.strerror}.",
            "Check the command's name and that it is executable, or tell an administrator.",
        ) from None


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ended), STOP_SECONDS)
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await ended


@contextlib.contextmanager
def _passing_signals() -> Iterator[list[asyncio.subprocess.Process]]:
    """Hand SIGTERM, SIGINT and SIGHUP on to the processes in the list, and kill those that do not heed it."""
    loop = asyncio.get_running_loop()
    processes: list[asyncio.subprocess.Process] = []

    def send(number: int) -> None:
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def stop(number: int) -> None:
        if not processes:
            raise SystemExit(128 + number)  # nothing has been started yet
        send(number)
        loop.call_later(STOP_SECONDS, send, signal.SIGKILL)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield processes
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise LaunchError(
            Exit.HOME_NOT_WRITABLE,
            f"{file} cannot be read on {socket.gethostname()}: {reason}.",
            "See that your home directory is mounted on the compute nodes, and start the job again.",
        ) from None


def check_home(home: Path) -> None:
    """Refuse a home directory into which nothing can be written: few programs would say so themselves."""
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise LaunchError(
            Exit.HOME_NOT_WRITABLE,
            f"The home directory {home} cannot be written on {socket.gethostname()}: {error.strerror}.",
            "See that it is yours and has space left, or tell an administrator.",
        ) from None


def make_private(path: Path) -> None:
    """Make a folder that only we can enter; in /tmp others may have been there before us."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise CarmeError(
                f"{path} on {socket.gethostname()} is in the way and is not a private folder of yours.",
                "Tell an administrator; somebody else made it.",
            ) from None
    except OSError as error:
        raise CarmeError(
            f"{path} cannot be made on {socket.gethostname()}: {error.strerror}.", "Tell an administrator."
        ) from None


def credentials(folder: Path) -> list[str]:
    """The options by which the job's agents know each other."""
    return ["--key-file", str(folder / "fabric.key"), "--certificate", str(folder / "fabric.pem")]


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


def forwarded(folder: Path) -> dict[str, str]:
    """The environment for apptainer, which carries Slurm's and the job's variables on into the container."""
    inside = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SLURMD_", "CUDA_", "NVIDIA_", "ROCR_", "GPU_DEVICE_"))
        or name in ("USER", "LOGNAME")
    }
    inside |= {"LANG": "C.UTF-8", "CARME_JOB_FOLDER": str(folder), "CARME_STEP_PROLOG": str(BEGAN)}
    return os.environ | {f"APPTAINERENV_{name}": value for name, value in inside.items()}


def step(spec: dict[str, Any], nodes: int) -> list[str]:
    """The beginning of the command line that runs something once on each node but the first."""
    arguments = [
        *["srun", f"--nodes={nodes - 1}", f"--ntasks={nodes - 1}", "--ntasks-per-node=1", "--relative=1"],
        *["--overlap", f"--cpus-per-task={spec['cpus']}", "--cpu-bind=none", "--kill-on-bad-exit=1"],
        *["--export=ALL", "--input=none"],
    ]
    if spec["gpus"]:
        kind = f":{spec['gpu_type']}" if spec["gpu_type"] else ""
        arguments.append(f"--gres=gpu{kind}:{spec['gpus']}")
    return arguments


def container(spec: dict[str, Any], workdir: Path) -> list[str]:
    """The beginning of the command line that runs something in the job's container on this node."""
    image = Path(spec["image"])
    if not image.is_file():
        raise LaunchError(
            Exit.IMAGE_MISSING,
            f"The image file {image} is missing on {socket.gethostname()}.",
            "Choose another image, or ask an administrator to build or distribute it.",
        )
    if shutil.which("apptainer") is None:
        raise LaunchError(
            Exit.NO_APPTAINER,
            f"Apptainer is not installed on {socket.gethostname()}.",
            "Tell an administrator, or start the job without an image.",
        )
    arguments = ["apptainer", "-q", "exec", "--contain", "--cleanenv", "--home", str(Path.home())]
    binds = ["/tmp", "/dev/shm", *(path for path in spec["binds"] if Path(path).exists())]
    if spec["gpus"]:
        if find_library("nvidia-ml"):
            arguments.append("--nv")
        else:
            binds += [str(device) for device in devices(Path("/dev"))]
    for path in binds:
        arguments += ["--bind", f"{path}:{path}"]
    return [*arguments, "--pwd", str(workdir), str(local_copy(image))]


def devices(folder: Path) -> list[Path]:
    """The GPU devices in `folder` that the job was allotted on this node, and those that all of them need."""
    allotted = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
    numbers = [number for number in allotted.split(",") if number.isdecimal()]
    names = [*(f"nvidia{number}" for number in numbers), *CONTROL_DEVICES] if numbers else []
    return [folder / name for name in names if (folder / name).exists()]


if __name__ == "__main__":
    sys.exit(main())
