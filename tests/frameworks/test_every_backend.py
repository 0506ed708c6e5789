"""Every backend of carme-run's table on two nodes of the demo, as batch jobs and in a session of a user.

The demo's images have few of the frameworks. CARME_FRAMEWORKS names an environment of Python in the home of a
user, which tests/install_frameworks.py makes; MXNet needs the image mxnet, and GPI-2 the folder that
CARME_GPI2 names. What is not there is left out.
"""

import base64
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_gpi2

from carme.validation import NotebookKernel, Visitor
from carme_runtime.launcher.backends import BACKENDS
from demo_site import ROOT, DemoSite, wait_until
from patience import HANG

PROGRAM = ROOT / "tests/native/programs/frameworks.py"
# One step from 0 over all four samples, whatever the number of ranks.
WEIGHT = "0.45000"
#: Those of scripts; programs for GPI-2 are compiled.
NAMES = [name for name in BACKENDS if name != "gaspi"]
#: Scripts that run once, and find both nodes.
DRIVERS = ["dask", "ray"]
LACKING = re.compile(r"--backend \w+ needs .*, which this Python does not have|Horovod is not installed")

pytestmark = pytest.mark.timeout(15 * HANG)


@pytest.fixture(scope="module")
def environment() -> Path:
    path = os.environ.get("CARME_FRAMEWORKS")
    if not path:
        pytest.skip("CARME_FRAMEWORKS names no environment of Python in the home of a user of the demo")
    return Path(path)


@pytest.fixture
def demo(environment: Path) -> DemoSite:
    """As the user in whose home the environment is, with a password that is new."""
    demo = DemoSite()
    owner = demo.run("head", "stat", "--format=%u %U", str(environment.parent)).stdout.split()
    demo.user = demo.second_user = owner[1]
    demo.onboard(owner[1], int(owner[0]))
    return demo


@pytest.fixture
def job_name(demo: DemoSite) -> Iterator[str]:
    """Jobs of this name end with the test, also where its limit ends it before it knows their numbers."""
    name = f"carme-test-{secrets.token_hex(4)}"
    yield name
    demo.run("head", "scancel", f"--name={name}", user=demo.user, check=False)
    left = ("squeue", "--noheader", f"--name={name}")
    wait_until("the job is gone", lambda: not demo.run("head", *left).stdout.strip())


@pytest.fixture
def program(demo: DemoSite, environment: Path) -> Iterator[Path]:
    path = environment.parent / f"carme-test-frameworks-{secrets.token_hex(4)}.py"
    demo.run("head", "tee", str(path), data=PROGRAM.read_text(), user=demo.user)
    yield path
    demo.run("head", "rm", "-f", str(path))


def image_of(demo: DemoSite, name: str) -> str:
    if name != "mxnet":
        return "torch"
    if demo.run("head", "test", "-f", "/srv/carme/images/mxnet.sif", check=False).returncode:
        pytest.skip("the image mxnet is not built here; ./demo up --images mxnet builds it")
    return "mxnet"


@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_on_two_nodes_what_one_process_trains(
    demo: DemoSite, environment: Path, job_name: str, program: Path, name: str
) -> None:
    image = image_of(demo, name)
    words = ["--", "python", str(program), name] if name == "mpi" else [str(program), name]
    run = ["carme-run", "--backend", name, "-n", "2", *words]
    if image == "torch":
        run = ["env", f"PATH={environment}/bin:/usr/bin:/bin", *run]
    options = ["--json", "--image", image, "--nodes", "2", "--time", "20m", "--name", job_name]
    done = demo.carme("submit", *options, "--", *run)
    job_id = json.loads(done.stdout)["job_id"]
    message = demo.carme("logs", "--follow", str(job_id), timeout=14 * HANG).stdout
    if lacking := LACKING.search(message):
        pytest.skip(lacking[0])
    count = 1 if name in DRIVERS else 2
    assert re.findall(r"RESULT (\d+) (\S+)", message) == [("2", WEIGHT)] * count, message[-3000:]


def test_a_program_for_gpi2_itself_trains_on_two_nodes(
    demo: DemoSite, environment: Path, job_name: str, tmp_path: Path
) -> None:
    content = base64.b64encode(real_gpi2.compiled(tmp_path / "step").read_bytes()).decode()
    path = environment.parent / f"carme-test-gpi2-{secrets.token_hex(4)}"
    demo.run("head", "sh", "-c", f"base64 -d >{path} && chmod 755 {path}", data=content, user=demo.user)
    run = ["carme-run", "--backend", "gaspi", "-n", "2", "--", str(path)]
    options = ["--json", "--image", "torch", "--nodes", "2", "--time", "10m", "--name", job_name]
    try:
        job_id = json.loads(demo.carme("submit", *options, "--", *run).stdout)["job_id"]
        message = demo.carme("logs", "--follow", str(job_id), timeout=2 * HANG).stdout
    finally:
        demo.run("head", "rm", "-f", str(path))
    assert re.findall(r"RESULT (\d+) (\S+)", message) == [("2", WEIGHT)] * 2, message[-3000:]


DASHBOARD = """
import time
from distributed import Client
with Client() as client:
    print("LINK", client.dashboard_link, len(client.scheduler_info()["workers"]), flush=True)
    time.sleep(1200)
"""


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_notebook_starts_it_over_the_nodes_of_its_session(
    demo: DemoSite, environment: Path, program: Path, name: str
) -> None:
    with demo.visitor(demo.user) as visitor:
        options = {"nodes": "2", "gpus_per_node": "0", "minutes": "30", "title": "Backends", "image": "torch"}
        session = visitor.start(options)
        visitor.wait(session, "ready", timeout=2 * HANG)
        try:
            server = visitor.open(session)
            with visitor.kernel(server) as kernel:
                run = f"{environment}/bin/carme-run --backend {name} -n 2"
                cell = kernel.run(f"!{run} {program} {name}", timeout=8 * HANG)
                assert re.findall(r"RESULT (\d+) (\S+)", cell.output) == [("2", WEIGHT)], cell.output
                if name == "dask":
                    dashboard(kernel, visitor, server, run)
        finally:
            visitor.stop(session)
            visitor.wait(session, "ended", timeout=2 * HANG)


def dashboard(kernel: NotebookKernel, visitor: Visitor, server: str, run: str) -> None:
    """Dask's pages are behind the session's login, as long as the run lasts."""
    begin = f"""
import pathlib, subprocess
pathlib.Path("dashboard.py").write_text({DASHBOARD!r})
running = subprocess.Popen({run.split()!r} + ["dashboard.py"], stdout=subprocess.PIPE, text=True)
print(next(line for line in running.stdout if "LINK" in line))
"""
    cell = kernel.run(begin, timeout=8 * HANG)
    link = re.search(r"LINK (\S+/app/dask/status) 2", cell.output)
    assert link and server.endswith(link[1].removesuffix("app/dask/status")), cell.output + cell.error
    page = visitor.fetch(f"{server}app/dask/status")
    assert page.status_code == 200 and "Dask" in page.text, page.text[:500]
    workers = visitor.fetch(f"{server}app/dask/info/main/workers.html")
    assert workers.status_code == 200 and workers.text.count("tls://") >= 2, workers.text[:2000]
    kernel.run("running.terminate(); print(running.wait())", timeout=HANG)
    kernel.run("pathlib.Path('dashboard.py').unlink()", timeout=HANG)
    assert visitor.fetch(f"{server}app/dask/status").status_code >= 400
