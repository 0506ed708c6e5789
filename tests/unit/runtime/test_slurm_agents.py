"""carme-run over all nodes of a Slurm job without Carme: `srun` is simulated, and starts all on this host."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.fabric import credentials
from carme_runtime.fabric.tls import read_certificate
from carme_runtime.launcher import slurm, slurm_agents
from patience import HANG

from .conftest import MEET, RUN, Process, Witness, clean_environment

Launch = Callable[..., Process]
Script = Callable[[str], str]

#: Starts its command for each node of --nodelist under that node's name. The variable FAULTS has by node
#: `absent` (it never starts), `failing` (no such program), `killed`, or `apart` (it does not see the caller's
#: folder); by `srun` it has an error that starts nothing.
SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
words = sys.argv[1:]
count = next(index for index, word in enumerate(words) if not word.startswith("-"))
options, command = words[:count], words[count:]
faults = json.loads(os.environ.get("FAULTS", "{{}}"))
if "srun" in faults:
    sys.exit("srun: error: " + faults["srun"])
hosts = next(word for word in options if word.startswith("--nodelist=")).partition("=")[2].split(",")
alone = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
hide = 'mount -t tmpfs none "$HOME/.carme" && exec "$@"'
tasks = {{}}
for host in hosts:
    own = {{"SLURMD_NODENAME": host, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}}
    own |= {{"CUDA_VISIBLE_DEVICES": os.environ.get("THERE", "")}}
    fault = faults.get(host)
    before = [*alone, "sh", "-c", hide, "-"] if fault == "apart" else []
    started = {{"absent": ["sleep", "1000"], "failing": ["sh", "-c", "echo no such program >&2; exit 2"]}}
    started["killed"] = ["sh", "-c", "kill -9 $$"]
    tasks[host] = subprocess.Popen(started.get(fault, [*before, *command]), env=os.environ | own)
def end(number, frame):
    for task in tasks.values():
        task.kill()
signal.signal(signal.SIGTERM, end)  # as srun does, which passes on SIGKILL then
with open(os.environ["RECORD"] + ".new", "w") as file:
    json.dump([options, command, dict(os.environ)], file)
os.rename(os.environ["RECORD"] + ".new", os.environ["RECORD"])
numbers = {{task.pid: (number, host) for number, (host, task) in enumerate(tasks.items())}}
codes = []
for _ in tasks:  # in the order in which they end
    process, status = os.wait()
    number, host = numbers[process]
    codes.append(os.waitstatus_to_exitcode(status))
    if codes[-1]:
        reason = f"Exited with exit code {{codes[-1]}}" if codes[-1] > 0 else signal.strsignal(-codes[-1])
        print(f"srun: error: {{host}}: task {{number}}: {{reason}}", file=sys.stderr, flush=True)
sys.exit(max(map(abs, codes)))
"""
SHOW = "import os; print(*map(os.environ.get, ('WORLD_SIZE', 'SLURMD_NODENAME', 'CUDA_VISIBLE_DEVICES')))"


