"""The portal's server, `carme-portal serve`, with several workers that live and die."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.db import connection
from django.template import engines
from free_ports import free_port

from carme_webui import asgi
from carme_webui.accounts.models import User
from carme_webui.notifier import notifier
from patience import HANG

from .conftest import FOLDER, Browser, needs_redis

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("broker")]

LONG = HANG


def until(holds: Callable[[], object]) -> None:
    """Wait until that is so; the whole is given up by the test's time."""
    for _ in range(int(LONG / 0.02)):
        if holds():
            return
        threading.Event().wait(0.02)
    raise AssertionError("It did not come to be in time.")


def socket_of(connection: socket.socket) -> str:
    """The kernel's number of the other end of a connection to this host."""
    here, there = connection.getsockname()[1], connection.getpeername()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{there:04X}") and fields[2].endswith(f":{here:04X}"):
            return fields[9]
    return ""


def holds_socket(process: int, number: str) -> bool:
    """Whether a process has accepted that connection."""
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            if str(file.readlink()) == f"socket:[{number}]":
                return True
        except FileNotFoundError:
            pass  # closed meanwhile
    return False


def lives(process: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for since is still listed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def serves(process: int) -> bool:
    """Whether a child of uvicorn is one of its workers."""
    try:
        return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Portal:
    """A running portal, of two processes by default, on the tests' database and broker."""

    def __init__(self, folder: Path, processes: int = 2) -> None:
        self.port = free_port()
        self.expected = processes
        name = connection.settings_dict["NAME"]
        server = os.environ.get("CARME_TEST_DATABASE")
        url = urlsplit(server)._replace(path=f"/{name}").geturl() if server else f"sqlite:///{name}"
        text = (FOLDER / "carme.toml").read_text()
        text = text.replace(
            'listen = "127.0.0.1:8100"', f'listen = "127.0.0.1:{self.port}"\nprocesses = {processes}'
        )
        text = re.sub(r"(?m)^database = .*$", f'database = "{url}"', text)
        (folder / "carme.toml").write_text(text)
        self.environment = os.environ | {
            "CARME_CONFIG": str(folder / "carme.toml"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.command = [sys.executable, "-m", "carme_webui.main", "serve"]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.program = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
        until(lambda: self.answers() or self.program.poll() is not None)
        assert self.program.poll() is None, self.log.read_text()

    def answers(self) -> bool:
        """Whether every process answers."""
        try:
            found = [self.status(process, "/accounts/login/") for process in self.processes]
            return found == [200] * self.expected
        except (OSError, http.client.HTTPException, AssertionError):
            return False

    @property
    def processes(self) -> list[int]:
        """Those that serve; beside them is Python's own, which looks after what they share."""
        file = Path(f"/proc/{self.program.pid}/task/{self.program.pid}/children")
        return [number for number in map(int, file.read_text().split()) if serves(number)]

    def status(self, process: int, path: str) -> int:
        """The status of a page, which is read to its end: the portal may log one that nobody waits for."""
        with closing(self.open(process, path)) as answer:
            answer.read()
            return answer.status

    def open(self, process: int, path: str, cookies: str = "") -> http.client.HTTPResponse:
        """Open a page in this process: stop the other processes of the same socket meanwhile."""
        stopped = [number for number in self.processes if number != process]
        for number in stopped:
            os.kill(number, signal.SIGSTOP)
        try:
            line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
            line.connect()
            accepted = line.sock  # the line forgets it when an answer is its last
            headers = {"Host": "carme.example:8443", "X-Forwarded-Proto": "https", "Cookie": cookies}
            line.request("GET", path, headers=headers)
            answer = line.getresponse()
            if not holds_socket(process, socket_of(accepted)):
                answer.read()  # the portal may log one that nobody waits for
                raise AssertionError("another process answered")
            return answer
        finally:
            for number in stopped:
                os.kill(number, signal.SIGCONT)

    def end(self) -> None:
        """As systemd ends it."""
        self.program.terminate()
        try:
            self.program.wait(LONG)
        finally:
            self.program.kill()
            self.program.wait()


@contextmanager
def serving(folder: Path, processes: int = 2) -> Iterator[Portal]:
    """A portal that has started, and ends with this."""
    running = Portal(folder, processes)
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def portal(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    """The portal of all tests that leave it serving."""
    with serving(tmp_path_factory.mktemp("portal")) as running:
        yield running


def signed_in(user: User) -> str:
    found = Browser()
    found.force_login(user)
    return "; ".join(f"{name}={cookie.value}" for name, cookie in found.cookies.items())


def next_event(stream: http.client.HTTPResponse) -> str:
    """The version of the next event."""
    while line := stream.readline().decode():
        if line.startswith("data: "):
            return line.removeprefix("data: ").strip()
    raise AssertionError("The stream has ended.")


def read_to_latest(stream: http.client.HTTPResponse) -> None:
    """Read until the stream's last event is what Redis says.

    Its process may have had more to report: it is stopped while others answer, and then takes Redis for one
    that was away.
    """
    while next_event(stream) != notifier.version("alice"):
        pass


def version_of(answer: http.client.HTTPResponse) -> str:
    """The version that a page shows."""
    with closing(answer):
        return re.findall(r'data-version="([^"]+)"', answer.read().decode())[0]


@needs_redis
def test_each_process_is_notified_of_a_change_and_a_dead_one_is_replaced(portal: Portal, alice: User) -> None:
    cookies = signed_in(alice)
    version = version_of(portal.open(portal.processes[0], "/", cookies))
    streams = [portal.open(process, f"/updates/?seen={version}", cookies) for process in portal.processes]
    notifier.notify(["alice"])
    for stream in streams:
        read_to_latest(stream)
    for process in portal.processes:  # their pages show the same version
        until(
            lambda process=process: (
                version_of(portal.open(process, "/", cookies)) == notifier.version("alice")
            )
        )

    dead = portal.processes[0]
    os.kill(dead, signal.SIGKILL)
    until(lambda: len(portal.processes) == 2 and dead not in portal.processes)
    until(portal.answers)
    version = notifier.version("alice")
    streams = [portal.open(process, f"/updates/?seen={version}", cookies) for process in portal.processes]
    notifier.notify(["alice"])
    for stream in streams:  # also of the one that took the place of the dead one
        read_to_latest(stream)


def test_new_workers_take_the_place_of_the_old_ones_while_the_portal_serves(portal: Portal) -> None:
    old = portal.processes
    portal.program.send_signal(signal.SIGHUP)
    until(lambda: len(portal.processes) == 2 and not set(old) & set(portal.processes))
    until(portal.answers)


def test_one_process_alone_is_replaced_as_well(tmp_path: Path) -> None:
    with serving(tmp_path, processes=1) as portal:
        [old] = portal.processes
        portal.program.send_signal(signal.SIGHUP)
        until(lambda: len(portal.processes) == 1 and old not in portal.processes)
        until(portal.answers)


def test_open_pages_hold_no_connection_to_the_database(portal: Portal, alice: User) -> None:
    cookies = signed_in(alice)
    process = portal.processes[0]
    streams = [portal.open(process, "/updates/", cookies) for _ in range(30)]
    assert portal.open(process, "/", cookies).status == 200
    assert all(next_event(stream) for stream in streams)


def test_a_second_portal_is_refused(portal: Portal) -> None:
    again = subprocess.run(
        portal.command, env=portal.environment, capture_output=True, text=True, check=False
    )
    assert again.returncode != 0 and "address already in use" in again.stderr.lower()
    assert "Traceback" not in again.stderr
    assert portal.answers()


def test_the_server_ends_with_all_its_workers(tmp_path: Path) -> None:
    with serving(tmp_path) as portal:
        processes = portal.processes
        portal.program.terminate()
        assert portal.program.wait(LONG) == 0
        assert not any(map(lives, processes))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", portal.port))
        assert "Traceback" not in portal.log.read_text()


def test_a_process_has_all_pages_loaded_and_collects_garbage_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    django: Any = engines["django"]
    (loader,) = django.engine.template_loaders
    loader.reset()
    monkeypatch.setattr(asgi, "collect_rarely", lambda: loaded.append(len(loader.get_template_cache)))
    assert asgi.worker() is asgi.application
    files = list((settings.BASE_DIR / "templates").rglob("*.html"))
    assert loaded == [len(files)] and len(files) > 100
