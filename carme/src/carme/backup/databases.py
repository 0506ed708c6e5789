"""Copies of databases that are in use."""

import contextlib
import logging
import os
import pwd
import re
import sqlite3
import subprocess
import tempfile
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

from carme.errors import CarmeError

__all__ = ["copy_sqlite", "dump_postgresql", "is_intact", "load_postgresql", "run_client"]

_log = logging.getLogger(__name__)

#: Those of the account that asks, whichever schema it has them in, but for those of extensions. All in one
#: statement: then the server's notices name only what goes besides.
_DROP_TABLES = """
SET client_min_messages = notice;
DO $$
DECLARE present text;
BEGIN
    SELECT string_agg(format('%I.%I', nspname, relname), ', ') INTO present
        FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE relkind IN ('r', 'p') AND relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
        AND nspname <> 'information_schema' AND nspname !~ '^pg_'
        AND NOT EXISTS (
            SELECT FROM pg_depend
            WHERE classid = 'pg_class'::regclass AND objid = pg_class.oid AND deptype = 'e'
        );
    IF present IS NOT NULL THEN
        EXECUTE 'DROP TABLE ' || present || ' CASCADE';
    END IF;
END $$;
SET client_min_messages = warning;
"""


def copy_sqlite(database: Path, copy: Path) -> None:
    """Copy a database of SQLite as of one moment, whatever is written meanwhile. Raises CarmeError."""
    # A name may hold what means something in an address, and would then name another file, to be created.
    address = f"{database.absolute().as_uri()}?mode=ro"
    try:
        with (
            contextlib.closing(sqlite3.connect(address, uri=True)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise CarmeError(
            f"The database {database} cannot be copied: {error}.",
            "Check that it is not damaged and that its disk has space.",
        ) from None


def is_intact(database: Path) -> bool:
    """Whether a copy of a database of SQLite is whole."""
    try:
        with contextlib.closing(sqlite3.connect(database)) as opened:
            return opened.execute("PRAGMA quick_check").fetchone() == ("ok",)
    except sqlite3.Error:
        return False


def dump_postgresql(address: str, copy: Path, account: str) -> None:
    """Copy a database of a server as of one moment. Raises CarmeError."""
    # Through pipes, as the account may not get to where the copy is.
    with copy.open("wb") as file:
        _run(["pg_dump", "--format=custom", "--no-password"], address, account, stdout=file)


def load_postgresql(address: str, copy: Path, account: str) -> None:
    """Make a database of a server what it was in the copy, or leave it as it is. Raises CarmeError.

    A newer version may have made tables since, or before a restore onto a new head: they would keep older
    ones that they refer to from going, and be in the way of the migrations that make them. So all go.
    What depends on them goes, too, also of other owners, and is logged. The statements are longer than the
    copy, and lie beside it meanwhile.
    """
    with (
        copy.open("rb") as file,
        tempfile.TemporaryFile(dir=copy.parent) as script,
        tempfile.TemporaryFile(dir=copy.parent) as shown,
    ):
        script.write(_DROP_TABLES.encode())
        script.flush()
        options = ["--clean", "--if-exists", "--no-owner", "--file=-"]
        _run(["pg_restore", *options], address, account, stdin=file, stdout=script)
        script.seek(0)
        options = ["--no-psqlrc", "--quiet", "--no-password", "--set=ON_ERROR_STOP=1"]
        reported = _run(
            ["psql", *options, "--single-transaction", "--file=-"],
            address, account, stdin=script, stdout=shown,
        )  # fmt: skip
    if besides := _reported_for_tables(reported):
        _log.warning("What depended on the database's tables was removed with them:\n%s", besides)


def _reported_for_tables(reported: str) -> str:
    """What psql reported for _DROP_TABLES, with which the statements begin; it numbers their lines."""
    _, *parts = re.split(r"^psql:[^\n]*?:(\d+): ", reported, flags=re.MULTILINE)
    last = _DROP_TABLES.count("\n")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return "\n".join(text.strip() for number, text in pairs if int(number) <= last)


def _environment(address: str) -> dict[str, str]:
    """How the server is reached. Not as arguments: others see those."""
    parts = urlsplit(address)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    known = {
        "PGHOST": parts.hostname or query.get("host"),
        "PGPORT": str(parts.port) if parts.port else query.get("port"),
        "PGUSER": unquote(parts.username) if parts.username else None,
        "PGPASSWORD": unquote(parts.password) if parts.password else None,
        "PGDATABASE": unquote(parts.path.strip("/")),
        "PGSSLMODE": query.get("sslmode"),
    }
    return {name: value for name, value in known.items() if value}


def run_client(
    arguments: list[str], address: str, account: str, text: str, timeout: float | None = None
) -> str:
    """Run a program of PostgreSQL's with a text as its input; what it prints. Raises CarmeError."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as shown:
        given.write(text.encode())
        given.seek(0)
        _run(arguments, address, account, stdin=given, stdout=shown, timeout=timeout)
        shown.seek(0)
        return shown.read().decode(errors="replace")


def _run(
    arguments: list[str],
    address: str,
    account: str,
    stdin: BinaryIO | None = None,
    stdout: BinaryIO | None = None,
    timeout: float | None = None,
) -> str:
    """Run a program of PostgreSQL as the account that owns the database, where we are root; its stderr."""
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"} | _environment(address)
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        owner = pwd.getpwnam(account)
        environment["HOME"] = owner.pw_dir
        identity = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    try:
        done = subprocess.run(
            arguments,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            cwd="/",
            timeout=timeout,
            **identity,
        )
    except subprocess.TimeoutExpired:
        raise CarmeError(
            f"The database server did not answer {arguments[0]} within {timeout:g} s.",
            "Check that the server runs and can be reached from this host.",
        ) from None
    except OSError as error:
        raise CarmeError(
            f"{arguments[0]} cannot be run: {error.strerror}.", "Install PostgreSQL's client programs."
        ) from None
    reported = done.stderr.decode(errors="replace").strip()
    if done.returncode:
        raise CarmeError(
            f"{arguments[0]} failed: {reported[:500] or 'it gave no reason'}.",
            "Check that the server runs and accepts this account.",
        )
    return reported
