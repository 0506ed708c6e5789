"""The backend `carme` on GPU tensors. Needs a GPU, and carme_runtime built with its native core."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("There is no GPU.", allow_module_level=True)


def run(ranks: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("staged.py"))],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    return outputs


def test_one_rank_with_its_own_gpu_uses_nccl():
    (output,) = run(1)
    assert "over NCCL" in output


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="With several GPUs the two ranks have one each.")
def test_ranks_that_share_a_gpu_are_staged_through_host_memory():
    outputs = run(2)
    assert all("over host memory" in output for output in outputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="Needs two GPUs.")
def test_ranks_with_a_gpu_each_use_nccl():
    assert all("over NCCL" in output for output in run(2))