class SlurmJob:
    """What a job's script sees on its first node, and what `carme-run` leaves there."""

    def __init__(self, folder: Path, hosts: list[str]) -> None:
        self.folder, self.hosts = folder, hosts
        self.home, self.temporary, self.programs = folder / "home", folder / "tmp", folder / "bin"
        for each in (self.home, self.temporary, self.programs):
            each.mkdir()
        self.program("srun", SRUN)
        self._started: list[Process] = []

    def program(self, name: str, text: str) -> None:
        """Put a program into the PATH of the job."""
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        """What the job's script has, with `more`."""
        own = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "RECORD": str(self.folder / "record")}
        own |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(len(self.hosts))}
        own |= {"SLURM_JOB_NODELIST": ",".join(self.hosts), "SLURMD_NODENAME": self.hosts[0]}
        own |= {"PATH": f"{self.programs}:{os.environ['PATH']}", "CARME_ADDRESS": "127.0.0.1"}
        return clean_environment(**own) | more

    def launch(self, *arguments: str, **environment: str) -> Process:
        """Start carme-run."""
        own = self.environment(**environment)
        self._started.append(Process([*RUN, *arguments], own, self.folder, own_group=True))
        return self._started[-1]

    def record(self) -> tuple[list[str], list[str], dict[str, str]]:
        """The options that srun got, the command, and its environment."""
        options, command, environment = json.loads((self.folder / "record").read_text())
        return options, command, environment

    def wait_for_srun(self) -> None:
        """Wait until srun has started all."""
        end = time.monotonic() + HANG
        while not (self.folder / "record").exists():
            assert time.monotonic() < end, "srun was not started"
            time.sleep(0.02)

    def private(self) -> list[Path]:
        """The folders in which runs have their keys."""
        shared = self.home / ".carme"
        return list(shared.iterdir()) if shared.exists() else []

    def processes(self) -> dict[int, bytes]:
        """Those of the job by their numbers, with all arguments and variables."""
        found: dict[int, bytes] = {}
        for each in Path("/proc").glob("[0-9]*"):
            try:
                text = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
            except OSError:
                continue
            if f"TMPDIR={self.temporary}".encode() in text:
                found[int(each.name)] = text
        return found

    def agents(self, host: str) -> list[int]:
        """The numbers of what srun started on a node."""
        own = f"SLURMD_NODENAME={host}".encode()
        found = self.processes().items()
        return [
            number for number, text in found if b"\0join\0" in text and own in text and b"srun" not in text
        ]

    def answers(self, host: str) -> bool:
        """Whether the agent of a node goes on to serve clients."""
        (folder,) = self.private()
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(HANG)
            try:
                client.connect(str(folder / host / slurm_agents.SOCKET))
                return client.recv(1) != b""
            except (FileNotFoundError, ConnectionError):
                return False

    def is_clean(self) -> bool:
        """Wait until nothing is left of the job; False: something stays."""
        end = time.monotonic() + HANG
        while self.processes() or self.private() or any(self.temporary.iterdir()):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        for process in self._started:
            process.close()
        for number in self.processes():
            os.kill(number, signal.SIGKILL)


@pytest.fixture
def make_slurm_job() -> Iterator[Callable[..., SlurmJob]]:
    jobs: list[SlurmJob] = []
    # A short path: sockets lie in the run's own folder only where their names fit.
    with tempfile.TemporaryDirectory() as folder:

        def make(*hosts: str) -> SlurmJob:
            jobs.append(SlurmJob(Path(folder), list(hosts)))
            return jobs[-1]

        yield make
        for job in jobs:
            job.close()


@pytest.fixture
def slurm_job(make_slurm_job: Callable[..., SlurmJob]) -> SlurmJob:
    return make_slurm_job("n1", "n2")


def test_ranks_start_on_all_nodes(slurm_job: SlurmJob, script: Script) -> None:
    here = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2", "THERE": "2,3"}
    options = {"SLURM_GPUS_PER_TASK": "1", "SLURM_CPUS_PER_TASK": "4", "SLURM_EXPORT_ENV": "NONE"}
    code, out, errors = slurm_job.launch(script(SHOW), **here, **options).wait()
    assert (code, errors) == (0, "")
    placed = ["4 n1 0,1", "4 n1 0,1", "4 n2 2,3", "4 n2 2,3"]
    assert sorted(out.splitlines()) == [f"[rank {rank}] {text}" for rank, text in enumerate(placed)]
    given, command, environment = slurm_job.record()
    wanted = {"--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap", "--gres=gpu:2", "--mem=0"}
    assert wanted <= set(given) and command[0] == sys.executable
    assert [name for name in environment if name.startswith("SLURM_")] == ["SLURM_JOB_ID"]
    assert slurm_job.is_clean()


def test_fewer_nodes_and_a_node_without_gpus(make_slurm_job: Callable[..., SlurmJob], script: Script) -> None:
    job = make_slurm_job("n1", "n2", "n3")
    code, out, _ = job.launch("--nodes", "2", script(SHOW)).wait()
    assert (code, sorted(out.splitlines())) == (0, ["[rank 0] 2 n1 None", "[rank 1] 2 n2 "])
    options, _, _ = job.record()
    assert "--nodelist=n2" in options and not [word for word in options if word.startswith("--gres")]
    code, out, errors = job.launch("--nodes", "4", script(SHOW)).wait()
    assert (code, out) == (2, "") and "--nodes 4 was requested, but the job has 3." in errors


