"""A site on a fake Slurm: the broker runs for real, on a real socket; only Slurm's programs are stand-ins."""

import ast
import asyncio
import contextlib
import fcntl
import json
import os
import pwd
import py_compile
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from carme.broker import AsyncBrokerClient
from carme.broker import server as server_module
from carme.broker.peers import Peer
from carme.broker.server import Server
from carme.broker.service import Broker
from carme.cli import main
from carme.config import Settings
from carme.jobs import JobRequest
from carme.slurm import SlurmCommands, UnixAccount
from carme.slurm import account as account_module
from patience import HANG

# The account that jobs run as: as root another number, so that privileges are really dropped.
OWNER_UID = os.getuid() or 54321
OWNER_GID = os.getgid() or 54321
# As root, the test's own interpreter may be where the owner may not read.
PYTHON = "/usr/bin/python3" if os.getuid() == 0 and Path("/usr/bin/python3").exists() else sys.executable


NASTY = ["$(touch x); ' \" ` | &\nnewline", "*", "--help", "%j", ""]
#: A job of ada's as squeue prints it.
RUNNING: dict[str, Any] = {
    "A": 7, "j": "a", "u": "ada", "P": "gpu", "T": "RUNNING", "D": 1, "C": 1, "m": "1M", "l": "1:00:00",
}  # fmt: skip


