"""Scripts for Horovod itself, started by carme-run in a job of two nodes: two agents on one host.

Without Horovod these tests are left out: ./test builds it where Open MPI's headers are.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from patience import HANG

from .conftest import PROGRAMS
from .two_agents import RUN, Job, wait_until

if not importlib.util.find_spec("horovod"):
    pytest.skip("Horovod is not installed in this environment", allow_module_level=True)

HOROVOD = ("--backend", "horovod")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def test_the_same_with_tensorflow(job: Job) -> None:
    script = str(PROGRAMS / "horovod_itself_tensorflow.py")
    for name, ranks in (("one", "1"), ("four", "4")):
        run = job.launch(*HOROVOD, "-n", ranks, script, str(job.folder / f"{name}.npz"))
        out, _ = run.communicate(timeout=HANG)
        assert run.returncode == 0, out
    first, four = (np.load(job.folder / f"{name}.npz") for name in ("one", "four"))
    assert four["places"][:, :2].tolist() == [[0, 4], [1, 4], [2, 4], [3, 4]]
    assert (four["weights"] == four["weights"][0]).all()
    np.testing.assert_allclose(four["weights"][0], first["weights"][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_an_unmodified_script_trains_on_two_nodes_what_one_process_trains(job: Job, node: str) -> None:
    script = str(PROGRAMS / "horovod_itself.py")
    for name, ranks in (("one", "1"), ("two", "2"), ("four", "4")):
        run = job.launch(*HOROVOD, "-n", ranks, script, str(job.folder / name), node=node)
        out, _ = run.communicate(timeout=HANG)
        assert run.returncode == 0, out
    first, two, four = (torch.load(job.folder / name) for name in ("one", "two", "four"))
    # rank, size, local rank and size, cross rank and size
    assert first["places"] == [(0, 1, 0, 1, 0, 1)]
    assert two["places"] == [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]
    assert four["places"] == [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    for several in (two, four):
        assert all(torch.equal(weights, several["weights"][0]) for weights in several["weights"])
        torch.testing.assert_close(several["weights"][0], first["weights"][0], rtol=1e-5, atol=1e-6)


PORT_AND_WAIT = """
import os, time
print(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], flush=True)
time.sleep(600)
"""


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=HANG).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_the_server_is_on_one_address_and_ends_with_the_run(job: Job, node: str, end: signal.Signals) -> None:
    run = job.launch(*HOROVOD, "-n", "2", "--", sys.executable, "-c", PORT_AND_WAIT, node=node)
    assert run.stdout
    address, port = run.stdout.readline().rpartition("] ")[2].split()
    assert address == "127.0.0.1"
    assert listens(address, int(port))
    assert not listens("127.0.0.2", int(port))
    run.send_signal(end)
    run.wait(HANG)
    wait_until(lambda: not listens(address, int(port)))


def test_outside_of_jobs(tmp_path: Path) -> None:
    script = str(PROGRAMS / "horovod_itself.py")
    environment = {name: value for name, value in os.environ.items() if name != "CARME_AGENT"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    run = subprocess.run(
        [*RUN, *HOROVOD, "-n", "2", script, "trained"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert run.returncode == 0, run.stderr
    assert torch.load(tmp_path / "trained")["places"] == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def test_a_rank_that_fails_ends_the_others(job: Job) -> None:
    text = "import horovod.torch as hvd, time; hvd.init(); time.sleep(600 * hvd.rank()); raise SystemExit(3)"
    run = job.launch(*HOROVOD, "-n", "2", "--", sys.executable, "-c", text)
    out, _ = run.communicate(timeout=HANG)
    assert run.returncode == 3, out
    assert "Rank 0 on n1 ended with exit code 3, so the others were stopped." in out


def run_here(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with `folder` first among the places of modules."""
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=HANG
    )


@pytest.mark.parametrize("module", ["horovod.keras", "horovod.tensorflow.keras"])
def test_horovods_wrapper_for_keras_is_refused(module: str, tmp_path: Path) -> None:
    done = run_here(f"import os; os.environ['KERAS_BACKEND'] = 'torch'; import {module}", tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "silently does not average gradients" in done.stderr
    assert "Use carme_runtime.keras instead" in done.stderr


def test_the_wrapper_is_not_refused_for_keras_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    done = run_here("import horovod.tensorflow.keras as hvd; hvd.init(); print(hvd.size())", tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