@pytest.mark.parametrize("arguments", [["--nodes", "1"], ["-n", "1"]])
def test_one_rank_or_node_needs_no_agents(slurm_job: SlurmJob, script: Script, arguments: list[str]) -> None:
    assert slurm_job.launch(*arguments, script(SHOW)).wait() == (0, "[rank 0] 1 n1 None\n", "")
    assert not (slurm_job.folder / "record").exists()


def test_a_task_of_srun_takes_all_nodes_when_they_are_requested(slurm_job: SlurmJob, script: Script) -> None:
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    code, out, errors = slurm_job.launch(script(SHOW), **step).wait()
    assert (code, out) == (0, "[rank 0] 1 n1 None\n")
    assert "srun gave carme-run one of the job's 2 nodes" in errors and "add --nodes 2" in errors
    code, out, errors = slurm_job.launch("--nodes", "2", script(SHOW), **step).wait()
    assert (code, len(out.splitlines()), errors) == (0, 2, "")


def open_files(numbers: Iterable[int]) -> set[str]:
    """Their names; a file that was removed has no other."""
    found: set[str] = set()
    for number in numbers:
        for each in Path(f"/proc/{number}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(each.readlink()))
    return found


@pytest.mark.parametrize("options", [[], ["--unencrypted"]])
def test_nobody_else_can_read_the_key(
    slurm_job: SlurmJob, script: Script, witness: Witness, options: list[str]
) -> None:
    run = slurm_job.launch(*options, script(MEET + "witness.recv(2)"), **witness.environment)
    witness.expect(2)
    (private,) = slurm_job.private()
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "fabric.pem").exists() != bool(options)
    for path in private.glob("fabric.*"):
        assert path.stat().st_mode & 0o777 == 0o600, path
    key, processes = (private / "fabric.key").read_bytes().strip(), slurm_job.processes()
    assert len(key) == 64 and len(processes) >= 6  # launcher, agent and its command, srun, agent, two ranks
    assert not [number for number, text in processes.items() if key in text]
    # A file that is open could not be removed from a home on NFS.
    assert not [name for name in open_files(processes) if name.startswith(str(private))]
    witness.release()
    assert run.wait()[0] == 0 and slurm_job.is_clean()


@pytest.mark.parametrize(
    ("number", "target"),
    [
        (signal.SIGTERM, "launcher"),
        (signal.SIGKILL, "launcher"),
        (signal.SIGTERM, "tasks"),
        (signal.SIGTERM, "all"),
    ],
)
def test_nothing_is_left_after_a_signal(
    slurm_job: SlurmJob, script: Script, witness: Witness, number: signal.Signals, target: str
) -> None:
    """At a job's time limit Slurm sends SIGTERM to its tasks: the script, or what has taken its place by
    exec, and the agents that srun started. With some of its plugins it sends it to all processes."""
    run = slurm_job.launch(script(MEET + "witness.recv(2)"), **witness.environment)
    witness.expect(2)
    targets = {"launcher": [], "tasks": slurm_job.agents("n2"), "all": slurm_job.processes()}
    for process in targets[target]:
        with contextlib.suppress(ProcessLookupError):  # the end of another one has ended it
            os.kill(process, number)
    if target == "tasks":  # the launcher may hear of it later
        assert all(slurm_job.answers("n2") for _ in range(100))
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.popen.pid, number)
    code, _, errors = run.wait()
    # The launcher may see first that an agent is gone, which srun kills when it gets the signal itself.
    codes = (143, 1) if target == "all" else (143 if number == signal.SIGTERM else -signal.SIGKILL,)
    assert code in codes, errors
    assert witness.all_gone() and slurm_job.is_clean()


def test_nothing_is_left_when_slurm_kills_what_the_script_started(
    slurm_job: SlurmJob, script: Script, witness: Witness
) -> None:
    """It does so at once when SIGTERM has ended the script's shell."""
    run = slurm_job.launch(script(MEET + "witness.recv(2)"), **witness.environment)
    witness.expect(2)
    there = [number for number, text in slurm_job.processes().items() if b"SLURMD_NODENAME=n2" in text]
    for process in slurm_job.processes():
        if process not in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert run.wait()[0] == -signal.SIGKILL and witness.all_gone() and slurm_job.is_clean()


