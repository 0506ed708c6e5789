"""The hub's database moves from a file of SQLite to a real PostgreSQL server, all of it or nothing."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from jupyterhub import orm
from sqlalchemy import create_engine, inspect

from carme_spawner.hub import main
from carme_spawner.hub_config import with_driver
from real_postgresql import module_server, new_database  # noqa: F401  # a fixture

MODELS: Any = orm  # whose attributes are typed as columns, not as what rows have
#: Calls the program with a site's configuration and a target, which it refuses with a sentence.
Refused = Callable[[Path, str, str], None]


@pytest.fixture
def target(server: str) -> Iterator[str]:
    """An empty database."""
    with new_database(server) as address:
        yield address


@pytest.fixture
def site(tmp_path: Path, empty_database: Path) -> Path:
    """The configuration of a site whose hub has two users, a running server, roles and tokens."""
    shutil.copyfile(empty_database, tmp_path / "hub.sqlite")
    with orm.new_session_factory(f"sqlite:///{tmp_path}/hub.sqlite")() as database:
        group = MODELS.Group(name="research")
        for name in ("ada", "zoë"):
            user = MODELS.User(name=name, groups=[group])
            database.add(user)
            record = MODELS.Server(proto="https", ip="10.77.0.11", port=41000, base_url=f"/user/{name}/")
            spawner = MODELS.Spawner(
                user=user, name="s0000000a", state={"job_id": 7, "key": "ab"}, server=record
            )
            spawner.user_options = {"title": "Zoë's 100 %s", "nodes": 2}
            database.add(spawner)
        database.add(MODELS.OAuthClient(identifier="jupyterhub-user-ada", secret="x", redirect_uri="/"))
        database.commit()
        user = database.query(MODELS.User).filter_by(name="ada").one()
        database.add(MODELS.APIToken(user=user, hashed="sha512:1:salt:ab", prefix="abcd", scopes=["self"]))
        database.commit()
    configuration = tmp_path / "carme.toml"
    configure(configuration, f"sqlite:///{tmp_path}/hub.sqlite")
    return configuration


def configure(file: Path, address: str) -> None:
    file.write_text(
        f'[site]\nurl = "https://carme.example.org"\n[slurm]\ncluster = "x"\n[hub]\ndatabase = "{address}"\n'
    )


def move(site: Path, target: str) -> "subprocess.CompletedProcess[str]":
    """Call the program in a process of its own, as a user does."""
    command = [sys.executable, "-m", "carme_spawner.hub", "--config", str(site), "--move-database", target]
    known = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONPROFILEIMPORTTIME": "1"}
    return subprocess.run(command, env=os.environ | known, capture_output=True, text=True, check=False)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Calls the program in this process: to import JupyterHub anew takes seconds."""

    def refused(site: Path, target: str, why: str) -> None:
        words = ["carme-hub", "--config", str(site), "--move-database", target]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as ended:
                main()
        assert why in str(ended.value.code)

    return refused


def tables(target: str) -> list[str]:
    engine = create_engine(with_driver(target))
    try:
        return inspect(engine).get_table_names()
    finally:
        engine.dispose()


def test_the_hub_finds_its_users_servers_and_tokens(site: Path, target: str, refused: Refused) -> None:
    done = move(site, target)
    assert done.returncode == 0, done.stderr
    assert f"Set carme_hub_database to {target} and run site.yml." in done.stdout
    assert re.search(r"\| +jsonschema$", done.stderr, re.MULTILINE), "what a start imports is listed"
    assert "rfc3987_syntax.syntax_helpers" not in done.stderr, "to compile that takes a second"
    # As the hub itself opens it: it looks at the version of the tables first.
    with orm.new_session_factory(with_driver(target))() as database:
        users = {user.name: user for user in database.query(MODELS.User)}
        assert list(users) == ["ada", "zoë"]
        for name, user in users.items():
            (spawner,) = user._orm_spawners
            assert (spawner.state, spawner.user_options["title"]) == (
                {"job_id": 7, "key": "ab"},
                "Zoë's 100 %s",
            )
            assert (spawner.server.ip, spawner.server.base_url) == ("10.77.0.11", f"/user/{name}/")
            assert [group.name for group in user.groups] == ["research"]
        (token,) = users["ada"].api_tokens
        assert (token.hashed, token.scopes) == ("sha512:1:salt:ab", ["self"])
        database.add(MODELS.User(name="new"))
        database.commit()
        assert database.query(MODELS.User).filter_by(name="new").one().id == 3
        database.get_bind().dispose()  # pyright: ignore[reportAttributeAccessIssue]  an engine here
    why = "The new database has rows already, in "
    refused(site, target, why)
    done = move(site, target)
    assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_fails_leaves_both_as_they_were(site: Path, target: str, refused: Refused) -> None:
    file = site.with_name("hub.sqlite")
    with closing(sqlite3.connect(file)) as opened:
        opened.execute("UPDATE groups SET name = printf('%0300d', 0)")
        opened.commit()
        before = list(opened.iterdump())
    refused(site, target, "The databases say: value too long for type character varying(255).")
    assert tables(target) == []
    with closing(sqlite3.connect(file)) as opened:
        opened.execute("UPDATE groups SET name = 'research'")
        opened.execute("UPDATE alembic_version SET version_num = 'earlier'")
        opened.commit()
    refused(site, target, "The hub's database is of another version of JupyterHub than this program.")
    assert tables(target) == []
    refused(site, "postgresql://hub:secret@db/x", "The address holds a password")
    with closing(sqlite3.connect(file)) as opened:
        assert len(list(opened.iterdump())) == len(before)


@pytest.mark.parametrize("content", ["nothing", "others"])
def test_a_file_that_is_no_hubs_database_is_not_written_to(
    site: Path, target: str, refused: Refused, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(file)) as opened:
        if content == "others":
            opened.execute("CREATE TABLE recipes (name TEXT)")
        opened.commit()
    file.touch()
    before = file.read_bytes()
    configure(site, f"sqlite:///{file}")
    refused(site, target, f"{file} is not the database of a hub")
    assert file.read_bytes() == before and tables(target) == []
