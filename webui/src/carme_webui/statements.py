"""Questions that are asked for every page: their SQL is made once.

Django takes ten times as long to make the SQL of a small question as the database takes to answer it.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Expression, Field, Model, QuerySet

__all__ = ["Given", "Statement"]

Row = TypeVar("Row", bound=Model)


class Given(Expression):
    """Stands for a value that is given whenever the question is asked.

    Args:
        name: By which it is given.
        field: What kind of value it is.
    """

    def __init__(self, name: str, field: "Field[Any, Any]") -> None:
        super().__init__(output_field=field)
        self.name = name

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        return "%s", (self,)


class Statement(Generic[Row]):
    """A question for rows of one model, without those that they refer to.

    Args:
        make: Makes the question, with `Given` for what differs each time. It is called once.
    """

    def __init__(self, make: "Callable[[], QuerySet[Row]]") -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[type[Row], str, tuple[Any, ...]]:
        requested = self._make()
        return requested.model, *requested.query.sql_with_params()

    def rows(self, **given: Any) -> list[Row]:
        """The rows.

        Args:
            given: A value for each `Given`.
        """
        model, sql, params = self._made
        return list(model._default_manager.raw(sql, _values(params, given)))

    def values(self, **given: Any) -> list[tuple[Any, ...]]:
        """What a question with `values_list` finds; databases differ in what is not a number or a text."""
        _model, sql, params = self._made
        with connection.cursor() as cursor:
            cursor.execute(sql, _values(params, given))
            return cursor.fetchall()


def _values(params: Iterable[Any], given: dict[str, Any]) -> list[Any]:
    found = [given[param.name] if isinstance(param, Given) else param for param in params]
    adapt = connection.ops.adapt_datetimefield_value
    return [adapt(value) if isinstance(value, datetime) else value for value in found]
