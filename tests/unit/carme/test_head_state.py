"""Two heads: the copy of the state that a standby pulls."""

import contextlib
import io
import os
import re
import socket
import sqlite3
import sys
import tarfile
import time
from pathlib import Path

import pytest

from carme.config import load
from carme.errors import CarmeError
from carme.heads import main as program
from carme.heads import state

from .head_configuration import SOURCE, configured


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
    with pytest.raises(CarmeError, match="did not arrive completely"):
        state.receive(settings, site, io.BytesIO(whole[: int(len(whole) * part)]))
    assert (site.parent / "secrets/key").read_text() == "here"


@pytest.mark.parametrize("name", ["files/etc/shadow", "files/tmp/../etc/shadow"])
def test_nothing_but_state_is_written(site: Path, name: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
        archive.addfile(tarfile.TarInfo(state.END))
    stream.seek(0)
    with pytest.raises(CarmeError, match=r"which is not a state|which no backup of Carme"):
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
    """A folder outside of the state."""
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
        with pytest.raises(CarmeError, match="which is not a state of a head"):
            state.receive(load(site), site, archive(first, link, below))
    assert not (portal / "a").exists() and list(outside.iterdir()) == [outside / "passwd"]
    # As a link that became a folder and a link again between two polls of the sender.
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


@pytest.mark.parametrize("content", [b"no database at all", b"SQLite format 3\0" + b"x" * 4096])
def test_a_broken_database_does_not_stop_the_copy(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    settings, broken = load(site), site.parent / "portal/broken.sqlite"
    broken.write_bytes(content)
    (site.parent / "portal/link.sqlite").symlink_to("/etc/passwd")
    (site.parent / "secrets/key").chmod(0o640)
    command = [sys.executable, "-m", "carme.heads.main", "--config", str(site), "send-state"]
    assert state.pull(settings, site, "other", ssh=command) > 5
    shown = capsys.readouterr().err
    assert shown.startswith("other: Left out: ") and str(broken) in shown and "link" not in shown
    stream = io.BytesIO()
    state.send(settings, site, stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as opened:
        names = opened.getnames()
        assert opened.getmember(f"files{site.parent}/portal/link.sqlite").issym()
    assert f"files{site.parent}/secrets/key" in names and f"files{broken}" not in names


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


def test_certificates_of_a_reader_that_this_head_lacks_are_roots(site: Path) -> None:
    """Such as Zabbix: without it the standby would never get the state."""
    stream, folder = io.BytesIO(), site.parent / "monitoring"
    with tarfile.open(fileobj=stream, mode="w|gz") as opened:
        for path, kind in ((folder, tarfile.DIRTYPE), (folder / "zabbix", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(f"files{path}")
            member.type, member.mode = kind, 0o750
            member.uid, member.gid = os.getuid(), os.getgid()
            member.gname = "no-such-group" if path != folder else ""
            opened.addfile(member)
        opened.addfile(tarfile.TarInfo(state.END))
    stream.seek(0)
    assert state.receive(load(site), site, stream) == 2
    found = (folder / "zabbix").stat()
    assert found.st_gid == 0 or os.geteuid() != 0
    assert found.st_mode & 0o777 == 0o750
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|gz") as opened:
        member = tarfile.TarInfo(f"files{site.parent}/portal/a")
        member.gname = "no-such-group"
        opened.addfile(member)
        opened.addfile(tarfile.TarInfo(state.END))
    stream.seek(0)
    with pytest.raises(CarmeError, match="lacks owners of files: group no-such-group"):
        state.receive(load(site), site, stream)


def test_ssh_notices_a_dead_head(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CarmeError, match="cannot be copied: exit code 255"):
        state.pull(load(site), site, "other")
    assert "-o ServerAliveInterval=2 -o ServerAliveCountMax=2" in (tmp_path / "words").read_text()


def test_a_head_that_waits_for_a_copy_reports_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    copied = state.StateCopy("other", 2, time.time())
    state.note_copy(tmp_path, copied)
    assert state.last_copy(tmp_path) == copied


def test_a_site_with_one_head_sends_nothing(site: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    site.write_text(re.sub(r"(?ms)^\[heads\].*?(?=^\[|\Z)", "", site.read_text()))
    assert program.main(["--config", str(site), "send-state"]) == 1
    sent, error = capfdbinary.readouterr()
    assert sent == b"" and b"This site has one head" in error
