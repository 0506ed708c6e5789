"""The kernel of job images, started as JupyterLab starts it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from patience import HANG

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelManager]:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'spawner/src'}:{ROOT / 'carme/src'}")
    manager = KernelManager(transport="ipc", connection_file=str(tmp_path / "kernel.json"))
    command = [sys.executable, "-m", "carme_spawner.singleuser.kernel", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=command, language="python", display_name="Python")
    manager.start_kernel(cwd=str(tmp_path))
    yield manager
    manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str) -> str:
    """What a cell prints."""
    printed: list[str] = []

    def collect(message: dict) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=collect, timeout=HANG)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


def test_a_kernel_without_ports_prints_output_of_forked_processes(
    kernel: KernelManager, tmp_path: Path
) -> None:
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=HANG)
    assert run(client, "print(6 * 7)") == "42\n"
    forked = "import os\nif not os.fork():\n    print('from a fork', flush=True)\n    os._exit(0)\nos.wait()"
    printed = run(client, forked)
    while "from a fork" not in printed:  # it may come after the cell's end
        message = client.get_iopub_msg(timeout=HANG)
        printed += message["content"].get("text", "")
    process = psutil.Process(int(run(client, "print(os.getpid())")))
    listening = [c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert listening == []
    assert [folder.stat().st_mode & 0o077 for folder in tmp_path.glob("output-*")] == [0]
    client.stop_channels()
