"""Two heads: the lease in a real PostgreSQL server, processes that hold it, and the copy of the state."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carme.config import load
from carme.errors import CarmeError
from carme.heads import Lease, holding, promotion, state
from carme.heads.names import own_name, require_two_heads
from patience import HANG
from real_postgresql import postgresql

pytestmark = pytest.mark.skipif(
    not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")), reason="PostgreSQL is not installed"
)
#: So long that no pause of a busy machine lets one run out, where a test does not want that.
LONG = 3600.0
#: Programs find this source as the tests do.
SOURCE = os.pathsep.join(filter(None, sys.path))
ACCOUNT = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="carme-heads-") as folder,
        postgresql(Path(folder), "fsync=off") as address,
    ):
        yield address


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine answers late, but it does."""
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
    taken = a.take()
    assert taken is not None and (taken.name, taken.epoch) == ("a", 1)
    assert b.take() is None and b.renew() is None
    seen = b.read()
    assert seen is not None and seen.name == "a" and seen.is_alive
    again = a.take()
    assert again is not None and again.epoch == 1


def test_it_changes_hands_when_it_is_released_forced_or_has_run_out(lease: Callable[..., Lease]) -> None:
    a, b = lease("a"), lease("b")
    a.take()
    a.release()
    seen = b.read()
    assert seen is not None and not seen.is_alive
    taken = b.take()
    assert taken is not None and (taken.name, taken.epoch) == ("b", 2)
    assert a.renew() is None and a.take() is None
    forced = a.take(force=True)
    assert forced is not None and (forced.name, forced.epoch) == ("a", 3)
    short = lease("a", 0.01)
    assert short.renew() is not None
    until(lambda: b.take() is not None)
    assert short.renew() is None


def test_a_name_is_no_sql(lease: Callable[..., Lease]) -> None:
    odd = lease("a'; DROP TABLE carme_head; --")
    taken = odd.take()
    assert taken is not None and odd.renew() == taken


def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    away = Lease(f"postgresql:///none?host={tmp_path}", ACCOUNT, "a", LONG)
    with pytest.raises(CarmeError, match="psql failed"):
        away.read()


def configured(folder: Path, server: str, seconds: int = 600) -> Path:
    """The configuration of a head that is this host."""
    (folder / "portal").mkdir(parents=True)
    file = folder / "carme.toml"
    file.write_text(
        f"""
[site]
url = "https://carme.example.org"
[slurm]
cluster = "c"
[broker]
state_directory = "{folder}/broker"
[hub]
database = "{server}"
state_directory = "{folder}/hub"
[portal]
database = "{server}"
state_directory = "{folder}/portal"
[secrets]
directory = "{folder}/secrets"
[heads]
names = [{json.dumps(socket.gethostname())}, "other"]
lease_seconds = {seconds}
"""
    )
    return file


class Held:
    """`carme-head hold` of this host, as its unit runs it, but with more renewals of a longer lease.

    It renews the lease after 0.3 s; whether it stands still for minutes between two of these does not matter.
    """

    def __init__(self, config: Path, give_up: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(config.parent / "notify"))
        self._socket.settimeout(0.2)
        start = f"import sys; from carme.heads import holding, lease, main; lease.ANSWER_SECONDS = {HANG}; "
        start += f"holding.RENEW, holding.GIVE_UP = 0.0005, {give_up}; sys.exit(main.main())"
        command = [sys.executable, "-c", start, "--config", str(config), "hold"]
        environment = {**os.environ, "NOTIFY_SOCKET": str(config.parent / "notify"), "PYTHONPATH": SOURCE}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def until_ready(self) -> None:
        end = time.monotonic() + HANG
        while time.monotonic() < end:
            is_over = self.process.poll() is not None  # what it sent before that is there
            with contextlib.suppress(TimeoutError):
                assert self._socket.recv(1000).startswith(b"READY=1")
                return
            assert not is_over
        raise AssertionError("It did not become the active head.")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._socket.close()


@pytest.fixture
def held(tmp_path: Path, server: str) -> Iterator[Callable[..., Held]]:
    started: list[Held] = []

    def hold(address: str = server, give_up: float = holding.GIVE_UP) -> Held:
        started.append(Held(configured(tmp_path / "head", address), give_up))
        return started[-1]

    yield hold
    for process in started:
        process.end()


