"""Copies the hub's database from SQLite to PostgreSQL, all of it or nothing."""

from collections import Counter
from pathlib import Path

from jupyterhub import orm
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import SQLAlchemyError

from carme.backup.moving import MoveRefused, refuse_filled
from carme_spawner.hub_config import with_driver

__all__ = ["move_database"]

#: Which of JupyterHub's layouts the tables have, as JupyterHub itself notes it.
LAYOUT = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


def move_database(file: Path, target: str) -> dict[str, int]:
    """Copy all rows to an empty database on a server; the rows of each table.

    The old database cannot be written to meanwhile and stays as it is. Whatever fails leaves the new one
    as it was.

    Args:
        file: The database of SQLite.
        target: The new one's address, `postgresql://...`.

    Raises:
        MoveRefused: The old one is no hub's or of another version of JupyterHub, the new one has rows, cannot
            be reached, or does not take a value; or what it has afterwards differs.
    """
    try:
        return _move(create_engine(f"sqlite:///{file}"), create_engine(with_driver(target)))
    except orm.DatabaseSchemaMismatch:
        raise MoveRefused(
            "The hub's database is of another version of JupyterHub than this program.",
            "Run site.yml first. Nothing has been changed.",
        ) from None
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0].removesuffix(".")
        raise MoveRefused(f"The databases say: {reason}.", "Nothing has been changed.") from None


def _move(old: Engine, new: Engine) -> dict[str, int]:
    try:
        # A file without tables would get some when it is opened next.
        if not {LAYOUT.name, "users"} <= set(inspect(old).get_table_names()):
            raise MoveRefused(
                f"{old.url.database} is not the database of a hub: it lacks its tables.",
                "Correct 'database' in [hub] of carme.toml. Nothing has been changed.",
            )
        orm.check_db_revision(old)
        with old.connect() as source, new.begin() as copy:
            source.exec_driver_sql("BEGIN IMMEDIATE")  # nobody else writes until it ends
            _require_empty(copy)
            return _copy_all(source, copy)
    finally:
        old.dispose()
        new.dispose()


def _require_empty(copy: Connection) -> None:
    quote = copy.dialect.identifier_preparer.quote
    names = set(inspect(copy).get_table_names()) - {LAYOUT.name}
    refuse_filled(
        [name for name in names if copy.execute(text(f"SELECT 1 FROM {quote(name)} LIMIT 1")).first()]
    )


def _copy_all(source: Connection, copy: Connection) -> dict[str, int]:
    tables = orm.Base.metadata.sorted_tables
    orm.Base.metadata.create_all(copy)
    LAYOUT.create(copy, checkfirst=True)
    copy.execute(LAYOUT.delete())
    counts = {table.name: _copy(table, source, copy) for table in [LAYOUT, *tables]}
    for table in tables:
        keys = list(table.primary_key.columns)
        if counts[table.name] and len(keys) == 1 and isinstance(keys[0].type, Integer):
            sequence = func.pg_get_serial_sequence(
                copy.dialect.identifier_preparer.format_table(table), keys[0].name
            )
            copy.execute(select(func.setval(sequence, select(func.max(keys[0])).scalar_subquery())))
    return counts


def _copy(table: Table, source: Connection, copy: Connection) -> int:
    """Copy a table's rows and compare them; how many there are."""
    rows = [dict(row) for row in source.execute(select(table)).mappings()]
    if rows:
        copy.execute(insert(table), rows)
    there = [dict(row) for row in copy.execute(select(table)).mappings()]
    if Counter(map(repr, there)) != Counter(map(repr, rows)):
        raise MoveRefused(
            f"The rows of {table.name} are not the same in the new database.",
            "Nothing has been changed. This is a fault of Carme: report it.",
        )
    return len(rows)
