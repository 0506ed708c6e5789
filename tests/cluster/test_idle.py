"""Sessions in which nothing runs are stopped, as the partition's policy says; what computes keeps them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated_gpus

from carme.errors import CarmeError
from carme.sessions import Ending, Session, SessionState
from carme.validation.notebook import NotebookKernel
from demo_site import DemoSite, wait_until
from patience import HANG

pytestmark = pytest.mark.alone

CONFIGURATION = "/etc/carme/carme.toml"
OPTIONS = {"image": "base", "nodes": "1", "gpus_per_node": "1", "minutes": "10"}

#: Where a node finds its GPUs' library, and the file in a user's home that says what their session sees.
DRIVER, GPUS = "/usr/local/lib/simulated-gpus", ".simulated-gpus"
LINKER = "/etc/ld.so.conf.d/simulated-gpus.conf"

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
    assert "[partitions." not in demo.run("head", "cat", CONFIGURATION).stdout
    restart = ("head", "systemctl", "restart", "carme-hub")
    # Among the tables nothing but this one begins so, and it stands last.
    with demo.undoing(("head", "sed", "-i", r"/^\[partitions\.gpu\]$/,$d", CONFIGURATION), restart):
        added = "[partitions.gpu]\nidle_minutes = 1\n"
        demo.run("head", "tee", "--append", CONFIGURATION, data=added)
        demo.run(*restart)
        demo.wait_for_hub()
        yield
        demo.end_all_jobs()
    demo.wait_for_hub()


@pytest.fixture
def gpus(demo: DemoSite, tmp_path: Path) -> Iterator[None]:
    """A driver for the nodes' GPUs: those of user1 do nothing, that of user2 computes."""
    library = simulated_gpus.build(tmp_path, shown=GPUS)
    with contextlib.ExitStack() as stack:
        for node in ("n1", "n2"):
            stack.enter_context(demo.undoing((node, "sh", "-c", f"rm -rf {DRIVER} {LINKER}; ldconfig")))
            simulated_gpus.put(demo, node, library, DRIVER)
            demo.run(node, "sh", "-c", f"echo {DRIVER} >{LINKER}; ldconfig")
        for user, share in (("user1", 0), ("user2", 70)):
            stack.enter_context(demo.undoing(("head", "rm", "-f", f"/home/{user}/{GPUS}")))
            shown = f"gpu uuid=GPU-0 minor=0 util={share}\n"
            demo.run("head", "tee", f"/home/{user}/{GPUS}", user=user, data=shown)
        yield


def test_an_idle_session_is_warned_and_stopped_while_those_that_compute_go_on(
    demo: DemoSite, one_idle_minute: None, gpus: None
) -> None:
    with contextlib.ExitStack() as stack:
        visitor = stack.enter_context(demo.visitor("user1"))
        second_visitor = stack.enter_context(demo.visitor("user2"))
        computing = second_visitor.start(OPTIONS | {"title": "GPU"})
        names = {title: visitor.start(OPTIONS | {"title": title}) for title in ("busy", "run")}
        kernels: dict[str, NotebookKernel] = {}
        for title in ("busy", "run"):
            visitor.wait(names[title], "ready", timeout=HANG)
            kernels[title] = stack.enter_context(visitor.kernel(visitor.open(names[title])))
        # A cell that computes nothing and is not over, and a kernel that is idle while a run of it goes on.
        with pytest.raises(CarmeError, match="still running"):
            kernels["busy"].run("import time; time.sleep(600)", timeout=1)
        assert kernels["run"].run(RUN, timeout=HANG).output.strip() == "None"
        # No kernel at all, and nobody looks: its GPU alone says that something goes on.
        second_visitor.wait(computing, "ready", timeout=HANG)
        names["idle"] = visitor.start(OPTIONS | {"title": "idle"})
        visitor.wait(names["idle"], "ready", timeout=HANG)
        server = visitor.open(names["idle"])

        def reported(name: str, user: str = "user1") -> Session:
            return Session.model_validate(demo.carme_json("session", "show", name, user=user))

        def warning() -> Session | None:
            session = reported(names["idle"])
            return session if session.stops_idle else None

        # The warning, wherever the owner may look.
        warned = wait_until("the broker reports the warning", warning)
        assert warned.state is SessionState.READY
        page = wait_until(
            "the page shows it",
            lambda: "it is stopped in" in (page := visitor.session(names["idle"])).text and page,
        )
        assert page.state == "ready" and "Nothing runs in it: it is stopped in" in page.text
        shown = demo.carme("session", "show", names["idle"]).stdout
        assert "it is idle and will be stopped in" in shown
        panel = visitor.http.get(f"{server}carme/status").json()
        assert panel["idle_minutes"] == 1
        assert panel["stops_idle"]

        page = visitor.wait(names["idle"], "ended", timeout=HANG)
        assert page.label == "Ended because it was idle"
        assert "was stopped because nothing ran in it; start it again" in page.text
        assert reported(names["idle"]).ending is Ending.IDLE

        for saved in reported(names["busy"]), reported(names["run"]), reported(computing, "user2"):
            assert saved.state is SessionState.READY
            assert (saved.idle_since, saved.stops_idle) == (None, None)
        assert kernels["run"].run("print(run.poll())", timeout=HANG).output.strip() == "None"
