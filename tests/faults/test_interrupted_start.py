"""A start during which the service is killed that has just got the request; part of `./test faults`."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from carme.errors import CarmeError
from demo_site import DemoSite, wait_until
from patience import HANG

START = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "10", "title": "Interrupted"}


@pytest.mark.parametrize("unit", ["carme-hub", "carme-proxy", "carme-sync", "carme-broker"])
@pytest.mark.parametrize("later", [0.0, 0.1, 0.2, 0.4])
def test_the_session_becomes_ready_and_has_one_job(demo: DemoSite, unit: str, later: float) -> None:
    """`later`: seconds from the form's sending to the kill; some of these meet the request on its way."""
    with demo.visitor("user1") as visitor, ThreadPoolExecutor(1) as threads:
        starting = threads.submit(visitor.start, START)
        time.sleep(later)
        demo.run("head", "systemctl", "kill", "--signal=KILL", "--kill-whom=main", unit)
        try:
            name = starting.result()
        except CarmeError as refusal:
            # The form's own question met no broker: it says so at once, and nothing was begun.
            assert unit == "carme-broker" and "The broker at" in str(refusal), refusal
            wait_until("the broker is back", lambda: demo.carme("status", check=False).returncode == 0)
            assert not demo.carme_json("jobs")
            return
        visitor.wait(name, "ready", timeout=HANG)
        words = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", "--user=user1"]
        words += [f"--name=session-{name}", "--format=JobIDRaw"]
        # The accounting gets jobs some time after they have begun.
        listed = wait_until("accounting has the job", lambda: demo.run("head", *words).stdout.split())
        assert len(listed) == 1
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
