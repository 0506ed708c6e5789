"""Jobs of several nodes on one host: real agents, as processes, on loopback addresses."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import carme_runtime
from carme.jobs.certificate import make_certificate
from carme_runtime.petri import store
from memory_cgroups import cgroup  # noqa: F401  # a fixture
from patience import HANG

AGENT = [sys.executable, "-m", "carme_runtime.fabric.command"]
#: Takes another agent for lost after 14 s of silence in place of 35. It is for tests of that alone: one that
#: gets no processor for so long is lost, too.
IMPATIENT_AGENT = [
    *(sys.executable, "-c"),
    "from carme_runtime.fabric import agent, command; agent.BEAT_SECONDS = 2.0; command.main()",
]
RUN = [sys.executable, "-m", "carme_runtime.launcher.command"]
HUB_TOKEN = "5b7e3c2f90d14a6b8c1d2e3f40516273"
PATIENCE = HANG

# Programs inherit signals that are ignored, as in the background of a script or under nohup; many here are
# ended by one. A handler that does nothing leaves this process as deaf as it was, and is not inherited.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any job, and with `more`."""
    saved = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "CARME")) and name not in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    }
    return saved | {"PYTHONPATH": str(Path(carme_runtime.__file__).parents[1])} | more


class Process:
    """A child whose error output can be waited for.

    Args:
        own_group: Whether it leads a group of processes, as what a shell starts in a terminal does.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], cwd: Path, own_group: bool = False
    ) -> None:
        self.popen = subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=own_group,
        )
        self._news = threading.Condition()
        self._errors = ""
        self._ended = False
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self.popen.stderr
        for line in self.popen.stderr:
            with self._news:
                self._errors += line
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for_error(self, text: str) -> None:
        """Wait until the error output has `text`."""
        with self._news:
            self._news.wait_for(lambda: text in self._errors or self._ended, PATIENCE)
            assert text in self._errors

    def line(self) -> str:
        """The next line of the output."""
        assert self.popen.stdout
        return self.popen.stdout.readline().rstrip("\n")

    def wait(self) -> tuple[int, str, str]:
        """Exit code, the rest of the output, all of the error output."""
        assert self.popen.stdout
        out = self.popen.stdout.read()
        code = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code, out, self._errors

    def close(self) -> None:
        """Make sure that it is gone."""
        assert self.popen.stdin and self.popen.stdout and self.popen.stderr
        self.popen.stdin.close()  # for the command of a first agent, which outlives its agent's SIGKILL
        self.popen.kill()
        self.popen.wait()
        self._reader.join(PATIENCE)
        self.popen.stdout.close()
        self.popen.stderr.close()


def private_file(path: Path, text: str) -> Path:
    """A file that its owner alone can read."""
    path.touch(0o600)
    path.write_text(text)
    return path


class Job:
    """Nodes n1, n2, ... with an agent each. n1's command lives until its input is closed."""

    def __init__(
        self,
        folder: Path,
        hosts: list[str],
        devices: list[str] | None = None,
        *,
        joining: bool = True,
        encrypted: bool = True,
        agent: list[str] = AGENT,
    ) -> None:
        self.folder = folder
        self.agent = agent
        self.encrypted = encrypted
        self.processes: list[Process] = []
        self.key_file = private_file(folder / "fabric.key", secrets.token_hex(32))
        self.certificate = private_file(folder / "fabric.pem", make_certificate())
        variables = {"TOKEN": "from the file", "JUPYTERHUB_API_TOKEN": HUB_TOKEN, "JPY_API_TOKEN": HUB_TOKEN}
        secret = private_file(folder / "environment.json", json.dumps(variables))
        self.hosts = hosts
        self.devices = devices or [""] * len(hosts)
        self.announce = folder / "fabric.json"
        self.announce_too = folder / "private" / "fabric.json"
        # An empty argument is one, too.
        command = ["sh", "-c", "echo $TOKEN; echo $CARME_AGENT; read line; exit ${line:-0}", ""]
        self.first = self.start(
            [
                *(*agent, "--nodes", str(len(hosts)), "--key-file", str(self.key_file)),
                *self.encryption(self.certificate),
                *("--listen", "127.0.0.1"),
                *("--announce", str(self.announce), "--announce", str(self.announce_too)),
                *("--environment-file", str(secret), "--socket", str(self.socket(0)), "--", *command),
            ],
            self.node_environment(0),
        )
        self.greeting = [self.first.line(), self.first.line()]
        self.joined = [self.join(index) for index in range(1, len(hosts) if joining else 1)]
        for joined, host in zip(self.joined, hosts[1:], strict=False):
            joined.wait_for_error(f"{host} joined")

    def encryption(self, certificate: Path) -> list[str]:
        return ["--certificate", str(certificate)] if self.encrypted else []

    @property
    def port(self) -> int:
        return json.loads(self.announce.read_text())["port"]

    def socket(self, index: int) -> Path:
        return self.folder / self.hosts[index] / "agent.sock"

    def node_environment(self, index: int) -> dict[str, str]:
        own = {"SLURMD_NODENAME": self.hosts[index], "CUDA_VISIBLE_DEVICES": self.devices[index]}
        own |= {"PS1": "", "PROMPT_COMMAND": "false"}  # as in containers
        return clean_environment(HOME=str(self.folder), **own)  # where no start-up files of shells lie

    def start(self, command: list[str], environment: dict[str, str]) -> Process:
        process = Process(command, environment, self.folder)
        self.processes.append(process)
        return process

    def join(
        self,
        index: int,
        key_file: Path | None = None,
        certificate: Path | None = None,
        port: int | None = None,
    ) -> Process:
        """Start the agent of a node; the others are as they should be unless something else is named."""
        where = ["--key-file", str(key_file or self.key_file), "--join", f"127.0.0.1:{port or self.port}"]
        where += self.encryption(certificate or self.certificate)
        environment = self.node_environment(index)
        return self.start([*self.agent, *where, "--socket", str(self.socket(index))], environment)

    def launch(self, *arguments: str, node: int = 0, environment: Mapping[str, str] | None = None) -> Process:
        """Start carme-run on a node, with `environment` added to its own."""
        named = {"CARME_AGENT": str(self.socket(node))} | dict(environment or {})
        return self.start([*RUN, *arguments], clean_environment(**named))

    def end(self, code: int = 0) -> tuple[int, str, str]:
        """Let the command of the first node end with `code`."""
        assert self.first.popen.stdin
        self.first.popen.stdin.write(f"{code}\n")
        self.first.popen.stdin.flush()
        return self.first.wait()

    def close(self) -> None:
        for process in self.processes:
            process.close()