def test_a_head_that_is_not_active_does_not_start(
    lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease("other").take()
    process = held().process
    _out, error = process.communicate(timeout=HANG)
    assert process.returncode == 3
    assert "other is the active head (epoch 1)" in error and "carme-head promote" in error


def test_an_active_head_stops_when_another_was_promoted(
    lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease(socket.gethostname()).take()
    head = held()
    head.until_ready()
    lease("other").take(force=True)
    _out, error = head.process.communicate(timeout=HANG)
    assert head.process.returncode == 3 and "other is the active head (epoch 2)" in error


def test_an_active_head_that_is_stopped_stays_the_holder(
    lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease(socket.gethostname()).take()
    head = held()
    head.until_ready()
    head.process.send_signal(signal.SIGTERM)
    head.process.communicate(timeout=HANG)
    assert head.process.returncode == 0
    assert lease("other").take() is None


def test_an_active_head_without_the_database_stops(tmp_path: Path, held: Callable[..., Held]) -> None:
    with tempfile.TemporaryDirectory(prefix="carme-heads-") as folder:
        with postgresql(Path(folder), "fsync=off") as address:
            Lease(address, ACCOUNT, socket.gethostname(), LONG).take()
            head = held(address, give_up=0.002)  # 1.2 s
            head.until_ready()
        _out, error = head.process.communicate(timeout=HANG)
    assert head.process.returncode == 1
    assert "The services of this head stop" in error


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that starts and stops what it is told to, and notes that; the folder of what runs."""
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
    active.take()
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.2):
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


def test_the_lease_of_a_dead_head_is_waited_for(lease: Callable[..., Lease], systemctl: Path) -> None:
    begun = time.monotonic()
    lease("a", 2.0).take()
    steps: list[str] = []
    taken = promotion.promote(lease("b"), "b", False, steps.append)
    assert taken.epoch == 2 and running(systemctl) == ALL
    # Not before it had run out. The database has another clock than this process.
    assert time.monotonic() - begun >= 1.9


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
    assert lease("b").take() is None


def test_a_service_that_does_not_start_is_named(lease: Callable[..., Lease], systemctl: Path) -> None:
    (systemctl / "broken").touch()
    with pytest.raises(CarmeError, match=r"do not run: carme-hub\.service \(inactive\)"):
        promotion.promote(lease("a"), "a", False, print)


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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The configuration of a head that has state."""
    config = configured(tmp_path / "site", "postgresql:///x")
    files = {
        "secrets/key": "secret",
        "tls/site.key": "certificate",
        "hub/certificates/hub-ca/hub-ca.crt": "authority",
        "portal/static/large.css": "made by each head",
        "portal/calendar.key": "feed",
        "broker/policy.json": "{}",
    }
    for name, text in files.items():
        path = config.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (config.parent / "secrets/key").chmod(0o440)
    (config.parent / "hub/certificates").chmod(0o700)
    return config


def test_the_state_arrives_as_it_was(site: Path) -> None:
    folder, settings = site.parent, load(site)
    with sqlite3.connect(folder / "broker/sessions.sqlite") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE t (x)")
        database.execute("INSERT INTO t VALUES (7)")
        database.commit()
        stream = io.BytesIO()
        state.send(settings, site, stream)
    database.close()
    (folder / "secrets/key").unlink()
    (folder / "broker/sessions.sqlite").write_text("old")
    (folder / "broker/sessions.sqlite-wal").write_text("old")
    (folder / "portal/static/large.css").write_text("its own")
    stream.seek(0)
    state.receive(settings, site, stream)
    assert (folder / "secrets/key").read_text() == "secret"
    assert (folder / "secrets/key").stat().st_mode & 0o777 == 0o440
    assert (folder / "hub/certificates").stat().st_mode & 0o777 == 0o700
    assert (folder / "portal/static/large.css").read_text() == "its own"
    assert not (folder / "broker/sessions.sqlite-wal").exists()
    with sqlite3.connect(folder / "broker/sessions.sqlite") as database:
        assert database.execute("SELECT x FROM t").fetchall() == [(7,)]
    database.close()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.98])
def test_a_state_that_was_cut_off_changes_nothing(site: Path, part: float) -> None:
    settings, stream = load(site), io.BytesIO()
    (site.parent / "portal/noise").write_bytes(os.urandom(50_000))
    state.send(settings, site, stream)
    (site.parent / "secrets/key").chmod(0o640)
    (site.parent / "secrets/key").write_text("here")
    whole = stream.getvalue()
    with pytest.raises(CarmeError, match="did not arrive as a whole"):
        state.receive(settings, site, io.BytesIO(whole[: int(len(whole) * part)]))
    assert (site.parent / "secrets/key").read_text() == "here"


@pytest.mark.parametrize("name", ["files/etc/shadow", "files/tmp/../etc/shadow"])
def test_nothing_but_state_is_written(site: Path, name: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
        archive.addfile(tarfile.TarInfo(state.END))
    stream.seek(0)
    with pytest.raises(CarmeError, match=r"which is no state|which none of ours"):
        state.receive(load(site), site, stream)


def test_a_copy_is_pulled_by_a_program_and_noted(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    settings = load(site)
    command = [sys.executable, "-m", "carme.heads.main", "--config", str(site), "send-state"]
    (site.parent / "secrets/old").write_text("stays")
    assert state.pull(settings, site, "other", ssh=command) > 5
    with pytest.raises(CarmeError, match=r"The state of other cannot be copied: no way"):
        state.pull(settings, site, "other", ssh=["sh", "-c", "echo no way >&2; exit 255"])
    assert state.last_copy(tmp_path) is None
    copied = state.Copied("other", 2, time.time())
    state.note_copy(tmp_path, copied)
    assert state.last_copy(tmp_path) == copied
