"""`./dev`: a site on this computer, from its start to its end, as a developer meets it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port

from patience import HANG

DEV = Path(__file__).resolve().parents[3] / "dev"
#: A file that each start needs, as Python has compiled it.
COMPILED = Path(
    os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
    f"carme/bytecode{DEV.parent}/carme/src/carme/sandbox",
    f"supervisor.{sys.implementation.cache_tag}.pyc",
)


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition returns a true value; return that."""
    end = time.monotonic() + HANG
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"It never came to this: {what}")


class Dev:
    """A running `./dev`, and what it has written."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        # A shell that starts something in the background has it ignore Ctrl-C.
        command = ["env", "--default-signal=INT", "--unset=PYTHONDONTWRITEBYTECODE", str(DEV)]
        command += ["--port", str(self.port), *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        """The first line with this text."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError("".join(self.lines))

    def stop(self) -> int:
        """Press Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=HANG)
        self.lines.append(output)
        return self.process.returncode


class Browser(httpx.Client):
    """A browser at the portal."""

    def token(self, page: str) -> str:
        """The token in a page's forms."""
        return self.get(page).text.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]

    def submit(self, page: str, to: str = "", **fields: str) -> httpx.Response:
        """Open a page, and send a form on it, to that page or to another address."""
        values = {"csrfmiddlewaretoken": self.token(page), **fields}
        return self.post(to or page, data=values, headers={"origin": str(self.base_url).rstrip("/")})


def processes_of(folder: str) -> list[str]:
    """The command lines of what was started for a sandbox."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"CARME_SANDBOX={folder}".encode() in file.read_bytes().split(b"\0"):
                found.append((file.parent / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.fixture
def dev(request: pytest.FixtureRequest) -> Iterator[Dev]:
    COMPILED.unlink(missing_ok=True)
    running = Dev(*getattr(request, "param", ()))
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.communicate(timeout=HANG)


@pytest.mark.parametrize("dev", [["--no-sessions"]], indirect=True)
def test_dev_runs_a_job_after_a_login_and_leaves_nothing(dev: Dev) -> None:
    with logged_in(dev) as (browser, folder):
        assert httpx.get(f"{browser.base_url}/jobs/").headers["location"].startswith("/accounts/login/")
        eventually(lambda: "vision" in browser.get("/projects/").text, "there is a project")
        eventually(lambda: "Group meeting" in browser.get("/bookings/").text, "there is a booking")
        eventually(lambda: "train-resnet" in browser.get("/jobs/").text, "there are jobs of the past")
        script = "#!/bin/sh\necho here is $USER with GPU $CUDA_VISIBLE_DEVICES\n"
        answer = browser.submit(
            "/jobs/submit/", script=script, name="first", gpus_per_node="1", nodes="1", minutes="5"
        )
        assert answer.status_code == 302, answer.text
        # It leads to a page that waits until the portal knows the job.
        job = answer.headers["location"].removesuffix("new/")
        eventually(lambda: "here is ada with GPU 0" in browser.get(job).text, "the log is there")
        eventually(lambda: "Exit code" in browser.get(job).text, "the job is over")
    assert len(processes_of(folder)) >= 3
    assert COMPILED.exists(), "or each start would compile all that its services import"
    assert dev.stop() == 0, "".join(dev.lines)
    assert processes_of(folder) == []
    assert not Path(folder).exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", dev.port)) != 0


@pytest.mark.parametrize("dev", [["--no-sessions"]], indirect=True)
def test_a_folder_becomes_a_dataset(dev: Dev) -> None:
    with logged_in(dev) as (browser, folder):
        digits = Path(folder, "homes/ada/digits")
        digits.mkdir()
        (digits / "one").write_bytes(b"1")
        fields = {"name": "digits", "path": str(digits), "title": "Digits"}
        answer = eventually(
            lambda: (
                found if (found := browser.submit("/datasets/add/", **fields)).status_code == 302 else None
            ),
            "the job that adds it is submitted",
        )
        job = answer.headers["location"]
        ended = eventually(
            lambda: found if "Exit code" in (found := browser.get(job, follow_redirects=True).text) else "",
            "the job is over",
        )
        assert "digits has version" in ended, ended
        assert f"<code>{digits}</code>" in browser.get("/datasets/").text
    assert dev.stop() == 0, "".join(dev.lines)


@contextlib.contextmanager
def logged_in(dev: Dev) -> Iterator[tuple[Browser, str]]:
    """The browser of ada, and the folder of the sandbox."""
    address = re.search(r"http://\S+", dev.until("portal is ready"))
    assert address is not None
    password = dev.until(" ada ").split()[1]
    folder = dev.until("Files: ").split()[1]
    with Browser(base_url=address[0], timeout=HANG) as browser:
        answer = browser.submit("/accounts/login/", login="ada", password=password)
        assert answer.status_code == 302, answer.text
        yield browser, folder


def test_a_session_is_a_jupyterlab_of_this_computer(dev: Dev) -> None:
    with logged_in(dev) as (browser, folder):
        fields = {"image": "local", "nodes": "1", "gpus_per_node": "0", "minutes": "30"}
        answer = eventually(
            lambda: (
                found
                if (found := browser.submit("/", "/sessions/start/", **fields)).status_code == 302
                else None
            ),
            "a session can be started",
        )
        name = answer.headers["location"].strip("/").rpartition("/")[2]
        state = eventually(
            lambda: found if "ready" in (found := browser.get(f"/sessions/{name}/state/").text) else "",
            "the session is ready",
        )
        assert "ready" in state
        lab = browser.get(f"/jupyter/user/ada/{name}/lab", follow_redirects=True)
        assert lab.status_code == 200 and "jupyter-config-data" in lab.text
    assert any("carme_spawner.singleuser" in line for line in processes_of(folder))
    assert dev.stop() == 0, "".join(dev.lines)
    assert processes_of(folder) == []


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [str(DEV), "--port", str(port), "--folder", str(tmp_path / "site")],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == (
        f"dev: The portal cannot listen on port {port}: Address already in use. "
        "Choose another one with --port.\n"
    )


def test_help_says_who_can_reach_it() -> None:
    done = subprocess.run([str(DEV), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "listens on the loopback only" in " ".join(done.stdout.split())
