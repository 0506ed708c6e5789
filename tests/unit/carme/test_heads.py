"""Two heads: the lease in a real PostgreSQL server, and processes that hold it."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carme.config import load
from carme.errors import CarmeError
from carme.heads import Holder, Lease, active_head, address, main, promotion
from carme.heads.names import own_name, require_two_heads
from patience import HANG
from real_postgresql import module_server  # noqa: F401  # a fixture

from .head_configuration import SOURCE, configured

#: So long that no pause of a busy machine lets one run out, where a test does not want that.
LONG = 3600.0
ACCOUNT = pwd.getpwuid(os.getuid()).pw_name


#: `carme-head` as a program that polls often and waits long enough for a server on a busy machine.
PROGRAM = """
import sys
from carme.heads import active_head, lease, main
lease.ANSWER_SECONDS, active_head.RENEW, active_head.GIVE_UP = float(sys.argv[1]), 0.0005, float(sys.argv[2])
raise SystemExit(main.main(sys.argv[3:]))
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carme.heads.lease.ANSWER_SECONDS", HANG)


@pytest.fixture
def lease(server: str) -> Callable[..., Lease]:
    """Makes the lease as a head sees it; nobody has held it yet."""
    environment = {**os.environ, "PGOPTIONS": "-c client_min_messages=warning"}
    drop = ["psql", "--no-psqlrc", "-q", server, "-c", "DROP TABLE IF EXISTS carme_head"]
    subprocess.run(drop, check=True, env=environment)
    return lambda me, seconds=LONG: Lease(server, ACCOUNT, me, seconds)


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_lease_has_one_holder(lease: Callable[..., Lease]) -> None:
    a, b = lease("a"), lease("b")
    assert a.read() is None and a.renew() is None
    taken = a.acquire()
    assert taken is not None and (taken.name, taken.epoch) == ("a", 1)
    assert b.acquire() is None and b.renew() is None
    seen = b.read()
    assert seen is not None and seen.name == "a" and seen.is_alive
    again = a.acquire()
    assert again is not None and again.epoch == 1


def test_the_lease_changes_hands_when_released_forced_or_expired(lease: Callable[..., Lease]) -> None:
    a, b = lease("a"), lease("b")
    a.acquire()
    a.release()
    seen = b.read()
    assert seen is not None and not seen.is_alive
    taken = b.acquire()
    assert taken is not None and (taken.name, taken.epoch) == ("b", 2)
    assert a.renew() is None and a.acquire() is None
    b.release()
    assert b.renew() is None  # also when its host starts again
    again = b.acquire()
    assert again is not None and again.epoch == 2 and b.renew() is not None
    forced = a.acquire(force=True)
    assert forced is not None and (forced.name, forced.epoch) == ("a", 3)
    short = lease("a", 0.01)
    assert short.renew() is not None
    until(lambda: b.acquire() is not None)
    assert short.renew() is None


def test_a_name_is_no_sql(lease: Callable[..., Lease]) -> None:
    odd = lease("a'; DROP TABLE carme_head; --")
    taken = odd.acquire()
    assert taken is not None and odd.renew() == taken


def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    away = Lease(f"postgresql:///none?host={tmp_path}", ACCOUNT, "a", LONG)
    with pytest.raises(CarmeError, match="psql failed"):
        away.read()


class Held:
    """`carme-head hold` of this host, as its unit runs it."""

    def __init__(self, config: Path, give_up: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(config.parent / "notify"))
        self._socket.settimeout(0.2)
        command = [sys.executable, "-c", PROGRAM, str(HANG), str(give_up), "--config", str(config), "hold"]
        environment = {**os.environ, "NOTIFY_SOCKET": str(config.parent / "notify"), "PYTHONPATH": SOURCE}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def until_ready(self) -> None:
        end = time.monotonic() + HANG
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            with contextlib.suppress(TimeoutError):
                assert self._socket.recv(1000).startswith(b"READY=1")
                return
            assert not ended
        raise AssertionError("It did not become the active head.")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._socket.close()


