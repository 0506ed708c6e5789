"""A job of two nodes on one host: the agents of nodes n1 and n2."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from patience import HANG

AGENT = [sys.executable, "-m", "carme_runtime.fabric.command"]
RUN = [sys.executable, "-m", "carme_runtime.launcher.command"]


class Job:
    """Agents of nodes n1 and n2. The first has nothing to do but to live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        key, announce = folder / "key", folder / "fabric.json"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        common = ["--key-file", str(key), "--unencrypted"]
        first = [*AGENT, *common, "--nodes", "2", "--listen", "127.0.0.1", "--announce", str(announce)]
        self.start([*first, "--socket", str(self.socket("n1")), "--", "sleep", "600"], SLURMD_NODENAME="n1")
        wait_until(announce.exists)
        join = ["--join", f"127.0.0.1:{json.loads(announce.read_text())['port']}"]
        self._second = [*AGENT, *common, *join, "--socket", str(self.socket("n2"))]
        self.second = self.join()
        wait_until(self.socket("n2").exists)

    def join(self) -> subprocess.Popen[str]:
        """Start the agent of n2, which joins; again, where it was lost."""
        self.second = self.start(self._second, SLURMD_NODENAME="n2")
        return self.second

    def socket(self, host: str) -> Path:
        return self.folder / host / "agent.sock"

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=clean_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def launch(self, *arguments: str, node: str = "n1", **environment: str) -> subprocess.Popen[str]:
        """Start carme-run on a node."""
        return self.start([*RUN, *arguments], CARME_AGENT=str(self.socket(node)), **environment)

    def run(self, *arguments: str) -> str:
        """Run carme-run on n1, and see that it ends well; what it wrote."""
        return finished(self.launch(*arguments))

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()  # an agent passes it on to its command
            process.wait(HANG)
            assert process.stdout
            process.stdout.close()


def clean_environment() -> dict[str, str]:
    """Without a job; every rank has one thread."""
    saved = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CARME"))}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return saved | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0, out
    return out


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
