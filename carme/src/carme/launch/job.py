"""The program `carme-job KEYFOLDER`: what a job does on its compute nodes.

It runs on the first node, starts the command there (in the job's container, under the node agent) and, in
a job of several nodes, joining agents on the others. Whatever fails is one sentence in the job's log.

A session's user waits for what happens here. So it imports little: no asyncio, no subprocess, no pathlib.
"""

import errno
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

from carme.errors import CarmeError
from carme.launch import facts, login
from carme.launch.exits import Exit, LaunchError
from carme.launch.images import local_copy
from carme.launch.spec import JobSpec

T = TypeVar("T")

ANNOUNCE_SECONDS = 120.0  # for the first agent to listen; images on a busy file system start slowly
BEGAN = time.time()  # the allocation's own preparations are over
STOP_SECONDS = 25  # between passing SIGTERM on and SIGKILL; less than Slurm's KillWait, so that we clean up
GRACE_SECONDS = 5.0  # between the end of the agents here and there; each hears of the other's
LOOK_SECONDS = 0.02  # between two looks at something that cannot be waited for
HOSTS = "hosts.hydra"  # the list of the nodes that are there, in the private folder of each
WATCH_SECONDS = 1.0  # between two looks at which nodes are there
RETURN_SECONDS = 5.0  # until a lost node is brought back; after each try that fails, twice as much
RETURN_MOST_SECONDS = 60.0
RETURN_TRIES = 12  # in a row; by then Slurm has long taken from the job a node that it cannot reach
CONTROL_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
#: What a job with data finds it by.
DATA_VARIABLES = ("CARME_DATA", "CARME_RESULTS", "CARME_BEEOND")
TASKS = "tasks"  # in the folder of an array: one folder for each task
#: What Python ignores, and a program that it starts should not.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
#: Where the node's exporter hears how training goes (carme_runtime.progress), where there is one.
TRAINING = "/run/carme/training"
#: This program once more, isolated from what the job's environment sets for Python.
ITSELF = [
    *[sys.executable, "-I", "-c"],
    "import sys; sys.path.append(sys.argv.pop(1)); from carme.launch.job import main; sys.exit(main())",
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
]
USAGE = "Usage: carme-job [--join HOST:PORT | --submission N] KEYFOLDER. Slurm starts it, in a job of Carme."


