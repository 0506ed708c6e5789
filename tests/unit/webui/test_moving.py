"""`carme-portal move-database`: from a file of SQLite to a real PostgreSQL server, all of it or nothing."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from real_postgresql import module_server, new_database  # noqa: F401  # a fixture

from .conftest import FOLDER

#: What runs in a portal's own process, on the database of its configuration.
_AS_PORTAL = "import django; django.setup(); from carme_webui.accounts.models import User\n"
FILL = """
from datetime import timedelta
from django.core.management import call_command
from django.utils import timezone
from django.contrib.sessions.backends.db import SessionStore
from carme_webui.bookings.models import Booking
from carme_webui.jobs.models import Mirror
from carme_webui.projects.models import Membership, Project
from carme_webui.sessions.models import Session

call_command("migrate", interactive=False, verbosity=0)
now = timezone.now()
root = User.objects.create_user("root1", password="correct horse battery", is_staff=True)
User.objects.bulk_create(  # more than one batch
    User(username=f"user{number}", first_name="Zoë \U0001f9ea") for number in range(600)
)
User.objects.filter(username__in=["user3", "user599"]).delete()
project = Project.objects.create(name="vision", title="Vision", gpu_types={"a100": 4, "h100": None})
Membership.objects.create(project=project, user=root, manager=True)
Booking.objects.create(
    owner=root, partition="gpu", gpu_type="a100", gpus_per_node=1, node_names=["n1", "n2"], project=project,
    start=now, end=now + timedelta(hours=1), state="approved", session_stage=[{"source": "/a", "size": 0.25}],
)
Session.objects.create(name="s0000000a", owner=root, options={"title": "100 %s"}, reported={"marks": []})
Mirror.load()
store = SessionStore(); store["who"] = "root1"; store.create()
"""
READ_ROWS = """
from django.core.management import call_command
from carme_webui.bookings.models import Booking
from carme_webui.sessions.models import Session

root = User.objects.get(username="root1")
assert root.check_password("correct horse battery") and root.is_staff
assert User.objects.get(username="user7").first_name == "Zoë \U0001f9ea"
booking = Booking.objects.get()
assert (booking.node_names, booking.session_stage) == (["n1", "n2"], [{"source": "/a", "size": 0.25}])
assert booking.project.gpu_types == {"a100": 4, "h100": None}
assert Session.objects.get().options == {"title": "100 %s"}
call_command("migrate", check_unapplied=True)
last = max(User.objects.values_list("pk", flat=True))
assert User.objects.create(username="new").pk == last + 1
"""


@pytest.fixture
def target(server: str) -> Iterator[str]:
    """An empty database."""
    with new_database(server) as address:
        yield address


@dataclass
class Site:
    """A portal's configuration with its database, a file of SQLite."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "portal.sqlite3"

    def configure(self, address: str) -> None:
        text = re.sub(r"(?m)^database = .*$", f'database = "{address}"', (FOLDER / "carme.toml").read_text())
        (self.folder / "carme.toml").write_text(text)

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        known = {
            "CARME_CONFIG": str(self.folder / "carme.toml"),
            "DJANGO_SETTINGS_MODULE": "carme_webui.settings",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        return subprocess.run(
            [sys.executable, *command],
            env=os.environ | known,
            capture_output=True,
            text=True,
            check=False,
        )

    def portal(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.run("-m", "carme_webui.main", *words)

    def does(self, script: str) -> None:
        done = self.run("-c", _AS_PORTAL + script)
        assert done.returncode == 0, done.stderr

    def change(self, statement: str) -> None:
        with closing(sqlite3.connect(self.file)) as opened:
            opened.execute(statement)
            opened.commit()

    def dump(self) -> list[str]:
        with closing(sqlite3.connect(self.file)) as opened:
            return list(opened.iterdump())

    def refused(self, target: str, why: str) -> None:
        before = self.dump()
        done = self.portal("move-database", target)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert re.search(why, done.stderr), done.stderr
        assert self.dump() == before


def new_site(folder: Path) -> Site:
    site = Site(folder)
    site.configure(f"sqlite:///{site.file}")
    return site


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a portal that was used for a while."""
    site = new_site(tmp_path_factory.mktemp("filled"))
    site.does(FILL)
    with closing(sqlite3.connect(site.file)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return site.file


@pytest.fixture
def site(filled: Path, tmp_path: Path) -> Site:
    shutil.copy(filled, tmp_path / "portal.sqlite3")
    return new_site(tmp_path)


def counts(target: str) -> dict[str, int]:
    """The rows of each table of the server's database."""
    with psycopg.connect(target) as opened:
        tables = [
            row[0] for row in opened.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ]
        rows = {}
        for table in tables:
            found = opened.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table)))
            rows[table] = (found.fetchone() or (0,))[0]
    return rows


@pytest.fixture(scope="module")
def moved(server: str, filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database that has taken the rows of `filled`."""
    folder = tmp_path_factory.mktemp("moved")
    shutil.copy(filled, folder / "portal.sqlite3")
    site = new_site(folder)
    before = site.dump()
    with new_database(server) as address:
        done = site.portal("move-database", address)
        assert done.returncode == 0, done.stderr
        assert f"Set carme_portal_database to {address} and run site.yml." in done.stdout
        assert site.dump() == before
        yield address


def test_a_database_with_rows_is_refused(site: Site, moved: str, target: str) -> None:
    before = counts(moved)
    site.refused(moved, r"The new database has rows already, in \w+")
    assert counts(moved) == before
    with psycopg.connect(target) as opened:
        opened.execute("CREATE TABLE others (text text)")
        opened.execute("INSERT INTO others VALUES ('x')")
    site.refused(target, "rows already, in others")
    assert counts(target) == {"others": 1}


def test_all_rows_move_and_the_portal_goes_on_with_them(site: Site, moved: str) -> None:
    with closing(sqlite3.connect(site.file)) as opened:
        tables = [row[0] for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        old = {
            table: opened.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
            for table in tables
            if not table.startswith("sqlite_") and table != "portal_cache"
        }
    new = counts(moved)
    assert new.pop("portal_cache") == 0
    assert new == old and old["accounts_user"] == 599 and old["django_session"] == 1
    site.configure(moved)
    site.does(READ_ROWS)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (
            "UPDATE bookings_booking SET title = printf('%081d', 0)",
            r"PostgreSQL does not take a row of bookings_booking: value too long .*\(80\)",
        ),
        (
            "UPDATE accounts_user SET first_name = 'a' || char(0)",
            "does not take a row of accounts_user: .*NUL",
        ),
        ("UPDATE projects_membership SET user_id = 99999", "The databases say: .*violates foreign key"),
        (
            "DELETE FROM django_migrations WHERE app = 'bookings' AND name LIKE '0007%'",
            "of an earlier version",
        ),
    ],
)
def test_what_fails_leaves_the_server_as_it_was(site: Site, target: str, statement: str, why: str) -> None:
    site.change(statement)
    site.refused(target, why)
    assert counts(target) == {}


def test_a_server_that_is_not_there_is_named(site: Site, tmp_path: Path) -> None:
    site.refused(f"postgresql:///x?host={tmp_path}", "The databases say: ")
    site.refused("postgresql://carme:secret@db/x", "The address holds a password")
