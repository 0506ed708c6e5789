"""Copies the portal's database from SQLite to PostgreSQL, all of it or nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from django.apps import apps
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import Error, connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.models import Field, Model

from carme.backup.moving import MoveRefused, refuse_filled
from carme_webui.settings import database_of

__all__ = ["move_database"]

OLD, NEW = "old", "default"  # migrations may look at the default one, whatever they are given
BATCH = 500  # rows that are read, written and compared at once
#: What `migrate` writes into an empty database. Rate limits, the cache's rows, begin anew.
WRITTEN_BY_MIGRATE = {"django_migrations", "django_content_type", "auth_permission", "portal_cache"}

_Row = tuple[Any, ...]


def move_database(target: str) -> dict[str, int]:
    """Copy all rows to an empty database on a server; the rows of each table.

    The old database cannot be written to meanwhile and stays as it is. Whatever fails leaves the new one
    as it was.

    Args:
        target: Its address, `postgresql://...`.

    Raises:
        MoveRefused: The old one is of an earlier version, the new one has rows, cannot be reached, or does
            not take a value; or what it has afterwards differs.
    """
    try:
        with _opened(target):
            _require_current()
            # On SQLite a transaction begins with the lock of a writer: nobody else writes until it ends.
            with transaction.atomic(using=OLD), transaction.atomic(using=NEW):
                _require_empty()
                call_command("migrate", database=NEW, interactive=False, verbosity=0)
                return _copy_all()
    except Error as error:
        raise MoveRefused(f"The databases say: {_reason(error)}", "Nothing has been changed.") from None


@contextmanager
def _opened(target: str) -> Iterator[None]:
    """The new database as the default one, and the old one beside it; for this thread, for a while."""
    entry, before = database_of(target), connections.databases[NEW]
    entry["OPTIONS"].pop("pool", None)
    new = connections.configure_settings({NEW: entry})[NEW]
    connections[NEW].close()
    del connections[NEW]
    connections.databases.update({NEW: new, OLD: before})
    try:
        yield
    finally:
        for name in (OLD, NEW):
            connections[name].close()
            del connections[name]
        connections.databases[NEW] = before
        del connections.databases[OLD]


def _require_current() -> None:
    executor = MigrationExecutor(connections[OLD])
    if executor.migration_plan(executor.loader.graph.leaf_nodes()):
        raise MoveRefused(
            "The portal's database is of an earlier version than this program.", "Run site.yml first."
        )


def _require_empty() -> None:
    connection = connections[NEW]
    with connection.cursor() as cursor:
        filled = []
        for table in set(connection.introspection.table_names(cursor)) - WRITTEN_BY_MIGRATE:
            cursor.execute(f"SELECT 1 FROM {connection.ops.quote_name(table)} LIMIT 1")
            if cursor.fetchone():
                filled.append(table)
    refuse_filled(filled)


def _copy_all() -> dict[str, int]:
    connection = connections[NEW]
    models = [
        model
        for model in apps.get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy
    ]
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")  # tables come in any order; migrations change that
        for model in models:  # those that migrate made, which have other numbers
            cursor.execute(f"DELETE FROM {connection.ops.quote_name(model._meta.db_table)}")
        counts = {model._meta.db_table: _copy(model) for model in models}
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # rows that point to none are found now
        for statement in connection.ops.sequence_reset_sql(no_style(), models):
            cursor.execute(statement)
    for model in models:
        _compare(model, counts[model._meta.db_table])
    return counts


def _copy(model: type[Model]) -> int:
    """Copy a table's rows as they are, without what models do when they are saved; how many there are."""
    connection, fields, count = connections[NEW], _fields(model), 0
    quote = connection.ops.quote_name
    columns = ", ".join(quote(str(field.column)) for field in fields)
    places = ", ".join(["%s"] * len(fields))
    insert = f"INSERT INTO {quote(model._meta.db_table)} ({columns}) VALUES ({places})"
    with connection.cursor() as cursor:
        for batch in _batches(_rows(model, OLD).iterator(BATCH)):
            values = [
                [field.get_db_prep_save(value, connection) for field, value in zip(fields, row, strict=True)]
                for row in batch
            ]
            try:
                cursor.executemany(insert, values)
            except (Error, ValueError) as error:
                raise MoveRefused(
                    f"PostgreSQL does not take a row of {model._meta.db_table}: {_reason(error)}",
                    "Correct the row in the old database. Nothing has been changed.",
                ) from None
            count += len(batch)
    return count


def _compare(model: type[Model], copied: int) -> None:
    """Raise MoveRefused where the new table does not have the same rows."""
    fields = _fields(model)
    key = next(place for place, field in enumerate(fields) if field.primary_key)
    same = _rows(model, NEW).count() == copied
    for batch in _batches(_rows(model, OLD).iterator(BATCH)) if same else ():
        there = {row[key]: row for row in _rows(model, NEW).filter(pk__in=[row[key] for row in batch])}
        same = same and all(there.get(row[key]) == row for row in batch)
    if not same:
        raise MoveRefused(
            f"The rows of {model._meta.db_table} are not the same in the new database.",
            "Nothing has been changed. This is a fault of Carme: report it.",
        )


def _fields(model: type[Model]) -> Sequence["Field[Any, Any]"]:
    return [field for field in model._meta.local_concrete_fields if not field.generated]


def _rows(model: type[Model], database: str) -> Any:
    names = [field.attname for field in _fields(model)]
    return model._base_manager.using(database).order_by("pk").values_list(*names)


def _batches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    while batch := list(islice(rows, BATCH)):
        yield batch


def _reason(error: Exception) -> str:
    """What the server says, in one line."""
    return f"{str(error).strip().splitlines()[0].removesuffix('.')}." if str(error).strip() else "nothing."