def main(arguments: list[str] | None = None) -> int:
    """Run the job; its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    where, submission = "", "1"
    if len(words) == 3 and words[0] == "--join":
        where = words[1]
        words = words[2:]
    elif len(words) == 3 and words[0] == "--submission":
        submission = words[1]
        words = words[2:]
    if len(words) != 1 or words[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        return _join(words[0], where) if where else _run(words[0], submission)
    except CarmeError as error:
        _say(str(error))
        return error.exit_code if isinstance(error, LaunchError) else Exit.FAILED


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


class Programs:
    """What was started here. SIGTERM, SIGINT and SIGHUP are passed on; who does not heed them is killed.

    An ended program stays a zombie until it is waited for, so its number never belongs to somebody else.
    """

    def __init__(self) -> None:
        self._running: list[int] = []
        self._codes: dict[int, int] = {}
        self.stopping = False  # by a signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGALRM, lambda number, frame: self._send(signal.SIGKILL))

    def start(self, arguments: list[str], environment: Mapping[str, str]) -> int:
        """Start a program in the current folder; its number. Raises LaunchError."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        try:
            program = spawn(arguments, environment)
            self._running.append(program)
        except OSError as error:
            raise LaunchError(
                Exit.NO_COMMAND,
                f"{arguments[0]!r} cannot be run on {socket.gethostname()}: {error.strerror}.",
                "Check the command's name and that it is executable, or tell an administrator.",
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        return program

    def wait(self, program: int) -> int:
        """Wait for its end; its exit code, in a shell's manner 128 more than the signal that killed it."""
        if program not in self._codes:
            self._reap(program, 0)
        return self._codes[program]

    def wait_for_any(self, seconds: float) -> None:
        """Wait until one of those that run has ended, or the time is over."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # from now on none is missed
        if not os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            signal.sigtimedwait({signal.SIGCHLD}, seconds)

    def has_ended(self, program: int, within: float = 0.0) -> bool:
        """Whether it is over, or will be in so many seconds."""
        end = time.monotonic() + within
        while program not in self._codes:
            self._reap(program, os.WNOHANG)
            if program in self._codes or time.monotonic() >= end:
                break
            time.sleep(LOOK_SECONDS)
        return program in self._codes

    def end(self, program: int) -> None:
        """See that it is over: SIGTERM, and SIGKILL for who does not heed it."""
        if not self.has_ended(program):
            os.kill(program, signal.SIGTERM)
            if not self.has_ended(program, STOP_SECONDS):
                os.kill(program, signal.SIGKILL)
                self.wait(program)

    def _reap(self, program: int, how: int) -> None:
        if os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT | how):
            self._running.remove(program)
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            self._codes[program] = code if code >= 0 else 128 - code

    def _send(self, number: int) -> None:
        for program in self._running:
            os.kill(program, number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._running and not self._codes:
            raise SystemExit(128 + number)  # nothing has been started yet
        self.stopping = True
        self._send(number)
        signal.alarm(STOP_SECONDS)


def spawn(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Start a program that is found by the PATH of its own environment; its number. Raises OSError."""
    missing: OSError = FileNotFoundError(2, os.strerror(2), arguments[0])
    for place in places(arguments[0], environment):
        try:
            return os.posix_spawn(place, arguments, environment, setsigmask=[], setsigdef=IGNORED_BY_PYTHON)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            missing = error
    raise missing


def places(program: str, environment: Mapping[str, str]) -> list[str]:
    """Where a program may lie."""
    if "/" in program:
        return [program]
    return [os.path.join(folder, program) for folder in os.get_exec_path(environment)]


def _run(folder: str, submission: str) -> int:
    allocation = Allocation()
    os.environ.update(login.identity(os.environ))
    spec = read_spec(folder)
    check_home(home())
    if spec.array:
        folder, spec = as_task(folder, spec, os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    begin(folder, submission)
    programs = Programs()
    logged_in = _logged_in(spec)
    facts.write(folder, spec.image_name, spec.digest, spec.workdir, logged_in.note)
    if spec.image is None and not spec.wants_data:
        return _directly(programs, folder, spec, logged_in.environment)
    make_private(allocation.private)
    staged = None
    try:
        os.chdir("/")
        staged = data(spec, folder, allocation)
        if not spec.command:
            return _ahead_of_others(programs, folder, spec, allocation)
        if spec.image is None:
            return _directly(programs, folder, spec, logged_in.environment)
        agent = [
            *["carme-agent", "--nodes", str(allocation.nodes)],
            *credentials(folder),
            *["--announce", f"{allocation.private}/fabric.json"],
            *["--announce", f"{folder}/fabric.json"],
            *["--listen", address_of(allocation.node)],
            *["--environment-file", f"{folder}/environment.json"],
            *["--", *spec.command],
        ]
        first = programs.start([*container(spec, staged), *agent], forwarded(folder))
        if allocation.nodes > 1:
            _with_others(programs, first, folder, spec, allocation)
        return programs.wait(first)
    finally:
        _remove(allocation.private, staged)
        if spec.own_image:
            _unlink(own_place(spec))


def _join(folder: str, where: str) -> int:
    """What a node other than the first does."""
    allocation = Allocation()
    os.environ.update(login.identity(os.environ))
    spec = read_spec(folder)
    if spec.array:
        spec = of_task(spec, folder)
    programs = Programs()
    make_private(allocation.private)
    staged = None
    try:
        os.chdir("/")
        staged = data(spec, folder, allocation)
        if not spec.command:
            return 0
        command = ["carme-agent", *credentials(folder), "--join", where]
        agent = programs.start([*container(spec, staged), *command], forwarded(folder))
        joined = False
        while not joined and not programs.has_ended(agent):
            programs.wait_for_any(WATCH_SECONDS)
            joined = os.path.exists(f"{allocation.private}/{HOSTS}")
        code = programs.wait(agent)
        # A step ends on all its nodes when it fails on one. Who had joined is lost alone.
        return 0 if joined else code
    finally:
        _remove(allocation.private, staged)
        if spec.own_image:
            _unlink(own_place(spec))


def _ahead_of_others(programs: Programs, folder: str, spec: JobSpec, allocation: Allocation) -> int:
    """In a job that only brings the data of another one: the same on its other nodes."""
    if allocation.nodes == 1:
        return 0
    program = [*ITSELF, "--join", "-:0", folder]
    return programs.wait(
        programs.start([*step(spec, allocation.nodes), *program], _without_export(os.environ))
    )


def data(spec: JobSpec, folder: str, allocation: Allocation) -> Any:
    """Bring the job's data to this node; what is there then, None when nothing was asked for."""
    if not spec.wants_data:
        return None
    from carme.launch.staging import stage

    staged = stage(spec, folder, allocation.job_id, allocation.nodes, allocation.private)
    os.environ.update(staged.environment)
    return staged


def _logged_in(spec: JobSpec) -> login.Login:
    """What the owner's login files set for a command that runs without an image; said if they fail."""
    if spec.image is not None or not spec.command:
        return login.Login(dict(os.environ))  # a container sees nothing of what they set
    found = login.log_in(os.environ)
    if found.note:
        _say("\n".join(filter(None, [found.note, found.errors])))
    return found


def _directly(programs: Programs, folder: str, spec: JobSpec, logged_in: dict[str, str]) -> int:
    data = {name: os.environ[name] for name in DATA_VARIABLES if name in os.environ}
    given = {"CARME_JOB_FOLDER": folder, **metrics(), **data}
    environment = logged_in | given | _read(f"{folder}/environment.json", dict[str, str])
    workdir = spec.workdir or home()
    try:
        os.chdir(workdir)
    except OSError as error:
        raise LaunchError(
            Exit.NO_WORKDIR,
            f"The folder {workdir} cannot be entered on {socket.gethostname()}: {error.strerror}.",
            "Choose another working directory.",
        ) from None
    return programs.wait(programs.start([*spec.command], _without_export(environment)))


def _with_others(programs: Programs, first: int, folder: str, spec: JobSpec, allocation: Allocation) -> None:
    """Keep agents on the other nodes; returns when both the first and they have ended."""
    where = _announced(programs, first, f"{allocation.private}/fabric.json")
    if where is None:
        return
    program = [*ITSELF, "--join", where, folder]
    others = Others(programs, spec, allocation, program)
    try:
        while not programs.has_ended(first):
            programs.wait_for_any(WATCH_SECONDS)
            # When the first agent ends, the others may hear of it before we do.
            code = others.failed()
            if code is not None and not programs.has_ended(first, GRACE_SECONDS):
                programs.end(first)
                raise LaunchError(
                    Exit(code) if code in list(Exit) else Exit.FAILED,
                    f"The agents on the other nodes ended with exit code {code}; the job was ended.",
                    "See the lines above; if there are none, start the job again.",
                )
            others.bring_back()
    finally:
        others.end()


class Others:
    """The agents on all nodes but the first.

    They are started together. Who is lost afterwards is started anew, alone, while Slurm leaves its node to
    the job: what runs in the job may go on without it meanwhile, and then with it again.
    """

    def __init__(self, programs: Programs, spec: JobSpec, allocation: Allocation, program: list[str]) -> None:
        self._programs, self._spec, self._allocation, self._program = programs, spec, allocation, program
        self._together = self._start()
        self._alone: list[int] = []
        self._joined: set[str] = set()
        self._lost: dict[str, Lost] = {}

    def failed(self) -> int | None:
        """The exit code with which they ended, unasked, before all of them had joined; None: they did not."""
        if self._programs.has_ended(self._together) and not self._programs.stopping:
            self._look()
            if len(self._joined) < self._allocation.nodes - 1:
                return self._programs.wait(self._together)
        return None

    def bring_back(self) -> None:
        """Start the agents of lost nodes, each time after a longer pause."""
        for program in self._alone:
            self._programs.has_ended(program)
        present = self._look()
        if present is None or self._programs.stopping:
            return
        self._lost = {node: lost for node, lost in self._lost.items() if node not in present}
        for node in sorted(self._joined - present):
            lost = self._lost.setdefault(node, Lost())
            if lost.given_up or time.monotonic() < lost.due:
                continue
            if lost.program is not None and not self._programs.has_ended(lost.program):
                continue
            if lost.tries == RETURN_TRIES:
                lost.given_up = True
                _say(f"After {RETURN_TRIES} tries to bring {node} back, the job goes on without it.")
                continue
            lost.program = self._start(node)
            self._alone.append(lost.program)
            lost.tries += 1
            lost.due = time.monotonic() + min(RETURN_SECONDS * 2**lost.tries, RETURN_MOST_SECONDS)

    def end(self) -> None:
        """See that they are over: agents leave by themselves when the first one does."""
        end = time.monotonic() + GRACE_SECONDS
        for program in (self._together, *self._alone):
            if not self._programs.has_ended(program, max(0.0, end - time.monotonic())):
                self._programs.end(program)

    def _look(self) -> set[str] | None:
        """The nodes that are there, by the list that the first agent keeps; None: it keeps none now."""
        try:
            with open(f"{self._allocation.private}/{HOSTS}", encoding="utf-8") as opened:
                present = {line.rpartition(":")[0] for line in opened} - {self._allocation.node}
        except OSError:  # it begins when somebody joins, and removes the list at its end
            return None
        self._joined |= present
        return present

    def _start(self, node: str = "") -> int:
        beginning = step(self._spec, self._allocation.nodes, node)
        return self._programs.start([*beginning, *self._program], _without_export(os.environ))


class Lost:
    """A node whose agent was lost."""

    def __init__(self) -> None:
        self.due = time.monotonic() + RETURN_SECONDS  # when it is tried next
        self.tries = 0
        self.program: int | None = None  # of the last one
        self.given_up = False


def _say(sentence: str) -> None:
    print(f"carme-job: {sentence}", file=sys.stderr, flush=True)


def _without_export(environment: Mapping[str, str]) -> dict[str, str]:
    """Our `--export=NONE` must not hold for the steps that the job starts."""
    return {name: value for name, value in environment.items() if name != "SLURM_EXPORT_ENV"}


def _announced(programs: Programs, first: int, file: str) -> str | None:
    """`HOST:PORT` of the first agent; None when it has ended instead."""
    end = time.monotonic() + ANNOUNCE_SECONDS
    while not programs.has_ended(first, LOOK_SECONDS):
        try:
            with open(file, encoding="utf-8") as opened:
                where = json.load(opened)
            return f"{where['host']}:{where['port']}"
        except (OSError, ValueError):  # not there, or not whole yet
            pass
        if time.monotonic() > end:
            programs.end(first)
            raise CarmeError(
                f"The agent on the first node did not listen within {ANNOUNCE_SECONDS:.0f} seconds.",
                "See the lines above, and try again.",
            )
    return None


def read_spec(folder: str) -> JobSpec:
    """The specification in a job's folder. Raises LaunchError."""
    return _read(f"{folder}/spec.json", JobSpec.load)


def _read(file: str, load: Callable[[Any], T]) -> T:
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
        raise CarmeError("This is no task of a job array.", "Start it with 'carme submit --array'.")
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
            "The job has begun before, so it does not begin again: Slurm lost it when it was restarted.",
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
                "Tell an administrator; somebody else made it.",
            ) from None
    except OSError as error:
        raise CarmeError(
            f"{path} cannot be made on {socket.gethostname()}: {error.strerror}.", "Tell an administrator."
        ) from None


def _remove(folder: str, staged: Any) -> None:
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


def forwarded(folder: str) -> dict[str, str]:
    """The environment for apptainer, which carries Slurm's and the job's variables on into the container."""
    inside = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SLURMD_", "CUDA_", "NVIDIA_", "ROCR_", "GPU_DEVICE_"))
        or name in ("USER", "LOGNAME", *DATA_VARIABLES)
    }
    inside |= {"LANG": "C.UTF-8", "CARME_JOB_FOLDER": folder, "CARME_STEP_PROLOG": str(BEGAN), **metrics()}
    return os.environ | {f"APPTAINERENV_{name}": value for name, value in inside.items()}