@dataclass
class FakeSlurm:
    """The programs' folder, and what they know."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.state / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @property
    def jobs(self) -> list[dict[str, Any]]:
        with self._locked():
            return json.loads((self.state / "jobs.json").read_text())

    @jobs.setter
    def jobs(self, records: list[dict[str, Any]]) -> None:
        with self._locked():
            (self.state / "jobs.json").write_text(json.dumps(records))

    @property
    def accounting(self) -> list[dict[str, Any]]:
        with self._locked():
            return json.loads((self.state / "accounting.json").read_text())

    def account(self, *records: dict[str, Any]) -> None:
        with self._locked():
            (self.state / "accounting.json").write_text(json.dumps(records))

    def late(self, jobs: dict[int, str]) -> None:
        """Let squeue's long form lack jobs, as if they had been submitted after it was read.

        Args:
            jobs: By number, `submitted`, or `ended` if squeue does not know them by their numbers either.
        """
        with self._locked():
            (self.state / "late.json").write_text(json.dumps(jobs))

    def calls(self, program: str) -> list[dict[str, Any]]:
        # A program that is just writing its line holds the lock.
        with self._locked():
            lines = (self.state / "calls").read_text().splitlines()
        begin = f"{{'program': {program!r}, "  # a line has all of the environment, and takes long to read
        return [ast.literal_eval(line) for line in lines if line.startswith(begin)]

    def fail(self, program: str, message: str) -> None:
        with self._locked():
            (self.state / f"fail-{program}").write_text(message)

    def heal(self, program: str) -> None:
        (self.state / f"fail-{program}").unlink()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other accounts may enter; pytest's own may not be entered."""
    path = Path(tempfile.mkdtemp(prefix="carme-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def home(folder: Path) -> Path:
    path = folder / "home % of ada"
    path.mkdir()
    os.chown(path, OWNER_UID, OWNER_GID)
    return path


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The accounts `ada` (owner of jobs), `hub` and `daemon` (a system account) exist."""
    entries = {
        "ada": (OWNER_UID, OWNER_GID, str(home)),
        "bob": (54399, 54399, "/nonexistent"),
        "hub": (900, 900, "/"),
        "root": (0, 0, "/root"),
    }

    def named(name: str) -> pwd.struct_passwd:
        uid, gid, directory = entries[name]
        return pwd.struct_passwd((name, "x", uid, gid, "", directory, "/bin/sh"))

    def numbered(uid: int) -> pwd.struct_passwd:
        return named(next((name for name, entry in entries.items() if entry[0] == uid), ""))

    monkeypatch.setattr(account_module, "pwd", SimpleNamespace(getpwnam=named, getpwuid=numbered))


@pytest.fixture(scope="session")
def slurm_program() -> Iterator[str]:
    """The text of a program that is any of Slurm's, by its name.

    It is compiled once: a test starts it some hundred times.
    """
    path = Path(tempfile.mkdtemp(prefix="carme-test-"))
    path.chmod(0o755)
    shutil.copy(Path(__file__).parent / "fake_slurm.py", path)
    py_compile.compile(str(path / "fake_slurm.py"), doraise=True)
    yield f"#!{PYTHON} -IS\nimport sys\nsys.path.insert(0, {str(path)!r})\nimport fake_slurm\n"
    shutil.rmtree(path)


@pytest.fixture
def slurm(folder: Path, slurm_program: str, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    programs = folder / "bin"
    state = programs / "state"
    state.mkdir(parents=True)
    for name in ("squeue", "sbatch", "sacct", "sacctmgr", "scontrol", "scancel", "sinfo"):
        (programs / name).write_text(slurm_program)
        (programs / name).chmod(0o755)
    files = {name: Path(__file__).with_name(f"{name}.txt").read_text() for name in ("nodes", "partitions")}
    files |= {"jobs.json": "[]", "accounting.json": "[]"}
    for name, text in (files | {"calls": "", "lock": ""}).items():
        (state / name).write_text(text)
        (state / name).chmod(0o666)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return FakeSlurm(programs)


@pytest.fixture
def settings(folder: Path) -> Settings:
    images = folder / "images"
    images.mkdir()
    (images / "torch.sif").touch()
    (images / "torch.json").write_text(
        '{"name": "torch", "title": "PyTorch", "entry_points": {"lab": "JupyterLab"}}'
    )
    return Settings.model_validate(
        {
            "site": {"url": "https://carme.example.org"},
            # Each poll starts a Python program: many of them slow down a test that waits for more.
            "slurm": {"cluster": "carme", "poll_seconds": 0.3},
            "broker": {
                "socket": str(folder / "run/broker.sock"),
                "services": ["hub"],
                "minimum_uid": 1000 if OWNER_UID >= 1000 else 1,
                "audit_log": str(folder / "log/audit.jsonl"),
                "state_directory": str(folder / "state"),
            },
            "images": {"directory": str(images)},
            "sessions": {"bind": ["/scratch"]},
        }
    )


@dataclass
class Site:
    """A running broker; `act` says who its peers are from now on."""

    settings: Settings
    slurm: FakeSlurm
    home: Path
    client: AsyncBrokerClient
    peer: Peer
    broker: Broker

    def act(self, name: str, trusted: bool = False) -> None:
        self.peer = Peer(1, UnixAccount.named(name), trusted)

    async def queue(self, jobs: list[dict[str, Any]]) -> None:
        """Let squeue write of these jobs, and wait until the broker has seen them.

        A failed poll has read nothing; on a busy machine a poll may fail by itself.
        """
        watch = self.broker._watch
        self.slurm.jobs = jobs
        # A poll that is under way may have read half of the queue before: squeue is queried twice.
        wanted = watch._polls + 1
        watch.poll_soon()
        async with asyncio.timeout(HANG), watch._polled:
            await watch._polled.wait_for(lambda: watch._finished >= wanted and watch._failure is None)

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.settings.broker.audit_log.read_text().splitlines()]


@pytest.fixture
def line_seconds() -> float:
    """How long the broker waits for a request; for tests to override."""
    return 30.0


@pytest_asyncio.fixture
async def site(
    settings: Settings,
    slurm: FakeSlurm,
    accounts: None,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    line_seconds: float,
) -> AsyncIterator[Site]:
    async with running(settings, slurm, home, monkeypatch, line_seconds) as site:
        yield site


@contextlib.asynccontextmanager
async def running(
    settings: Settings,
    slurm: FakeSlurm,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    line_seconds: float = 30.0,
) -> AsyncIterator[Site]:
    gateway = SlurmCommands(python=PYTHON, cluster="test")
    broker = Broker(settings, gateway, python=PYTHON)
    await broker.prepare()
    site = Site(
        settings,
        slurm,
        home,
        AsyncBrokerClient(settings.broker.socket),
        Peer(1, UnixAccount.named("ada"), trusted=False),
        broker,
    )

    async def identify(*_: object) -> Peer:
        return site.peer

    monkeypatch.setattr(server_module, "identify", identify)
    # On a busy machine the stand-ins for Slurm's programs take longer than the timeout for real ones.
    for limit in (
        "accounting_lookup.ANSWER_SECONDS",
        "preemptions.ANSWER_SECONDS",
        "vanished.ANSWER_SECONDS",
        "files.LOG_SECONDS",
        "watch.CATCH_UP_SECONDS",
    ):
        monkeypatch.setattr(f"carme.broker.{limit}", HANG)
    for limit in ("programs.TIMEOUT", "lookups.IDENTITY_SECONDS", "lookups.ACCOUNT_SECONDS"):
        monkeypatch.setattr(f"carme.slurm.{limit}", HANG)
    work = asyncio.create_task(broker.run())
    async with Server(settings, broker, line_seconds=line_seconds):
        # Wait for the first snapshot of the cluster, as a real client's retry would.
        while True:
            with contextlib.suppress(Exception):
                await site.client.cluster()
                break
            await asyncio.sleep(0.02)
        yield site
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@pytest.fixture
def start(
    settings: Settings, slurm: FakeSlurm, accounts: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], contextlib.AbstractAsyncContextManager[Site]]:
    """Starts a broker; for tests that restart it."""
    return lambda: running(settings, slurm, home, monkeypatch)


@pytest.fixture
def file(settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's configuration, as the command line reads it."""
    path = folder / "carme.toml"
    path.write_text(
        f'[site]\nurl = "{settings.site.url}"\n[slurm]\ncluster = "c"\n'
        f'[broker]\nsocket = "{settings.broker.socket}"\n'
        f'[images]\ndirectory = "{settings.images.directory}"\n'
    )
    monkeypatch.setenv("CARME_CONFIG", str(path))
    return path


async def carme(*arguments: str) -> int:
    """Run the command line with these arguments in a thread beside the broker; return its exit code."""
    return await asyncio.to_thread(main, list(arguments))


@pytest.fixture
def request_() -> JobRequest:
    return JobRequest(name="train 1", kind="batch", command=["python", "train.py"], minutes=30)


@pytest.fixture
def order() -> JobRequest:
    return JobRequest(
        name="train 1",
        kind="session",
        image="torch",
        command=["python", *NASTY],
        environment={"TOKEN": "s3cret"},
        files={"server.key": "s3cret key"},
        gpus_per_node=2,
        gpu_type="a100",
        minutes=30,
    )
