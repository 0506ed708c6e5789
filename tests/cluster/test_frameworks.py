"""Every backend of carme-run's table on two nodes of the demo, as batch jobs of a user.

The demo's images have few of the frameworks. CARME_FRAMEWORKS names an environment with Python 3.11, as the
image torch has, with carme-runtime and frameworks, in the home of a user of the demo; without it these tests
are left out. MXNet needs one of its own: run them again with it.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from carme_runtime.launcher.backends import BACKENDS
from demo_site import ROOT, DemoSite, wait_until
from patience import HANG

PROGRAM = ROOT / "tests/native/programs/frameworks.py"
# One step from 0 over all four samples, whatever the number of ranks.
WEIGHT = "0.45000"
#: A program for GPI-2 must be compiled with it.
NAMES = [name for name in BACKENDS if name != "gaspi"]
#: Scripts that run once, and find both nodes.
DRIVERS = ["dask", "ray"]

pytestmark = pytest.mark.timeout(11 * HANG)


@pytest.fixture(scope="module")
def environment() -> Path:
    path = os.environ.get("CARME_FRAMEWORKS")
    if not path:
        pytest.skip("CARME_FRAMEWORKS names no environment of Python in the home of a user of the demo")
    return Path(path)


@pytest.fixture
def demo(environment: Path) -> DemoSite:
    """As the user in whose home the environment is."""
    demo = DemoSite()
    owner = demo.run("head", "stat", "--format=%U", str(environment.parent)).stdout.strip()
    demo.user = demo.other = owner
    return demo


@pytest.fixture
def job_name(demo: DemoSite) -> Iterator[str]:
    """Jobs of this name end with the test, also where its limit ends it before it knows their numbers."""
    name = f"carme-test-{secrets.token_hex(4)}"
    yield name
    demo.run("head", "scancel", f"--name={name}", user=demo.user, check=False)
    left = ("squeue", "--noheader", f"--name={name}")
    wait_until("the job is gone", lambda: not demo.run("head", *left).stdout.strip())


@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_on_two_nodes_what_one_process_trains(
    demo: DemoSite, environment: Path, job_name: str, name: str
) -> None:
    program = environment.parent / "carme-test-frameworks.py"
    demo.run("head", "tee", str(program), data=PROGRAM.read_text(), user=demo.user)
    try:
        words = ["--", "python", str(program), name] if name == "mpi" else [str(program), name]
        run = ["carme-run", "--backend", name, "-n", "2", *words]
        path = f"PATH={environment}/bin:/usr/bin:/bin"
        options = ["--json", "--image", "torch", "--nodes", "2", "--time", "15m", "--name", job_name]
        done = demo.carme("submit", *options, "--", "env", path, *run)
        job_id = json.loads(done.stdout)["job_id"]
        message = demo.carme("logs", "--follow", str(job_id), timeout=10 * HANG).stdout
    finally:
        demo.run("head", "rm", "-f", str(program))
    if lacking := re.search(r"--backend \w+ needs .*, which this Python does not have", message):
        pytest.skip(lacking[0])
    count = 1 if name in DRIVERS else 2
    assert re.findall(r"RESULT (\d+) (\S+)", message) == [("2", WEIGHT)] * count, message[-3000:]
