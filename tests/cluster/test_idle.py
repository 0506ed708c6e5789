"""Sessions in which nothing runs are stopped, as the partition's policy says; what computes keeps them."""

import contextlib
from collections.abc import Iterator

import pytest

from carme.errors import CarmeError
from carme.sessions import Ending, Session, SessionState
from carme.validation.notebook import NotebookKernel
from demo_site import DemoSite, wait_until

CONFIGURATION = "/etc/carme/carme.toml"
OPTIONS = {"image": "base", "nodes": "1", "gpus_per_node": "1", "minutes": "10"}

#: A run whose rank only sleeps: its launcher alone says that it goes on.
RUN = """
import subprocess, time
run = subprocess.Popen(["carme-run", "-n", "1", "--", "sleep", "600"], start_new_session=True)
time.sleep(2)
print(run.poll())
"""


@pytest.fixture
def one_idle_minute(demo: DemoSite) -> Iterator[None]:
    """The policy of the partition, while the hub runs with it; warned as soon as that can be."""
    kept = demo.run("head", "cat", CONFIGURATION).stdout
    assert "[partitions." not in kept
    with contextlib.ExitStack() as stack:

        def configure(text: str) -> None:
            demo.run("head", "tee", CONFIGURATION, data=text)
            demo.run("head", "systemctl", "restart", "carme-hub")
            demo.wait_for_hub()

        stack.callback(configure, kept)
        configure(f"{kept}\n[partitions.gpu]\nidle_minutes = 1\n")
        yield
        demo.end_all_jobs()


def test_an_idle_session_is_warned_and_stopped_while_those_that_compute_go_on(
    demo: DemoSite, one_idle_minute: None
) -> None:
    with contextlib.ExitStack() as stack:
        visitor = stack.enter_context(demo.visitor("user1"))
        names = {title: visitor.start(OPTIONS | {"title": title}) for title in ("idle", "busy", "run")}
        kernels: dict[str, NotebookKernel] = {}
        for title in ("busy", "run"):
            visitor.wait(names[title], "ready", timeout=120)
            kernels[title] = stack.enter_context(visitor.kernel(visitor.open(names[title])))
        # A cell that computes nothing and is not over, and a kernel that is idle while a run of it goes on.
        with pytest.raises(CarmeError, match="still running"):
            kernels["busy"].run("import time; time.sleep(600)", timeout=1)
        assert kernels["run"].run(RUN, timeout=30).output.strip() == "None"
        visitor.wait(names["idle"], "ready", timeout=120)
        server = visitor.open(names["idle"])

        def told(title: str) -> Session:
            return Session.model_validate(demo.carme_json("session", "show", names[title]))

        # The warning, wherever the owner may look.
        warned = wait_until("the broker tells the warning", lambda: (s := told("idle")).stops_idle and s, 90)
        assert warned.state is SessionState.READY
        page = visitor.session(names["idle"])
        assert page.state == "ready"
        assert "Nothing runs in it: it is stopped in" in page.text
        shown = demo.carme("session", "show", names["idle"]).stdout
        assert "it is idle and will be stopped in" in shown
        panel = visitor.http.get(f"{server}carme/status").json()
        assert panel["idle_minutes"] == 1
        assert panel["stops_idle"]

        page = visitor.wait(names["idle"], "ended", timeout=120)
        assert page.label == "Ended because it was idle"
        assert "was stopped because nothing ran in it; start it again" in page.text
        assert told("idle").ending is Ending.IDLE

        for title in ("busy", "run"):
            kept = told(title)
            assert kept.state is SessionState.READY, title
            assert (kept.idle_since, kept.stops_idle) == (None, None), title
        assert kernels["run"].run("print(run.poll())", timeout=30).output.strip() == "None"
