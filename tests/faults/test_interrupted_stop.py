"""A stop of the demo that is killed half-way; part of `./test faults`."""

import os
import signal
import subprocess

import pytest

from demo_site import ROOT, DemoSite, wait_until
from patience import HANG

#: Installing anew takes minutes on a slow machine.
DEPLOYMENT = 20 * HANG

pytestmark = pytest.mark.timeout(DEPLOYMENT + 3 * HANG)  # the suite's own limit is shorter


@pytest.mark.parametrize("stopped", ["carme-broker", "slurmctld", "mariadb"])
def test_the_next_start_repairs_what_a_killed_stop_leaves(demo: DemoSite, stopped: str) -> None:
    """The stop is killed at the end of the service `stopped` of the head."""
    stopping = subprocess.Popen([ROOT / "demo", "down"], start_new_session=True)
    try:
        wait_until(f"{stopped} has stopped", lambda: _state(demo, stopped) != "active")
    finally:
        os.killpg(stopping.pid, signal.SIGKILL)
        stopping.wait()
    started = subprocess.run(
        [ROOT / "demo", "up", "--no-run"], capture_output=True, text=True, timeout=DEPLOYMENT
    )
    assert started.returncode == 0, started.stdout[-4000:] + started.stderr[-4000:]


def _state(demo: DemoSite, unit: str) -> str:
    return demo.run("head", "systemctl", "is-active", unit, check=False).stdout.strip()
