"""Backup and restore of a site in a temporary folder: databases in use, owners by name, and a sealed file."""

import contextlib
import errno
import json
import os
import pwd
import sqlite3
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from carme.backup import append_only, archive, check, create, databases, make_key, restore
from carme.backup.main import CERTIFICATE, STARTED, main
from carme.backup.sealing import PIECE, Opened, Sealed
from carme.errors import CarmeError
from real_postgresql import module_server, new_database  # noqa: F401  # a fixture


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's folder with all that a head holds; its configuration is `etc/carme.toml`."""
    root = tmp_path / "site"
    files = {
        "etc/secrets/portal-secret-key": "secret",
        "etc/tls/hub.pem": "certificate",
        "etc/monitoring/broker/tls.pem": "reader",
        "broker/sessions.json": '{"sessions": []}',
        "hub/jupyterhub-proxy.pid": "7",
        "portal/calendar.key": "feed",
        "log/audit.jsonl": "{}\n",
        "log/audit.jsonl.1": "{}\n",
        "images/torch.json": "{}",
        "images/torch.sif": "large",
        "datasets/imagenet.json": "{}",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "etc/secrets").chmod(0o750)
    (root / "etc/secrets/portal-secret-key").chmod(0o440)
    (root / "etc/current").symlink_to("tls/hub.pem")
    os.mkfifo(root / "broker/pipe")
    (root / "etc/carme.toml").write_text(
        f"""
[site]
url = "https://carme.example.org"
[slurm]
cluster = "test"
[broker]
audit_log = "{root}/log/audit.jsonl"
state_directory = "{root}/broker"
[images]
directory = "{root}/images"
[staging]
datasets = "{root}/datasets"
[hub]
database = "sqlite:///{root}/hub/hub.sqlite"
state_directory = "{root}/hub"
[portal]
database = "sqlite:///{root}/portal/portal.sqlite3"
state_directory = "{root}/portal"
[monitoring]
certificates = "{root}/etc/monitoring/broker"
portal_certificates = "{root}/etc/monitoring/portal"
[secrets]
directory = "{root}/etc/secrets"
"""
    )
    return root


def use(database: Path) -> sqlite3.Connection:
    """A database with rows that are in its journal alone, as of a running service."""
    opened = sqlite3.connect(database)
    opened.execute("PRAGMA journal_mode=WAL")
    opened.execute("PRAGMA wal_autocheckpoint=0")
    opened.execute("CREATE TABLE bookings (name TEXT)")
    opened.execute("INSERT INTO bookings VALUES ('mine')")
    opened.commit()
    return opened


def rows(database: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(database)) as opened:
        return [name for (name,) in opened.execute("SELECT name FROM bookings")]


def make_backup(site: Path, key: Path, **more: Any) -> Path:
    backup = site.parent / "backup"
    create(backup, key, site / "etc/carme.toml", more.pop("also", []), **more)
    return backup


