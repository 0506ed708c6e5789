"""Programs run as real ranks: on one node, or on nodes that addresses of the loopback network stand for."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from free_ports import free_port

# A core that cannot be imported fails the suite here, instead of leaving it empty.
import carme_runtime._core  # noqa: F401
from memory_cgroups import cgroup  # noqa: F401  # a fixture
from patience import HANG

PROGRAMS = Path(__file__).parent / "programs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, help="how often ranks and processes are killed in tests of it")


@dataclass
class Ranks:
    """Ranks of one program."""

    processes: list[subprocess.Popen[str]]
    outputs: dict[int, str] = field(default_factory=dict)

    def finish(self, seconds: float = 3 * HANG) -> list[int]:
        """Wait for all, return their exit codes. On a busy machine they import PyTorch for minutes."""
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank not in self.outputs:
                self.outputs[rank] = process.communicate(timeout=max(end - time.monotonic(), 0.1))[0]
        return [process.returncode for process in self.processes]

    def finish_after(self, text: str, action: Callable[[], object], seconds: float = 3 * HANG) -> list[int]:
        """Do something as soon as a rank prints a text, then wait for all and return their exit codes."""
        printed = threading.Event()

        def read(rank: int, process: subprocess.Popen[str]) -> None:
            assert process.stdout
            for line in process.stdout:
                self.outputs[rank] = self.outputs.get(rank, "") + line
                if text in line:
                    printed.set()

        readers = [
            threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(self.processes)
        ]
        for reader in readers:
            reader.start()
        assert printed.wait(seconds), f"No rank has printed '{text}': {self.output()}"
        action()
        for reader in readers:
            reader.join(seconds)
        return [process.wait(seconds) for process in self.processes]

    def output(self) -> str:
        return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(self.outputs.items()))


class Launcher:
    def __init__(self, key_file: Path) -> None:
        self.key_file = key_file
        self.started: list[subprocess.Popen[str]] = []
        self.variables: dict[str, str] = {}  # of all ranks
        self.cores: set[int] | None = None  # on which all ranks run; None: on any
        self.preload = ""  # a module that installed packages announce to the program's libraries

    def start(
        self,
        program: str,
        nodes: list[int],
        *arguments: str,
        port: int | None = None,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
    ) -> Ranks:
        """Start `program` with one rank per entry of `nodes`, on the node that it numbers."""
        port = port or free_port()
        processes = []
        for rank, node in enumerate(nodes):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": str(nodes[:rank].count(node)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CARME_ADDRESS": f"127.0.0.{node + 1}",
                "OMP_NUM_THREADS": "1",
            }
            if len(set(nodes)) > 1:
                own["CARME_KEY_FILE"] = str(self.key_file)
            processes.append(
                subprocess.Popen(
                    self._command(PROGRAMS / f"{program}.py", arguments),
                    env=os.environ | own | self.variables | environment(rank),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=self._pin if self.cores else None,
                )
            )
        self.started += processes
        return Ranks(processes)

    def _pin(self) -> None:
        os.sched_setaffinity(0, self.cores or ())

    def _command(self, program: Path, arguments: tuple[str, ...]) -> list[str]:
        if not self.preload:
            return [sys.executable, str(program), *arguments]
        loader = (
            f"import runpy, sys, {self.preload}; sys.argv.pop(0); "
            "runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        return [sys.executable, "-c", loader, str(program), *arguments]

    def run(self, program: str, nodes: list[int], *arguments: str) -> Ranks:
        """Start, wait, and see that all ranks ended well."""
        ranks = self.start(program, nodes, *arguments)
        codes = ranks.finish()
        assert codes == [0] * len(nodes), ranks.output()
        return ranks


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    monkeypatch.setenv("PYTHONPATH", path)
    launcher = Launcher(key)
    yield launcher
    for process in launcher.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()