def test_whether_the_first_agent_has_ended() -> None:
    """One that lives may have a run that goes on without the node that asks."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert not slurm_agents._is_over("127.0.0.1", port)
    assert slurm_agents._is_over("127.0.0.1", port)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_warns_of_the_time_limit_ends_no_agent(
    slurm_job: SlurmJob, script: Script, witness: Witness, number: signal.Signals
) -> None:
    text = f"import signal; print(int(signal.getsignal({number})), flush=True)\n{MEET}witness.recv(2)"
    run = slurm_job.launch(script(text), **witness.environment)
    witness.expect(2)
    for agent in slurm_job.agents("n2"):
        os.kill(agent, number)
    witness.release()
    code, out, errors = run.wait()
    assert (code, errors) == (0, "")
    assert sorted(out.splitlines()) == [f"[rank {rank}] {signal.SIG_DFL:d}" for rank in range(2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_after_a_signal_before_all_have_joined(
    slurm_job: SlurmJob, script: Script, number: signal.Signals
) -> None:
    run = slurm_job.launch(script(SHOW), FAULTS=json.dumps({"n2": "absent"}))
    slurm_job.wait_for_srun()
    run.popen.send_signal(number)
    code, out, errors = run.wait()
    assert (code, out) == (128 + number, "")
    assert errors == ("carme-run: The run was ended by a signal.\n" if number != signal.SIGINT else "")
    assert slurm_job.is_clean()


def test_the_end_of_a_lost_agent_is_shown(slurm_job: SlurmJob, script: Script, witness: Witness) -> None:
    run = slurm_job.launch(script(MEET + "witness.recv(2)"), **witness.environment)
    witness.expect(2)
    for agent in slurm_job.agents("n2"):
        os.kill(agent, signal.SIGKILL)
    code, _, errors = run.wait()
    assert code == 1 and "The agent of n2 was lost, so the run was ended." in errors
    shown = errors.partition("carme-run: Last output of srun and the agents:\n")[2]
    assert "carme-agent: the agent of n2 was lost: " in shown
    assert "srun: error: n2: task 0: Killed" in shown
    assert slurm_job.is_clean()


def test_an_interrupt_is_the_ranks(slurm_job: SlurmJob, script: Script, witness: Witness) -> None:
    run = slurm_job.launch(script(MEET + "witness.recv(2)"), **witness.environment)
    witness.expect(2)
    os.killpg(run.popen.pid, signal.SIGINT)  # as a terminal does
    assert run.wait()[0] == 130 and witness.all_gone() and slurm_job.is_clean()


def test_mpirun_takes_the_place_of_the_launcher(slurm_job: SlurmJob) -> None:
    """The agents are there for it, and end with it."""
    text = '#!/bin/sh\n[ "$1" = --version ] && exec echo "mpirun (Open MPI) 5.0"\n'
    slurm_job.program("mpirun", text + 'test -S "$CARME_AGENT" && echo "there: $*"; exit 5')
    slurm_job.program("carme-remote", "#!/bin/sh\n")
    code, out, errors = slurm_job.launch("--backend", "mpi", "--", "true").wait()
    assert code == 5, errors
    assert out.startswith("there: -n 2 --host n1:1,n2:1 ")
    assert slurm_job.is_clean()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("failing", ["no such program", "srun: error: n3: task 1: Exited with exit code 2"]),
        ("killed", ["srun: error: n3: task 1: Killed"]),
    ],
)
def test_a_node_that_fails_is_named_with_what_srun_printed(
    make_slurm_job: Callable[..., SlurmJob], script: Script, fault: str, words: list[str]
) -> None:
    job = make_slurm_job("n1", "n2", "n3")
    code, out, errors = job.launch(script(SHOW), FAULTS=json.dumps({"n3": fault})).wait()
    assert (code, out) == (2, "")
    assert "The agents of n3 did not join this run. Output of srun and the agents:" in errors
    assert not [text for text in words if text not in errors], errors
    assert "add --nodes 1 to run on this node alone." in errors
    assert job.is_clean()


def test_nodes_with_fewer_gpus_are_named_as_the_cause(slurm_job: SlurmJob, script: Script) -> None:
    error = "Unable to create step for job 17: Invalid generic resource (gres) specification"
    code, out, errors = slurm_job.launch(script(SHOW), FAULTS=json.dumps({"srun": error})).wait()
    assert (code, out) == (2, "") and f"srun: error: {error}" in errors
    assert "Each node must have as many GPUs of the job as the first one: submit it with" in errors
    assert "or add --nodes 1 to run on this node alone." in errors
    assert slurm_job.is_clean()


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("srun: error: n[2-3]: tasks 0-1: Out Of Memory", ["n[2-3]"]),
        ("srun: error: n2: task 0: Segmentation fault (core dumped)", ["n2"]),
        ("srun: error: Unable to create step for job 17: Memory required by task is not available", []),
    ],
)
def test_what_srun_says_of_a_task_that_ended(line: str, hosts: list[str]) -> None:
    assert slurm_agents._FAILED_TASK.findall(f"carme-agent: n3 joined\n{line}\n") == hosts


def test_the_end_of_the_first_agent_is_noticed_while_others_join(slurm_job: SlurmJob, script: Script) -> None:
    run = slurm_job.launch(script(SHOW), FAULTS=json.dumps({"n2": "absent"}))
    slurm_job.wait_for_srun()
    for number, text in slurm_job.processes().items():
        if b"carme_runtime.fabric.command" in text:
            os.kill(number, signal.SIGKILL)
    code, out, errors = run.wait()
    assert (code, out) == (2, "") and "n2 did not join this run." in errors, errors
    assert slurm_job.is_clean()


def start_agents(job: SlurmJob, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    """Start them by this process, which is to fail."""
    variables = job.environment(**environment)
    monkeypatch.setenv("HOME", str(job.home))
    names = ("cleanup", "nodes", "n", "hostfile", "max_ranks", "shared_folder", "unencrypted")
    plan = slurm_agents.plan(Namespace(**dict.fromkeys(names)), variables)
    assert plan

    async def start() -> None:
        async with slurm_agents.started(plan, variables):
            raise AssertionError("all joined")

    asyncio.run(start())


def test_a_node_that_does_not_join_is_named(slurm_job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_agents, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(slurm_agents, "END_SECONDS", HANG)  # nobody waits for what has not joined
    with pytest.raises(
        CarmeRuntimeError, match=r"The agents of (n1, )?n2 did not join this run within 1 s\."
    ):
        start_agents(slurm_job, monkeypatch, FAULTS=json.dumps({"n2": "absent"}))
    assert slurm_job.is_clean()


@pytest.mark.parametrize("step", ["_place", "_start", "_for_srun"])
def test_a_node_that_has_run_out_of_something(
    slurm_job: SlurmJob, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/n1")

    monkeypatch.setattr(slurm_agents, step, fail)
    message = r"The agents of this run cannot be started: Too many open files \(/n1\)\. .*--nodes 1\."
    with pytest.raises(CarmeRuntimeError, match=message):
        start_agents(slurm_job, monkeypatch)
    assert slurm_job.is_clean()


def can_unshare() -> bool:
    own = ["--mount"] if os.getuid() == 0 else ["--map-root-user", "--mount"]
    command = ["unshare", *own, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_home_that_nodes_do_not_share_is_named(slurm_job: SlurmJob, script: Script) -> None:
    if not can_unshare():
        pytest.skip("a process can have no mounts of its own here")
    code, out, errors = slurm_job.launch(script(SHOW), FAULTS=json.dumps({"n2": "apart"})).wait()
    assert (code, out) == (2, "")
    assert f"n2 does not see the folder {slurm_job.home}/.carme/slurm-17-" in errors
    assert "Name one that all nodes of the job see: --shared-folder DIR" in errors
    shared = slurm_job.folder / "shared"
    options = ["--shared-folder", str(shared)]
    code, out, errors = slurm_job.launch(*options, script(SHOW), FAULTS=json.dumps({"n2": "apart"})).wait()
    assert (code, len(out.splitlines()), errors) == (0, 2, "")
    assert slurm_job.is_clean() and not list(shared.iterdir())


def test_a_folder_that_cannot_be_made(slurm_job: SlurmJob, script: Script) -> None:
    (slurm_job.home / ".carme").write_text("a file")
    code, out, errors = slurm_job.launch(script(SHOW)).wait()
    assert (code, out) == (2, "")
    assert f"No private folder can be made in {slurm_job.home}/.carme for this run's nodes: File" in errors
    assert "--shared-folder DIR" in errors


def test_a_node_without_an_address_for_others(slurm_job: SlurmJob, script: Script) -> None:
    code, out, errors = slurm_job.launch(script(SHOW), CARME_ADDRESS="", SLURMD_NODENAME="localhost").wait()
    if code == 0:
        pytest.skip("this host's own name leads to an address on a network")
    assert (code, out) == (2, "")
    assert "The name of node localhost leads to no address that other nodes can reach." in errors
    assert "Set CARME_ADDRESS" in errors and not slurm_job.private()


def test_a_dry_run_says_what_srun_would_start(slurm_job: SlurmJob, script: Script) -> None:
    code, out, errors = slurm_job.launch("--dry-run", "-n", "2", script(SHOW)).wait()
    assert (code, errors) == (0, "")
    assert "n1" in out and "On n2, which may have other cores or GPUs than this node, srun would start" in out
    assert "srun --job-name=carme-agents --nodes=1 " in out
    code, out, _ = slurm_job.launch("--dry-run", "--json", "-n", "2", script(SHOW)).wait()
    found = json.loads(out)
    assert found["agents"]["hosts"] == ["n1", "n2"] and found["agents"]["command"][0] == "srun"
    assert [rank["host"] for rank in found["ranks"]] == ["n1", "n2"]
    assert not (slurm_job.folder / "record").exists() and not slurm_job.private()


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("n1,n2", ["n1", "n2"]),
        ("n[2-3],n1", ["n1", "n2", "n3"]),
        ("n1,gpu[008-010,12],m", ["n1", "gpu008", "gpu009", "gpu010", "gpu12", "m"]),
        ("r[1-2]n[1,4]", ["n1", "r1n1", "r1n4", "r2n1", "r2n4"]),
    ],
)
def test_the_names_of_a_jobs_nodes(listed: str, names: list[str]) -> None:
    assert slurm.node_names({"SLURM_JOB_NODELIST": listed, "SLURMD_NODENAME": "n1"}) == names


@pytest.mark.parametrize("program", ["cryptography", "openssl"])
def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    if program == "openssl":
        monkeypatch.setitem(sys.modules, "cryptography", None)
        if not shutil.which("openssl"):
            pytest.skip("there is no openssl here")
    options = credentials.write(tmp_path, encrypted=True)
    assert options == [
        *("--key-file", str(tmp_path / "fabric.key")), *("--certificate", str(tmp_path / "fabric.pem"))
    ]  # fmt: skip
    assert read_certificate(tmp_path / "fabric.pem")


def test_where_nothing_makes_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CarmeRuntimeError, match=r"neither is here. Use: pip install .* add --unencrypted"):
        credentials.make_certificate()
    assert credentials.write(tmp_path, encrypted=False)[-1] == "--unencrypted"
    (tmp_path / "openssl").write_text("#!/bin/sh\necho 'no such curve' >&2; exit 1")
    (tmp_path / "openssl").chmod(0o755)
    with pytest.raises(CarmeRuntimeError, match="could not make a certificate: no such curve"):
        credentials.make_certificate()


def test_agents_run_the_source_of_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another one is installed, and without what else lies beside it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (installed,) = tmp_path.glob("env/lib/python*/site-packages")
    for place, text in ((installed, "installed"), (tmp_path / "own", "own")):
        (place / "carme_runtime").mkdir(parents=True)
        (place / "carme_runtime" / "__init__.py").touch()
        (place / "carme_runtime" / "probe.py").write_text(f"def main():\n import json\n print('{text}')\n")
    (tmp_path / "own" / "json.py").write_text("raise ImportError('not that of Python')")
    monkeypatch.setattr(slurm_agents, "_SOURCE", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    assert subprocess.check_output(slurm_agents._itself("carme_runtime.probe"), text=True) == "own\n"