@pytest.fixture
def held(tmp_path: Path, server: str) -> Iterator[Callable[..., Held]]:
    started: list[Held] = []

    def hold(address: str = server, give_up: float = 0.8) -> Held:
        started.append(Held(configured(tmp_path / "head", address), give_up))
        return started[-1]

    yield hold
    for process in started:
        process.end()


def test_a_head_that_is_not_active_does_not_start(
    lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease("other").acquire()
    process = held().process
    _out, error = process.communicate(timeout=HANG)
    assert process.returncode == 3
    assert "other is the active head (epoch 1)" in error and "carme-head promote" in error


def test_an_active_head_stops_when_another_was_promoted(
    lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease(socket.gethostname()).acquire()
    head = held()
    head.until_ready()
    lease("other").acquire(force=True)
    _out, error = head.process.communicate(timeout=HANG)
    assert head.process.returncode == 3 and "other is the active head (epoch 2)" in error


def test_an_active_head_that_is_stopped_stays_the_holder(
    lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease(socket.gethostname()).acquire()
    head = held()
    head.until_ready()
    head.process.send_signal(signal.SIGTERM)
    head.process.communicate(timeout=HANG)
    assert head.process.returncode == 0
    assert lease("other").acquire() is None


def test_an_active_head_without_the_database_stops(
    server: str, lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease(socket.gethostname()).acquire()
    with tempfile.TemporaryDirectory(prefix="carme-heads-") as folder:
        Path(folder).chmod(0o755)
        away = Path(folder, "server")
        start, folder_of_server = server.split("?host=")
        away.symlink_to(folder_of_server)
        head = held(f"{start}?host={away}", 0.002)
        head.until_ready()
        away.unlink()
        _out, error = head.process.communicate(timeout=HANG)
    assert head.process.returncode == 1
    assert "The services of this head stop" in error


class Failing(Lease):
    """A lease of 20 s that is renewed once; after that each attempt takes as long as it may, by a clock."""

    def __init__(self) -> None:
        super().__init__("", "", "a", 20.0)
        self.now = 1000.0
        self.within: list[float | None] = []

    def renew(self, within: float | None = None) -> Holder | None:
        self.within.append(within)
        if len(self.within) == 1:
            return Holder("a", 1, 0.0, 20.0)
        self.now += 8.0 if within is None else min(8.0, within)
        raise CarmeError("The database server did not answer.", "")

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def test_no_attempt_to_renew_the_lease_ends_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = Failing()
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setattr(active_head, "_now", lambda: lease.now)
    monkeypatch.setattr(active_head.signal, "signal", lambda *_words: None)
    monkeypatch.setattr(active_head.threading, "Event", lambda: lease)
    assert active_head.hold(load(configured(tmp_path / "head", "postgresql:///x")), lease, "a") == 1
    # It tries at 4 s for 8 s, and at 16 s for no longer; it reads the lease once more and ends.
    assert lease.within == [None, 12.0, 0.0] and lease.now <= 1000.0 + 20.0
    assert "The services of this head stop" in capsys.readouterr().err


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that starts and stops units, and notes that; the folder of what runs."""
    folder = tmp_path / "systemd"
    (folder / "active").mkdir(parents=True)
    program = folder / "systemctl"
    program.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
command=$1; shift
for unit; do
    case $command in
        start) [ -e {folder}/broken ] && [ $unit = carme-hub.service ] || touch {folder}/active/$unit ;;
        stop) [ -e {folder}/broken ] && [ $unit = carme-hub.service ] || rm -f {folder}/active/$unit ;;
        is-active) [ -e {folder}/active/$unit ] && echo active || echo inactive ;;
    esac
done
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def running(folder: Path) -> set[str]:
    return {path.name for path in (folder / "active").iterdir()}


ALL = {promotion.ACTIVE, *promotion.SERVICES}


def test_the_first_head_is_promoted_at_once(lease: Callable[..., Lease], systemctl: Path) -> None:
    steps: list[str] = []
    promotion.promote(lease("a"), "a", False, steps.append)
    assert running(systemctl) == ALL
    assert steps == ["a has the lease (epoch 1).", f"{len(ALL)} services run."]


def test_a_head_beside_an_active_one_is_refused(lease: Callable[..., Lease], systemctl: Path) -> None:
    active = lease("a")
    active.acquire()
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.2):
            with contextlib.suppress(CarmeError):
                active.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CarmeError, match="a is the active head and renews its lease") as error:
            promotion.promote(lease("b"), "b", False, print)
        assert "carme-head demote on a" in error.value.remedy
    finally:
        done.set()
        thread.join()
    assert running(systemctl) == set()
    seen = active.read()
    assert seen is not None and (seen.name, seen.epoch) == ("a", 1)


class Noted(Lease):
    """Notes how it was read."""

    seen: Holder | None = None

    def read(self) -> Holder | None:
        self.seen = super().read()
        return self.seen


def test_the_lease_of_a_dead_head_is_waited_for(
    server: str, lease: Callable[..., Lease], systemctl: Path
) -> None:
    lease("a", 1.0).acquire()
    noted = Noted(server, ACCOUNT, "b", LONG)
    assert promotion.promote(noted, "b", False, print).epoch == 2
    assert running(systemctl) == ALL
    assert noted.seen is not None and noted.seen.name == "a" and not noted.seen.is_alive


def test_a_planned_change_waits_for_nothing(lease: Callable[..., Lease], systemctl: Path) -> None:
    promotion.promote(lease("a"), "a", False, print)
    with pytest.raises(CarmeError, match="This head is not the active one; that is a"):
        promotion.demote(lease("b"), "b", print)
    promotion.demote(lease("a"), "a", print)
    assert running(systemctl) == set()
    assert promotion.promote(lease("b"), "b", False, print).epoch == 2


def test_a_head_whose_service_does_not_stop_keeps_the_lease(
    lease: Callable[..., Lease], systemctl: Path
) -> None:
    promotion.promote(lease("a"), "a", False, print)
    (systemctl / "broken").touch()
    with pytest.raises(CarmeError, match=r"do not stop: carme-hub\.service"):
        promotion.demote(lease("a"), "a", print)
    assert lease("b").acquire() is None


def test_a_service_that_does_not_start_is_named(lease: Callable[..., Lease], systemctl: Path) -> None:
    (systemctl / "broken").touch()
    with pytest.raises(CarmeError, match=r"do not run: carme-hub\.service \(inactive\)"):
        promotion.promote(lease("a"), "a", False, print)


def test_a_head_without_systemd_names_all_services(
    lease: Callable[..., Lease], systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "states", lambda *_units: {})
    with pytest.raises(CarmeError, match=r"do not run: all\."):
        promotion.promote(lease("a"), "a", False, print)


def test_services_that_run_on_a_head_are_listed() -> None:
    names = list(promotion.SERVICES)[:2]
    assert main._describe_units(dict.fromkeys(names, "active")) == " and ".join(names)
    assert main._describe_units(dict.fromkeys(names, "inactive")) == "nothing"


def test_files_of_sqlite_cannot_be_shared(tmp_path: Path) -> None:
    config = configured(tmp_path / "head", "sqlite:////var/lib/carme/hub/hub.sqlite")
    with pytest.raises(CarmeError, match="is a file of this head"):
        require_two_heads(load(config))


def test_a_host_that_is_no_head_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(configured(tmp_path / "head", "postgresql:///x"))
    assert own_name(settings) == socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "other.example.org")
    assert own_name(settings) == "other"
    monkeypatch.setattr(socket, "gethostname", lambda: "third")
    with pytest.raises(CarmeError, match="This host is third"):
        own_name(settings)


@pytest.mark.parametrize(
    ("written", "shown"),
    [("10.0.0.9", "10.0.0.9/32"), ("10.0.0.9/24", "10.0.0.9/24"), ("2001:DB8:0::9/64", "2001:db8::9/64")],
)
def test_an_address_is_taken_away_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, shown: str
) -> None:
    ip = tmp_path / "ip"
    ip.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "2: eth0 inet {shown} scope global eth0"\n'
    )
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    address.drop(written, "eth0")
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [f"address delete {shown} dev eth0"]
