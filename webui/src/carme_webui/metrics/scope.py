"""Which series somebody may see, and queries that are held to them.

A query is parsed, and what Prometheus gets is written anew from the parsed form, each selector with the
matcher of what may be seen. Nothing of the text goes through as it came, and what this module does not know
how to write is refused. Grammar: Prometheus, "Querying basics" and "Operators".
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import promql_parser as promql

from carme.errors import InvalidRequest

__all__ = ["Scope"]

LONGEST = 8192  # characters of a query
DEEPEST = 40  # nested brackets, and signs: the parser's time and stack grow with them
#: Functions that look at series which no selector of theirs names.
_FORBIDDEN = frozenset({"info"})
_OPERATORS = frozenset(
    ["+", "-", "*", "/", "%", "^", "atan2", "==", "!=", ">", "<", ">=", "<=", "and", "or", "unless"]
)
_AGGREGATIONS = frozenset(
    [
        "sum",
        "min",
        "max",
        "avg",
        "group",
        "stddev",
        "stdvar",
        "count",
        "count_values",
        "bottomk",
        "topk",
        "quantile",
        "limitk",
        "limit_ratio",
    ]
)


@dataclass(frozen=True)
class Scope:
    """Series whose label has a value; an empty label: all series."""

    label: str = ""
    value: str = ""

    @classmethod
    def of_user(cls, name: str) -> "Scope":
        """The series of one user's jobs."""
        return cls("user", name)

    @classmethod
    def of_account(cls, name: str) -> "Scope":
        """The series of the jobs that one account pays for."""
        return cls("account", name)

    def query(self, text: str) -> str:
        """The query, about the series of this scope alone.

        Raises:
            InvalidRequest: It is not PromQL, or asks for what cannot be held to the scope.
        """
        return self._written(_parsed(text)) if self.label else text

    def selector(self, text: str = "") -> str:
        """A series selector (`match[]`), as `query`; of an empty one: everything in the scope."""
        if not self.label:
            return text or '{__name__=~".+"}'
        if not text.strip():
            return f"{{{self._matcher()}}}"
        parsed = _parsed(text)
        if not isinstance(parsed, promql.VectorSelector):
            raise _refused('"match[]" must be a selector such as carme_job_info{partition="gpu"}.')
        return self._written(parsed)

    def _matcher(self) -> str:
        return f"{self.label}={_quoted(self.value)}"

    def _written(self, node: Any) -> str:
        match node:
            case promql.NumberLiteral():
                return repr(node.val)  # inf and nan are words of PromQL as well
            case promql.StringLiteral():
                return _quoted(node.val)
            case promql.VectorSelector():
                return self._selected(node) + _shifted(node)
            case promql.MatrixSelector():
                inner = node.vector_selector
                return f"{self._selected(inner)}[{_duration(node.range)}]{_shifted(inner)}"
            case promql.SubqueryExpr():
                span, step = _duration(node.range or timedelta(0)), _duration(node.step) if node.step else ""
                return f"({self._written(node.expr)})[{span}:{step}]{_shifted(node)}"
            case promql.ParenExpr():
                return f"({self._written(node.expr)})"
            case promql.UnaryExpr():
                return f"(-({self._written(node.expr)}))"
            case promql.Call():
                if node.func.name in _FORBIDDEN:
                    raise _refused(f"The function {node.func.name} is not available here.")
                return f"{node.func.name}({', '.join(self._written(each) for each in node.args)})"
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.BinaryExpr():
                operator = _required_in(_OPERATORS, str(node.op)) + _matched(node.modifier)
                return f"({self._written(node.lhs)}) {operator} ({self._written(node.rhs)})"
        raise _refused("The query has an unknown part.")

    def _selected(self, node: Any) -> str:
        if node.matchers.or_matchers:
            raise _refused('Selectors with "or" are not available here.')
        given = [_matching(each) for each in node.matchers.matchers]
        if node.name is not None:
            given.insert(0, f"__name__={_quoted(node.name)}")
        return f"{{{','.join([*given, self._matcher()])}}}"

    def _aggregated(self, node: Any) -> str:
        how = _required_in(_AGGREGATIONS, str(node.op))
        grouped = ""
        if node.modifier is not None:
            word = "by" if node.modifier.type == promql.AggModifierType.By else "without"
            grouped = f" {word} ({_labels(node.modifier.labels)}) "
        parts = [self._written(each) for each in (node.param, node.expr) if each is not None]
        return f"{how}{grouped}({', '.join(parts)})"


def _matching(matcher: Any) -> str:
    for operator, sign in (
        (promql.MatchOp.Equal, "="),
        (promql.MatchOp.NotEqual, "!="),
        (promql.MatchOp.Re, "=~"),
        (promql.MatchOp.NotRe, "!~"),
    ):
        if matcher.op == operator:
            return f"{_label(matcher.name)}{sign}{_quoted(matcher.value)}"
    raise _refused("The query has an unknown matcher.")


def _matched(modifier: Any) -> str:
    """What stands between the operator and its right side."""
    if modifier is None:
        return ""
    if modifier.fill_values.lhs is not None or modifier.fill_values.rhs is not None:
        raise _refused('"fill" is not available here.')
    text = " bool" if modifier.return_bool else ""
    if modifier.matching is not None:
        word = "on" if modifier.matching.type == promql.LabelModifierType.Include else "ignoring"
        text += f" {word} ({_labels(modifier.matching.labels)})"
    for card, word in (
        (promql.VectorMatchCardinality.ManyToOne, "group_left"),
        (promql.VectorMatchCardinality.OneToMany, "group_right"),
    ):
        if modifier.card == card:
            text += f" {word} ({_labels(modifier.group_labels or [])})"
    return text


def _shifted(node: Any) -> str:
    text = ""
    if node.offset:
        back = node.offset < timedelta(0)
        text += f" offset {'-' if back else ''}{_duration(abs(node.offset))}"
    if node.at is not None:
        if node.at.type == promql.AtModifierType.At:
            text += f" @ {node.at.at.timestamp():.3f}"
        else:
            text += " @ start()" if node.at.type == promql.AtModifierType.Start else " @ end()"
    return text


def _duration(length: timedelta) -> str:
    return f"{round(length / timedelta(milliseconds=1))}ms"


def _labels(names: list[str]) -> str:
    return ", ".join(map(_label, names))


def _label(name: str) -> str:
    if not (name.isascii() and name.isidentifier()):
        raise _refused("Labels have letters, digits and underscores only.")
    return name


def _required_in(known: frozenset[str], word: str) -> str:
    if word.lower() not in known:
        raise _refused(f"{word!r} is not available here.")
    return word.lower()


def _quoted(value: str) -> str:
    """A string as PromQL reads it, in which nothing but what it must is escaped."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _parsed(text: str) -> Any:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    signs = text.count("-") + text.count("+")
    if len(text) > LONGEST or deepest > DEEPEST or signs > DEEPEST:
        raise _refused(
            f"A query has at most {LONGEST} characters, {DEEPEST} nested brackets and {DEEPEST} signs."
        )
    try:
        return promql.parse(text)
    except (ValueError, OverflowError) as error:
        raise _refused(f"This is not PromQL: {str(error)[:200]}") from None


def _refused(why: str) -> InvalidRequest:
    remedy = "See https://prometheus.io/docs/prometheus/latest/querying/basics/."
    return InvalidRequest(why, remedy, field="query")
