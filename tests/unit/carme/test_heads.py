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
from carme.heads import Holder, Lease, address, holding, promotion, state
from carme.heads import main as program
from carme.heads.names import own_name, require_two_heads
from patience import HANG
from real_postgresql import postgresql

#: So long that no pause of a busy machine lets one run out, where a test does not want that.
LONG = 3600.0
#: Programs find this source as the tests do.
SOURCE = os.pathsep.join(filter(None, sys.path))
ACCOUNT = pwd.getpwuid(os.getuid()).pw_name


#: `carme-head` as a program, which looks often and does not take a server on a busy machine for away.
PROGRAM = """
import sys
from carme.heads import holding, lease, main
lease.ANSWER_SECONDS, holding.RENEW, holding.GIVE_UP = float(sys.argv[1]), 0.0005, float(sys.argv[2])
raise SystemExit(main.main(sys.argv[3:]))
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carme.heads.lease.ANSWER_SECONDS", HANG)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("PostgreSQL is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="carme-heads-") as folder,
        postgresql(Path(folder), "fsync=off") as address,
    ):
        yield address


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
    b.release()
    assert b.renew() is None  # also when its host starts again
    again = b.take()
    assert again is not None and again.epoch == 2 and b.renew() is not None
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


def configured(folder: Path, server: str) -> Path:
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
lease_seconds = 600
"""
    )
    return file


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


def test_an_active_head_without_the_database_stops(
    server: str, lease: Callable[..., Lease], held: Callable[..., Held]
) -> None:
    lease(socket.gethostname()).take()
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
    monkeypatch.setattr(holding, "_now", lambda: lease.now)
    monkeypatch.setattr(holding.signal, "signal", lambda *_words: None)
    monkeypatch.setattr(holding.threading, "Event", lambda: lease)
    assert holding.hold(load(configured(tmp_path / "head", "postgresql:///x")), lease, "a") == 1
    # Tried at 4 s, for 8 s, and at 16 s, for no longer; it looks once more and ends.
    assert lease.within == [None, 12.0, 0.0] and lease.now <= 1000.0 + 20.0
    assert "The services of this head stop" in capsys.readouterr().err


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
    lease("a", 1.0).take()
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


def archive(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """A state that a head sends: paths, types of tar, and what is in a file or where a link leads."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as opened:
        for path, kind, text in (*members, (state.END, tarfile.REGTYPE, "")):
            member = tarfile.TarInfo(path if path == state.END else f"files{path}")
            member.type, member.mode = kind, 0o755 if kind == tarfile.DIRTYPE else 0o644
            member.uid, member.gid = os.getuid(), os.getgid()
            if kind == tarfile.SYMTYPE:
                member.linkname = text
                opened.addfile(member)
            else:
                member.size = len(text)
                opened.addfile(member, io.BytesIO(text.encode()))
    stream.seek(0)
    return stream


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is none of the state."""
    folder = tmp_path / "outside"
    folder.mkdir(0o700)
    (folder / "passwd").write_text("root's")
    return folder


def test_a_link_is_never_followed(site: Path, outside: Path) -> None:
    settings, portal = load(site), site.parent / "portal"
    state.receive(settings, site, archive((f"{portal}/a", tarfile.SYMTYPE, str(outside))))
    assert (portal / "a").is_symlink()
    with pytest.raises(CarmeError, match="leads over the link 'a'"):
        state.receive(settings, site, archive((f"{portal}/a/passwd", tarfile.REGTYPE, "mine")))
    both = ((f"{portal}/a", tarfile.DIRTYPE, ""), (f"{portal}/a/passwd", tarfile.REGTYPE, "mine"))
    state.receive(settings, site, archive(*both))
    assert not (portal / "a").is_symlink() and (portal / "a/passwd").read_text() == "mine"
    assert (outside / "passwd").read_text() == "root's" and outside.stat().st_mode & 0o777 == 0o700


def test_a_link_is_no_folder_of_the_same_state(site: Path, outside: Path) -> None:
    portal = site.parent / "portal"
    link = (f"{portal}/b", tarfile.SYMTYPE, str(outside))
    first = (f"{portal}/a", tarfile.REGTYPE, "")
    for below in ((f"{portal}/b/passwd", tarfile.REGTYPE, "x"), (f"{portal}/b/c", tarfile.DIRTYPE, "")):
        with pytest.raises(CarmeError, match="which is no state of a head"):
            state.receive(load(site), site, archive(first, link, below))
    assert not (portal / "a").exists() and list(outside.iterdir()) == [outside / "passwd"]
    # As a link that became a folder and a link again between two looks of the sender.
    folder = (f"{portal}/b", tarfile.DIRTYPE, "")
    with pytest.raises(CarmeError, match="leads over the link 'b'"):
        state.receive(load(site), site, archive(folder, link))
    assert outside.stat().st_mode & 0o777 == 0o700


def test_what_has_another_type_gives_way(site: Path) -> None:
    settings, portal = load(site), site.parent / "portal"
    (portal / "file/inside").mkdir(parents=True)
    (portal / "folder").write_text("x")
    (portal / "database.sqlite-wal").mkdir()
    members = [
        (f"{portal}/file", tarfile.REGTYPE, "text"),
        (f"{portal}/folder", tarfile.DIRTYPE, ""),
        (f"{portal}/database.sqlite", tarfile.REGTYPE, ""),
    ]
    state.receive(settings, site, archive(*members))
    assert (portal / "file").read_text() == "text" and (portal / "folder").is_dir()
    assert not (portal / "database.sqlite-wal").exists()


def test_a_socket_is_left_out(site: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(site.parent / "portal/s"))
        stream = io.BytesIO()
        state.send(load(site), site, stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as opened:
        assert not [name for name in opened.getnames() if name.endswith("portal/s")]


def test_an_owner_without_account_is_named_before_anything_is_written(site: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as opened:
        for name, owner in (("a", ""), ("b", "no-such-account")):
            member = tarfile.TarInfo(f"files{site.parent}/portal/{name}")
            member.uname = owner
            opened.addfile(member)
        opened.addfile(tarfile.TarInfo(state.END))
    stream.seek(0)
    with pytest.raises(CarmeError, match="lacks owners of files: account no-such-account"):
        state.receive(load(site), site, stream)
    assert not (site.parent / "portal/a").exists()


def test_ssh_notices_a_dead_head(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CarmeError, match="cannot be copied: exit code 255"):
        state.pull(load(site), site, "other")
    assert "-o ServerAliveInterval=2 -o ServerAliveCountMax=2" in (tmp_path / "words").read_text()


def test_who_waits_for_a_copy_says_so(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, shown = load(site), list[str]()
    with contextlib.ExitStack() as copy:
        assert copy.enter_context(program._alone(settings, wait=False))

        def show(text: str, **_more: object) -> None:
            shown.append(text)
            copy.close()

        monkeypatch.setattr(program, "print", show, raising=False)
        with program._alone(settings, wait=False) as free:
            assert not free and shown == []
        with program._alone(settings, wait=True) as free:
            assert free and shown == ["Waiting for the copy that runs."]


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