def metrics() -> dict[str, str]:
    """The variable that tells ranks where to say how training goes."""
    return {"CARME_METRICS": f"{TRAINING}/socket"} if os.path.isdir(TRAINING) else {}


def step(spec: JobSpec, nodes: int, only: str = "") -> list[str]:
    """The beginning of the command line that runs something once on each of the job's nodes but the first.

    Args:
        spec: The job's.
        nodes: How many the job has.
        only: A node on which alone it is to run.
    """
    where = [f"--nodes={nodes - 1}", f"--ntasks={nodes - 1}", "--relative=1"]
    if only:
        where = ["--nodes=1", "--ntasks=1", f"--nodelist={only}"]
    arguments = [
        *["srun", *where, "--ntasks-per-node=1", "--overlap", f"--cpus-per-task={spec.cpus}"],
        # A node that fails takes no other one with it.
        *["--cpu-bind=none", "--kill-on-bad-exit=1", "--no-kill", "--export=ALL", "--input=none"],
    ]
    if spec.gpus:
        kind = f":{spec.gpu_type}" if spec.gpu_type else ""
        arguments.append(f"--gres=gpu{kind}:{spec.gpus}")
    return arguments


def container(spec: JobSpec, staged: Any = None) -> list[str]:
    """The beginning of the command line that runs something in the job's container on this node.

    Args:
        spec: The job's.
        staged: What was brought here for it.
    """
    image = spec.image
    assert image is not None
    if not os.path.isfile(image):
        raise LaunchError(
            Exit.IMAGE_MISSING,
            f"The image file {image} is missing on {socket.gethostname()}.",
            "Choose another image, or ask an administrator to build or distribute it.",
        )
    if not any(os.access(place, os.X_OK) for place in places("apptainer", os.environ)):
        raise LaunchError(
            Exit.NO_APPTAINER,
            f"Apptainer is not installed on {socket.gethostname()}.",
            "Tell an administrator, or start the job without an image.",
        )
    file = checked_copy(image, spec.digest, own_place(spec)) if spec.own_image else local_copy(image)
    arguments = ["apptainer", "-q", "exec", "--contain", "--cleanenv", "--home", home()]
    # The folder and not the socket, which is another one after the exporter's restart.
    # With --contain its /dev/shm is its own. Apptainer takes no other, and would say so in every job's log.
    binds = [
        "/tmp",
        *([TRAINING] if metrics() else []),
        *(path for path in spec.binds if os.path.exists(path)),
    ]
    if spec.gpus:
        if has_driver():
            arguments.append("--nv")
        else:
            binds += devices("/dev")
    for path in [*binds, *(staged.binds if staged else ())]:
        arguments += ["--bind", f"{path}:{path}"]
    for path, inside in staged.read_only if staged else ():
        arguments += ["--bind", f"{path}:{inside}:ro"]
    return [*arguments, "--pwd", spec.workdir or home(), file]