class Witness:
    """Ranks connect to it and live until released: it sees when they start and when they are gone."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(PATIENCE)
        self.environment = {"WITNESS": str(self._server.getsockname()[1])}
        self._ranks: list[socket.socket] = []

    def expect(self, count: int) -> None:
        """Wait until `count` ranks have come."""
        for _ in range(count):
            rank, _ = self._server.accept()
            rank.settimeout(PATIENCE)
            self._ranks.append(rank)

    def wait_until_ready(self) -> None:
        """Wait until every rank has sent a byte."""
        for rank in self._ranks:
            assert rank.recv(1) == b"r"

    def release(self) -> None:
        """Let them go on."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # gone
                rank.sendall(b"go")

    def all_gone(self) -> bool:
        """Wait until the kernel has closed the connections of all ranks."""
        return all(_read(rank) == b"" for rank in self._ranks)

    def close(self) -> None:
        for each in (*self._ranks, self._server):
            each.close()


def _read(rank: socket.socket) -> bytes:
    try:
        return rank.recv(1)
    except ConnectionResetError:
        return b""


# What a rank does to be witnessed.
MEET = """
import os, socket, sys
witness = socket.create_connection(("127.0.0.1", int(os.environ["WITNESS"])))
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of shared memory for this test alone, in which nets leave nothing."""
    created = Path("/dev/shm") / f"carme-test-{os.getpid()}-{tmp_path.name}"
    created.mkdir()
    monkeypatch.setattr(store, "SHARED", created)
    yield created
    left = [path.name for path in created.iterdir()]
    shutil.rmtree(created)
    assert left == []


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script for ranks, and give its path."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def witness() -> Iterator[Witness]:
    found = Witness()
    yield found
    found.close()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*hosts: str, devices: list[str] | None = None, **options: Any) -> Job:
        jobs.append(Job(tmp_path, list(hosts), devices, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job of two nodes without GPUs that all tests of a module share: they must leave it whole."""
    shared = Job(tmp_path_factory.mktemp("job"), ["n1", "n2"])
    yield shared
    shared.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start carme-run outside of jobs."""
    started: list[Process] = []

    def launch(*arguments: str, **environment: str) -> Process:
        started.append(Process([*RUN, *arguments], clean_environment(**environment), tmp_path))
        return started[-1]

    yield launch
    for process in started:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGKILL)
        process.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run of a net, which is not there yet."""
    return tmp_path / "run"
