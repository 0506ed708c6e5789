"""Metrics that are declared in tables: a row has a metric's name, its text, and what its value is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

__all__ = ["Families", "LabelledValues", "Table", "Value", "single"]

S = TypeVar("S")


class Value(NamedTuple, Generic[S]):
    """A metric with one value of each source; None: the source does not report it."""

    name: str
    text: str
    value: Callable[[S], float | None]
    is_counter: bool = False


class LabelledValues(NamedTuple, Generic[S]):
    """A metric with several values of each source, distinguished by one more label."""

    name: str
    text: str
    label: str
    values: Callable[[S], Mapping[Any, float]]
    is_counter: bool = False


#: The metrics of one kind of source.
Table: TypeAlias = Sequence[Value[S] | LabelledValues[S]]


class Families(Generic[S]):
    """The metrics of a table.

    Args:
        prefix: What stands before each name.
        labels: The names of the labels that all of them have.
        table: The metrics.
    """

    def __init__(self, prefix: str, labels: Sequence[str], table: Table[S]) -> None:
        self._labels = labels
        self._families: list[Metric] = []
        self._values: list[tuple[Callable[[S], float | None], str, Metric]] = []
        self._labelled: list[tuple[Callable[[S], Mapping[Any, float]], str, str, Metric]] = []
        for row in table:
            kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
            family = kind(f"{prefix}{row.name}", row.text)
            name = f"{family.name}_total" if row.is_counter else family.name
            self._families.append(family)
            if isinstance(row, Value):
                self._values.append((row.value, name, family))
            else:
                self._labelled.append((row.values, row.label, name, family))

    def add(self, labels: Sequence[str], source: S) -> None:
        """What a source reports.

        Args:
            labels: The labels' values, in the order of their names.
            source: What the table's rows read.
        """
        # Samples share their labels, which are written once for all of them.
        shared = dict(zip(self._labels, labels, strict=True))
        for read, name, family in self._values:
            if (value := read(source)) is not None:
                family.samples.append(Sample(name, shared, value))
        for read_all, label, name, family in self._labelled:
            for which, value in read_all(source).items():
                family.samples.append(Sample(name, shared | {label: str(which)}, value))

    def all(self) -> Iterable[Metric]:
        """The metrics, in the table's order."""
        return self._families


def single(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    family = GaugeMetricFamily(name, text)
    family.add_metric((), value)
    return family