def own_place(spec: JobSpec) -> str:
    """Where a job keeps its copy of a user's image: on the node's disk, else in its own folder in /tmp.

    Nobody but the job's owner can enter either.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    folder = f"{spec.staging.cache}/jobs/{job_id}" if spec.staging.cache else ""
    if not (folder and os.access(folder, os.W_OK | os.X_OK)):
        folder = f"/tmp/carme-{job_id}"
    return f"{folder}/image.sif"


def checked_copy(image: str, digest: str, copy: str) -> str:
    """The job's own copy of an image that is what was built; refuses any other.

    The site's images are root's, but a user's own one may change: whoever can write to it could do so between
    a look at it and its start. So what is looked at is the copy, which only the job's owner can change.

    Args:
        image: The file.
        digest: What it must be.
        copy: Where the copy goes.
    """
    import hashlib

    changed = "Ask its owner to put it where you may read it, or choose another image."
    hashed, draft = hashlib.sha256(), f"{copy}.{os.getpid()}"
    try:
        # O_NONBLOCK: opening a FIFO in its place must not wait for its writer.
        with open(os.open(image, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "it is not a plain file")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            changed = "Free some space on the node, or choose another image."
            with open(os.open(draft, flags, 0o400), "wb") as made:
                while part := file.read(4 << 20):
                    hashed.update(part)
                    made.write(part)
    except OSError as error:
        _unlink(draft)
        raise LaunchError(
            Exit.IMAGE_CHANGED,
            f"The image file {image} cannot be copied on {socket.gethostname()}: {error.strerror}.",
            changed,
        ) from None
    found = f"sha256:{hashed.hexdigest()}"
    if found != digest:
        _unlink(draft)
        raise LaunchError(
            Exit.IMAGE_CHANGED,
            f"The image file {image} is not what was built: its digest is {found}, not {digest}.",
            "Build the image again, or choose another one.",
        )
    os.replace(draft, copy)
    return copy


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it was never made


def has_driver() -> bool:
    """Whether the libraries of NVIDIA's driver are installed here."""
    import ctypes  # asking the linker's cache for them would start a program

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def devices(folder: str) -> list[str]:
    """The GPU devices in `folder` that the job was allotted on this node, and those that all of them need."""
    allotted = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
    numbers = [number for number in allotted.split(",") if number.isdecimal()]
    names = [*(f"nvidia{number}" for number in numbers), *CONTROL_DEVICES] if numbers else []
    return [path for name in names if os.path.exists(path := f"{folder}/{name}")]


if __name__ == "__main__":
    sys.exit(main())
