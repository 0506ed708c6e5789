"""Every framework of carme-run's table that needs no build of its own, over a job of two nodes on one host.

What the environment lacks is left out, and reported: ./test native installs what can be had for its Python.
"""

import importlib.util
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_gpi2

from carme_runtime.launcher import backends
from patience import HANG

from .conftest import PROGRAMS
from .two_agents import RUN, Job, clean_environment, finished

# One step from 0 over all four samples: 0.01 * 2 * 3 * (1 + 4 + 9 + 16) / 4
WEIGHT = "0.45000"

pytestmark = pytest.mark.timeout(3 * HANG)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def need(name: str) -> None:
    if lacking := backends.missing(name):
        pytest.skip(f"{', '.join(lacking)} is not installed in this environment")


def results(out: str) -> list[tuple[str, str]]:
    return re.findall(r"RESULT (\d+) (\S+)", out)


RANKS = ["torch", "tensorflow", "jax", "accelerate", "lightning", "deepspeed"]
DRIVERS = {"dask": ["-n", "2"], "ray": ["-n", "2"]}


@pytest.mark.parametrize("name", RANKS)
def test_a_script_trains_on_two_nodes_what_one_process_trains(job: Job, name: str) -> None:
    need(name)
    out = job.run("--backend", name, "-n", "2", str(PROGRAMS / "frameworks.py"), name)
    assert results(out) == [("2", WEIGHT)] * 2, out


def test_a_program_for_gpi2_itself_trains_on_two_nodes(job: Job, tmp_path: Path) -> None:
    program = real_gpi2.compiled(tmp_path / "step")
    out = job.run("--backend", "gaspi", "-n", "2", "--", str(program))
    assert results(out) == [("2", WEIGHT)] * 2, out


KERAS_3 = """
import keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = tf.constant([1.0, 2.0])[:, None]
model.fit(tf.data.Dataset.from_tensor_slices((x, x)).batch(2), verbose=0)
"""


def test_what_keras_3_cannot_do_is_refused_with_a_sentence(job: Job) -> None:
    need("tensorflow")
    pytest.importorskip("keras")
    run = job.launch("--backend", "tensorflow", "-n", "2", "--", sys.executable, "-c", KERAS_3)
    out, _ = run.communicate(timeout=2 * HANG)
    assert run.returncode == 1, out
    assert "Keras 3 cannot train with MultiWorkerMirroredStrategy. Use tf.keras" in out, out


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
def test_mxnet_trains_on_two_nodes_with_a_python_of_its_own(job: Job, store: str) -> None:
    """Its NumPy is one that the others cannot use."""
    python = Path(sys.prefix) / "mxnet/bin/python"
    if not python.exists():
        pytest.skip("MXNet needs Python 3.11 at most, for which ./test native makes it an environment")
    script = [str(PROGRAMS / "frameworks.py"), "mxnet", store]
    command = [str(python), *RUN[1:], "--backend", "mxnet", "-n", "2", *script]
    run = job.start(command, CARME_AGENT=str(job.socket("n1")), PYTHONPATH="")
    assert results(finished(run)) == [("2", WEIGHT)] * 2


@pytest.mark.parametrize("name", DRIVERS)
def test_a_script_finds_the_workers_on_two_nodes(job: Job, name: str) -> None:
    need(name)
    out = job.run("--backend", name, *DRIVERS[name], str(PROGRAMS / "frameworks.py"), name)
    assert results(out) == [("2", WEIGHT)], out


def test_outsiders_are_not_served_by_dask(job: Job) -> None:
    need("dask")
    text = (
        "import os, socket\n"
        "host, port = os.environ['DASK_SCHEDULER_ADDRESS'][len('tls://'):].split(':')\n"
        f"plain = socket.create_connection((host, int(port)), {HANG})\n"
        "plain.sendall(bytes(64))\n"
        "try: answer = plain.recv(1000)\n"
        "except ConnectionResetError: answer = b''\n"
        "print('ANSWER', answer[:1] in (b'', bytes([21])))"
    )
    out = job.run("--backend", "dask", "-n", "1", "--", sys.executable, "-c", text)
    assert "ANSWER True" in out  # the end, or an alert of TLS


PAGES = """
import http.client, os, pathlib, socket
import psutil
from distributed import Client

def listening():
    return [each.laddr.port for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]

with Client() as client:
    print("LINK", client.dashboard_link)
    print("PORTS", client.run_on_scheduler(listening) == [int(client.scheduler.address.rpartition(":")[2])])
    for path in sorted(pathlib.Path("/tmp/carme-" + os.environ["SLURM_JOB_ID"]).glob("apps/*.sock")):
        page = http.client.HTTPConnection("session")
        page.sock = socket.socket(socket.AF_UNIX)
        page.sock.connect(str(path))
        page.request("GET", "/status")
        text = page.getresponse().read().decode()
        print("PAGE", path.name, oct(path.stat().st_mode & 0o777), "bokeh" in text)
"""


@pytest.mark.parametrize("in_a_session", [True, False])
def test_dasks_pages_are_behind_the_sessions_login_alone(job: Job, in_a_session: bool) -> None:
    need("dask")
    if not importlib.util.find_spec("bokeh"):
        pytest.skip("bokeh is not installed in this environment")
    session = f"test-{secrets.token_hex(4)}"
    folder = Path(f"/tmp/carme-{session}")
    if in_a_session:
        (folder / "apps").mkdir(parents=True)
        (folder / "apps").chmod(0o700)
    variables = {
        "SLURM_JOB_ID": session,
        "SLURMD_NODENAME": "n1",
        "JUPYTERHUB_SERVICE_PREFIX": "/jupyter/user/ann/first/",
    }
    try:
        run = job.launch("--backend", "dask", "-n", "1", "--", sys.executable, "-c", PAGES, **variables)
        out = finished(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert "PORTS True" in out, out  # nothing answers HTTP to other users of the node
    pages = re.findall("PAGE (.*)", out)
    if in_a_session:
        assert "LINK /jupyter/user/ann/first/app/dask/status" in out and pages == ["dask.sock 0o600 True"], (
            out
        )
    else:
        assert re.search("LINK *\n", out) and not pages, out


def test_a_worker_that_fails_ends_the_run(job: Job) -> None:
    need("dask")
    text = (
        "from distributed import Client; import os, time; client = Client();"
        "client.submit(os._exit, 7, retries=0); time.sleep(600)"
    )
    run = job.start(
        [*RUN, "--backend", "dask", "-n", "2", "--", sys.executable, "-c", text],
        CARME_AGENT=str(job.socket("n1")),
    )
    out, _ = run.communicate(timeout=HANG)
    assert run.returncode == 1, out
    assert re.search(r"carme-run: A worker of Dask on n[12] ended with exit code 7\.", out), out


@pytest.mark.parametrize("name", RANKS)
def test_outside_of_jobs(tmp_path: Path, name: str) -> None:
    need(name)
    script = str(PROGRAMS / "frameworks.py")
    run = subprocess.Popen(
        [*RUN, "--backend", name, "-n", "2", script, name],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with run:
        out = finished(run)
    assert results(out) == [("2", WEIGHT)] * 2, out