@pytest.mark.parametrize("is_own", [True, False])
def test_only_links_of_root_and_our_own_are_followed(
    site: Path, key: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    (site / "portal/a").mkdir()
    (site / "portal/a/passwd").write_text("mine")
    backup = make_backup(site, key)
    outside = site.parent / "outside"
    (site / "portal/a").rename(outside)
    (outside / "passwd").write_text("root's")
    link = site / "portal/a"
    link.symlink_to(outside)
    if not is_own and os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
    elif not is_own:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    restore(backup, key)
    assert (link / "passwd").read_text() == "mine"
    assert link.is_symlink() == is_own
    assert (outside / "passwd").read_text() == ("mine" if is_own else "root's")


def test_a_restore_has_all_files_and_committed_rows_of_running_services(site: Path, key: Path) -> None:
    services = [use(site / "portal/portal.sqlite3"), use(site / "hub/hub.sqlite")]
    backup = make_backup(site, key)
    for opened in services:
        opened.close()
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert b"secret" not in backup.read_bytes() and b"mine" not in backup.read_bytes()
    (site / "etc/secrets/portal-secret-key").unlink()
    (site / "broker/sessions.json").write_text("lost")
    (site / "portal/portal.sqlite3").unlink()
    (site / "portal/portal.sqlite3-wal").write_bytes(b"of another database")
    (site / "etc/current").unlink()
    (site / "log/added").write_text("stays")
    restore(backup, key)
    assert (site / "etc/secrets/portal-secret-key").read_text() == "secret"
    assert stat.S_IMODE((site / "etc/secrets/portal-secret-key").stat().st_mode) == 0o440
    assert stat.S_IMODE((site / "etc/secrets").stat().st_mode) == 0o750
    assert (site / "broker/sessions.json").read_text() == '{"sessions": []}'
    assert rows(site / "portal/portal.sqlite3") == rows(site / "hub/hub.sqlite") == ["mine"]
    assert (site / "etc/current").readlink() == Path("tls/hub.pem")
    assert (site / "log/added").read_text() == "stays"


def test_the_database_of_the_broker_is_copied_as_of_one_moment(site: Path, key: Path) -> None:
    database = site / "broker/sessions.sqlite"
    opened = use(database)  # what is committed is in its log, which a checkpoint could move meanwhile
    (site / "broker/note.sqlite").write_text("no database")
    backup = make_backup(site, key)
    about, paths, _missing = check(backup, key)
    assert str(database) in about.sqlite
    assert [path for path in paths if "sessions.sqlite" in path] == [str(database)]
    opened.execute("INSERT INTO bookings VALUES ('later')")
    opened.commit()
    log = Path(f"{database}-wal").read_bytes()
    opened.close()
    Path(f"{database}-wal").write_bytes(log)  # as a broker leaves it that was killed
    restore(backup, key)
    assert rows(database) == ["mine"]
    assert (site / "broker/note.sqlite").read_text() == "no database"


def test_what_only_looks_like_a_database_does_not_stop_a_backup(
    site: Path, key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, log, gone = (site / f"portal/{name}" for name in ("bad.sqlite", "bad.sqlite-wal", "gone.sqlite"))
    good = site / "portal/good.sqlite"
    content = b"SQLite format 3\0" + b"x" * 4096
    bad.write_bytes(content)
    log.write_text("log")
    use(gone).close()
    use(good).close()
    copy_sqlite = databases.copy_sqlite

    def copy(database: Path, to: Path) -> None:
        gone.unlink(missing_ok=True)
        copy_sqlite(database, to)

    monkeypatch.setattr(archive, "copy_sqlite", copy)
    backup = make_backup(site, key)
    about, paths, _missing = check(backup, key)
    assert about.sqlite == [str(good)]
    assert {str(bad), str(log)} <= set(paths) and str(gone) not in paths
    assert str(bad) in caplog.text and str(gone) not in caplog.text
    bad.unlink()
    restore(backup, key)
    assert bad.read_bytes() == content and rows(good) == ["mine"]


@pytest.mark.parametrize("name", ["portal/portal.sqlite3", "broker/sessions.sqlite"])
def test_a_broken_database_of_a_service_stops_a_backup(site: Path, key: Path, name: str) -> None:
    (site / name).write_bytes(b"SQLite format 3\0" + b"x" * 4096)
    with pytest.raises(CarmeError, match="cannot be copied"):
        make_backup(site, key)


@pytest.mark.parametrize("name", ["a?b.sqlite", "a#b.sqlite", "a%41.sqlite"])
def test_names_of_databases_mean_nothing_but_a_file(tmp_path: Path, name: str) -> None:
    database, copy = tmp_path / "portal" / name, tmp_path / "copy"
    database.parent.mkdir()
    use(database).close()
    databases.copy_sqlite(database, copy)
    assert rows(copy) == ["mine"]
    assert all(path.name.startswith(name) for path in database.parent.iterdir())


def test_no_database_is_created_where_a_name_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("made")
    with pytest.raises(CarmeError, match="cannot be copied"):
        databases.copy_sqlite(tmp_path / "a?x.sqlite", tmp_path / "copy")
    assert not (tmp_path / "made").exists()


def test_a_backup_has_configuration_secrets_logs_and_databases(site: Path, key: Path) -> None:
    extra = site.parent / "prometheus/data"
    extra.parent.mkdir()
    extra.write_text("series")
    use(site / "portal/portal.sqlite3").close()
    about, paths, missing = check(make_backup(site, key, also=[extra.parent]), key)
    names = {path.removeprefix(f"{site}/") for path in paths}
    assert {"etc/carme.toml", "etc/tls/hub.pem", "etc/monitoring/broker/tls.pem"} <= names
    assert {"log/audit.jsonl", "log/audit.jsonl.1"} <= names
    assert {"broker/sessions.json", "datasets/imagenet.json", "images/torch.json", str(extra)} <= names
    assert not {"images/torch.sif", "broker/pipe", "portal/portal.sqlite3-wal"} & names
    assert len(paths) == len(set(paths)) and not missing
    assert about.sqlite == [f"{site}/portal/portal.sqlite3"] and about.config == f"{site}/etc/carme.toml"
    _about, paths, _missing = check(make_backup(site, key, images=True), key)
    assert f"{site}/images/torch.sif" in paths


def test_a_backup_can_be_restored_below_a_folder(site: Path, key: Path, tmp_path: Path) -> None:
    backup = make_backup(site, key)
    (site / "broker/sessions.json").write_text("newer")
    restore(backup, key, tmp_path / "look")
    assert (tmp_path / f"look{site}/broker/sessions.json").read_text() == '{"sessions": []}'
    assert (site / "broker/sessions.json").read_text() == "newer"


def renamed(backup: Path, key: Path, uname: str) -> None:
    """Make the owner of all of a backup's files an account of this name with another number."""
    secret = key.read_bytes().strip()
    with backup.open("rb") as file:
        plain = Opened(file, secret).read()
    old, new = backup.with_name("old.tar"), backup.with_name("new.tar")
    old.write_bytes(plain)
    with tarfile.open(old) as source, tarfile.open(new, "w:gz") as target:
        for member in source:
            if member.name.startswith("files/"):
                member.uname, member.uid = uname, 77
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    with backup.open("wb") as file:
        sealed = Sealed(file, secret)
        sealed.write(new.read_bytes())
        sealed.close()


def test_owners_are_those_of_the_name_whatever_their_number(
    site: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = make_backup(site, key)
    renamed(backup, key, "carme-portal")
    (site / "broker/sessions.json").write_text("newer")
    about, _paths, missing = check(backup, key)
    assert missing == ["account carme-portal"] and about.host
    with pytest.raises(CarmeError, match="lacks owners of files: account carme-portal") as lacking:
        restore(backup, key)
    # Services that were started on empty databases would end the sessions that run.
    assert "-e carme_awaits_restore=true" in str(lacking.value)
    assert (site / "broker/sessions.json").read_text() == "newer"
    known = pwd.getpwnam
    account = pwd.struct_passwd(("carme-portal", "x", 4711, 4711, "", "/", "/bin/false"))

    def named(name: str) -> pwd.struct_passwd:
        return account if name == "carme-portal" else known(name)

    monkeypatch.setattr(archive.pwd, "getpwnam", named)
    monkeypatch.setattr(archive.os, "geteuid", lambda: 0)
    owners: list[int] = []
    monkeypatch.setattr(archive.os, "chown", lambda _file, uid, _gid, **_more: owners.append(uid))
    assert restore(backup, key)[1] == len(owners) > 0
    assert set(owners) == {4711}


@pytest.mark.parametrize("damage", ["cut", "changed", "moved", "another key", "none"])
def test_what_was_changed_or_cut_off_is_noticed(site: Path, key: Path, tmp_path: Path, damage: str) -> None:
    (site / "broker/large").write_bytes(os.urandom(3 * PIECE))
    backup = make_backup(site, key)
    data = bytearray(backup.read_bytes())
    if damage == "cut":
        del data[31 + 4 + PIECE + 16 :]
    elif damage == "changed":
        data[PIECE] ^= 1
    elif damage == "moved":
        size = 4 + PIECE + 16
        data[31 : 31 + 2 * size] = data[31 + size : 31 + 2 * size] + data[31 : 31 + size]
    elif damage == "another key":
        key = tmp_path / "other"
        make_key(key)
    else:
        data[:3] = b"tar"
    backup.write_bytes(data)
    before = (site / "etc/carme.toml").read_text()
    (site / "etc/carme.toml").write_text(before + "# newer\n")
    with pytest.raises(CarmeError, match="not a backup of Carme" if damage == "none" else "cannot be opened"):
        restore(backup, key)
    assert (site / "etc/carme.toml").read_text().endswith("# newer\n")


def test_a_server_is_dumped_and_loaded_as_its_account_without_secrets_in_arguments(
    site: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = site / "etc/carme.toml"
    address = "postgresql://portal:pa%20ss@db.example.org:5433/carme"
    config.write_text(config.read_text().replace(f"sqlite:///{site}/portal/portal.sqlite3", address))
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(arguments: list[str], *, env: dict[str, str], **pipes: Any) -> Any:
        ran.append((arguments, env))
        if arguments[0] == "pg_dump":
            pipes["stdout"].write(b"dump")
        elif arguments[0] == "pg_restore":
            assert pipes["stdin"].read() == b"dump"
            pipes["stdout"].write(b"its statements")
        else:
            assert pipes["stdin"].read().endswith(b"its statements")
        return subprocess.CompletedProcess(arguments, 0, stderr=b"")

    monkeypatch.setattr(databases.subprocess, "run", run)
    backup = make_backup(site, key)
    restore(backup, key)
    assert [arguments[0] for arguments, _env in ran] == ["pg_dump", "pg_restore", "psql"]
    for arguments, env in ran:
        assert not any("pa ss" in word or "pa%20ss" in word for word in arguments)
        assert (env["PGHOST"], env["PGPORT"], env["PGUSER"]) == ("db.example.org", "5433", "portal")
        assert (env["PGPASSWORD"], env["PGDATABASE"]) == ("pa ss", "carme")
    ran.clear()
    restore(backup, key, site.parent / "look")
    assert not ran


#: Of a newer version: one table refers to an older one, and a type and a column are new.
NEWER = """
CREATE TABLE invitation (id serial PRIMARY KEY, person integer NOT NULL REFERENCES person);
CREATE SCHEMA IF NOT EXISTS more; CREATE TABLE more.note (text varchar);
CREATE VIEW named AS SELECT name FROM person;
ALTER TABLE person ADD COLUMN mail varchar NOT NULL DEFAULT '';
INSERT INTO person (name) VALUES ('grace'); INSERT INTO invitation (person) VALUES (2);
"""


def test_an_earlier_copy_replaces_a_database_that_a_newer_version_has_changed(
    server: str, tmp_path: Path
) -> None:
    account = pwd.getpwuid(os.getuid()).pw_name

    def ask(address: str, *statements: str) -> str:
        words = [word for each in statements for word in ("--command", each)]
        return databases.run_client(["psql", "--no-psqlrc", "-qAt", *words], address, account, "")

    def tables(address: str) -> list[str]:
        found = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname !~ '^(pg_|sql_)' ORDER BY 1"
        return ask(address, found).split()

    with new_database(server) as address:
        ask(address, "CREATE TABLE person (id serial PRIMARY KEY, name varchar)")
        ask(address, "INSERT INTO person (name) VALUES ('ada')")
        copy, cut = tmp_path / "portal.dump", tmp_path / "cut.dump"
        databases.dump_postgresql(address, copy, account)
        cut.write_bytes(copy.read_bytes()[:-20])
        ask(address, NEWER)
        with pytest.raises(CarmeError, match="pg_restore failed"):
            databases.load_postgresql(address, cut, account)
        assert tables(address) == ["invitation", "note", "person"]
        databases.load_postgresql(address, copy, account)
        assert tables(address) == ["person"]
        assert ask(address, "SELECT * FROM person").split() == ["1|ada"]
        ask(address, NEWER)  # what the migrations of the newer version do
        assert tables(address) == ["invitation", "note", "person"]


def test_only_tables_of_the_account_go_and_what_depends_on_them_is_named(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of an account whose name the server would fold, or take apart at its dot."""
    account, role = pwd.getpwuid(os.getuid()).pw_name, "First.Last"

    def ask(address: str, statements: str) -> str:
        words = ["psql", "--no-psqlrc", "-qAt", "--command", statements]
        return databases.run_client(words, address, account, "")

    with new_database(server) as admin:
        ask(admin, f'CREATE ROLE "{role}" LOGIN; GRANT CREATE ON SCHEMA public TO "{role}"')
        owner = admin.replace("//postgres@", f"//{role}@")
        try:
            ask(owner, "CREATE TABLE person (id serial PRIMARY KEY); INSERT INTO person DEFAULT VALUES")
            copy = tmp_path / "portal.dump"
            databases.dump_postgresql(owner, copy, account)
            ask(owner, "CREATE TABLE invitation (person integer REFERENCES person)")
            ask(admin, "CREATE TABLE another (); CREATE VIEW one AS SELECT FROM person")
            # The statements lie beside the copy, wherever temporary files are.
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
            databases.load_postgresql(owner, copy, account)
            monkeypatch.undo()
            assert ask(admin, "SELECT relname FROM pg_stat_user_tables ORDER BY 1").split() == [
                "another", "person",
            ]  # fmt: skip
            assert ask(admin, "SELECT FROM pg_views WHERE viewname = 'one'").split() == []
            assert ask(admin, "SELECT * FROM person").split() == ["1"]
            assert "view one" in caplog.text and "invitation" not in caplog.text
            caplog.clear()
            databases.load_postgresql(owner, copy, account)
            assert not caplog.text, "nothing went besides"
        finally:
            ask(admin, f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_the_backup_command_creates_checks_and_restores(
    site: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text("#!/bin/sh\ncat $0.states\n")
    (programs / "systemctl").chmod(0o755)
    (programs / "systemctl.states").write_text("active\ninactive\nactive\ninactive\ninactive\ninactive\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    backup, config = str(tmp_path / "b"), str(site / "etc/carme.toml")
    assert main(["key", str(key)]) == 1
    assert "cannot be made: File exists" in capsys.readouterr().err
    assert main(["create", "--key", str(key), "--config", config, backup]) == 0
    assert main(["check", "--key", str(key), "--list", backup]) == 0
    printed = capsys.readouterr().out
    assert config in printed and "It is whole, with" in printed
    assert main(["restore", "--key", str(key), backup]) == 1
    assert "These services run: carme-broker, carme-portal. Nothing was written." in capsys.readouterr().err
    (programs / "systemctl.states").write_text(6 * "inactive\n")
    assert main(["restore", "--key", str(key), backup]) == 0
    output = capsys.readouterr().out
    assert "systemctl start carme-broker" in output
    assert "On a new head" in output and "then run site.yml, without carme_awaits_restore" in output
    assert "Sessions that were started after the backup was made end" in output
    key.chmod(0o644)
    assert main(["check", "--key", str(key), backup]) == 1
    assert "Others can read the key" in capsys.readouterr().err
    key.chmod(0o600)
    key.write_text("short")
    assert main(["check", "--key", str(key), backup]) == 1
    assert json.dumps("short") not in capsys.readouterr().err


def test_databases_are_brought_forward_only(
    site: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a newer version may have tables that this one does not know; older ones need site.yml."""
    monkeypatch.setattr("carme.backup.main.require_stopped", lambda _units: None)
    monkeypatch.setattr(archive, "__version__", "0.10.0")
    backup = make_backup(site, key)
    (site / "broker/sessions.json").write_text("newer")
    monkeypatch.setattr(archive, "__version__", "0.9.2")
    assert main(["restore", "--key", str(key), str(backup)]) == 1
    refused = capsys.readouterr().err
    assert "made by Carme 0.10.0, and this host has 0.9.2. Nothing was written." in refused
    assert "Install Carme 0.10.0 or newer" in refused
    assert (site / "broker/sessions.json").read_text() == "newer"
    assert main(["restore", "--key", str(key), "--into", str(tmp_path / "look"), str(backup)]) == 0
    assert "written below" in capsys.readouterr().out
    monkeypatch.setattr(archive, "__version__", "0.11.0")
    monkeypatch.setattr("carme.backup.main.__version__", "0.11.0")
    assert main(["restore", "--key", str(key), str(backup)]) == 0
    printed = capsys.readouterr().out
    assert "made by Carme 0.10.0" in printed and "This host has 0.11.0." in printed
    assert "then run site.yml" in printed and "systemctl start carme-broker" not in printed
    assert (site / "broker/sessions.json").read_text() != "newer"


def test_after_a_restore_all_of_a_head_is_started() -> None:
    """`systemctl stop 'carme-*.service'` stops them all; what the page and the command start is the same."""
    root = Path(__file__).resolve().parents[3]
    checked = yaml.safe_load((root / "ansible/roles/validation/vars/main.yml").read_text())
    units = {name for name in checked["validation_units_by_group"]["head"] if name.startswith("carme-")}
    assert set(STARTED) == units
    assert (
        f"systemctl start {' '.join(STARTED)} {CERTIFICATE}\n" in (root / "docs/admins/backup.md").read_text()
    )


def mark(file: Path, how: str) -> bool:
    """Mark a file by `chattr`, or lift that; whether root may, and the file system knows it."""
    return subprocess.run(["chattr", how, file], capture_output=True, check=False).returncode == 0


@pytest.fixture
def log(site: Path) -> Iterator[Path]:
    """The audit log, which may be added to only."""
    file = site / "log/audit.jsonl"
    if not mark(file, "+a"):
        pytest.skip("only root may mark files, on file systems that know marks")
    yield file
    mark(file, "-a")


LOGS = pytest.mark.parametrize(
    ("there", "after", "aside"),
    [
        ("", "{}\n", []),
        ("this month's\n", "{}\n", ["this month's\n"]),
        ("{}\nsince then\n", "{}\nsince then\n", []),
        ("{}\n", "{}\n", []),
    ],
    ids=["new head", "rotated", "added to since", "the same"],
)


@LOGS
def test_no_record_of_a_log_is_lost_by_a_restore(
    site: Path, key: Path, there: str, after: str, aside: list[str]
) -> None:
    backup, log = make_backup(site, key), site / "log/audit.jsonl"
    log.write_text(there)
    restore(backup, key)
    restore(backup, key)
    assert log.read_text() == after
    assert [each.read_text() for each in log.parent.glob("*before-restore*")] == aside


@LOGS
def test_a_log_that_may_be_added_to_only_is_restored_and_stays_so(
    site: Path, key: Path, log: Path, there: str, after: str, aside: list[str]
) -> None:
    backup = make_backup(site, key)
    assert mark(log, "-a")
    log.write_text(there)
    assert mark(log, "+a")
    (site / "portal/calendar.key").unlink()
    restore(backup, key)
    assert log.read_text() == after
    assert (site / "portal/calendar.key").read_text() == "feed"
    assert not list(log.parent.glob(".carme*"))
    backups = list(log.parent.glob("*before-restore*"))
    assert [each.read_text() for each in backups] == aside
    for each in (log, *backups):
        with pytest.raises(PermissionError):
            each.write_text("")
        assert mark(each, "-a")


def test_a_mark_that_cannot_be_lifted_is_explained(
    site: Path, key: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = make_backup(site, key)
    assert mark(log, "-a")
    log.write_text("")
    assert mark(log, "+a")

    def refuse(_descriptor: int, number: int, argument: bytes) -> bytes:
        if number == append_only._SET_FLAGS:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return ioctl(_descriptor, number, argument)

    ioctl = append_only.fcntl.ioctl
    monkeypatch.setattr(append_only.fcntl, "ioctl", refuse)
    with pytest.raises(CarmeError) as caught:
        restore(backup, key)
    assert "audit.jsonl is append-only" in str(caught.value) and "chattr -a" in str(caught.value)
