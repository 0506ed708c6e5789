"""Which moves of a database from SQLite to PostgreSQL are refused before anything is opened."""

import os
from pathlib import Path

import pytest

from carme.backup import services
from carme.backup.moving import MoveRefused, check_move, refuse_filled
from carme.config import Settings
from carme.errors import CarmeError


def site(address: str) -> Settings:
    """A site whose portal and hub have this database."""
    database = {"database": address}
    return Settings.model_validate(
        {"site": {"url": "https://carme.example.org"}, "slurm": {"cluster": "try"}, "portal": database}
        | {"hub": database}
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database, on a host whose services are as the file `states` says."""
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\nshift\nfor unit; do cat {tmp_path}/$unit; done\n")
    (tmp_path / "systemctl").chmod(0o755)
    for unit in ("carme-portal", "carme-sync", "carme-worker", "carme-beat", "carme-hub"):
        (tmp_path / unit).write_text("inactive\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "x.sqlite3").write_text("")
    return tmp_path / "x.sqlite3"


@pytest.mark.parametrize("part", ["hub", "portal"])
def test_a_database_may_move_while_its_services_are_stopped(part: str, file: Path) -> None:
    settings = site(f"sqlite:///{file}")
    running_part = {"hub": "portal", "portal": "hub"}[part]
    (file.parent / f"carme-{running_part}").write_text("active\n")
    for target in ("postgresql:///carme", "postgresql://carme@db.example:5433/carme?sslmode=require"):
        assert check_move(settings, part, target) == file  # type: ignore[arg-type]
    (file.parent / f"carme-{part}").write_text("active\n")
    with pytest.raises(CarmeError, match=f"These services run: carme-{part}. Nothing was written."):
        check_move(settings, part, "postgresql:///carme")  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["activating", "deactivating", "reloading"])
def test_a_service_between_two_starts_runs(state: str, file: Path) -> None:
    (file.parent / "carme-worker").write_text(f"{state}\n")
    with pytest.raises(CarmeError, match="These services run: carme-worker"):
        check_move(site(f"sqlite:///{file}"), "portal", "postgresql:///carme")


def test_services_unknown_to_systemd_may_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "systemctl").write_text("#!/bin/sh\necho 'Connection timed out.' >&2\nexit 1\n")
    settings = site(f"sqlite:///{file}")
    monkeypatch.setattr(services, "SYSTEMD", file.parent / "none")
    assert check_move(settings, "hub", "postgresql:///carme") == file
    monkeypatch.setattr(services, "SYSTEMD", file.parent)
    with pytest.raises(CarmeError, match=r"does not say whether carme-hub run: Connection timed out\. "):
        check_move(settings, "hub", "postgresql:///carme")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("postgresql://carme:secret@db/x", "holds a password, which other users of this host could read"),
        ("postgresql://db/x?password=secret", "holds a password"),
        ("mysql://db/x", "is not an address of a database on a server"),
        ("postgresql://db", "is not an address of a database on a server"),
        ("postgresql://u@db:54x2/n", "is not an address of a database on a server"),
        ("postgresql://[::1/n", "is not an address of a database on a server"),
        ("sqlite:////x", "is not an address of a database on a server"),
    ],
)
def test_wrong_targets_of_a_move_are_refused(target: str, why: str, file: Path) -> None:
    with pytest.raises(MoveRefused, match=why) as caught:
        check_move(site(f"sqlite:///{file}"), "portal", target)
    assert "secret" not in str(caught.value)


def test_there_must_be_something_to_move(file: Path) -> None:
    with pytest.raises(MoveRefused, match="The database of the hub is on a server already"):
        check_move(site("postgresql://carme@db/x"), "hub", "postgresql:///carme")
    with pytest.raises(MoveRefused, match=r"There is no database .*none"):
        check_move(site(f"sqlite:///{file.parent}/none"), "portal", "postgresql:///carme")


def test_a_new_database_has_no_rows() -> None:
    refuse_filled([])
    with pytest.raises(MoveRefused, match="has rows already, in a, b, c, d, e"):
        refuse_filled(["f", "e", "d", "c", "b", "a"])
