"""Spans of time as bars, such as a job's phases on its nodes; `static/carme/spans.js` draws them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone
from django.utils.translation import gettext as _

from carme_webui.clocks import minutes_words

__all__ = ["Row", "Span", "Spans"]


@dataclass(frozen=True)
class Span:
    """A time in which something was the case.

    Attributes:
        kind: Which decides the colour: queued, staging or running.
        label: The kind in words.
        start, end: From when to when it is drawn.
        is_open: It goes on beyond `end`.
    """

    kind: str
    label: str
    start: datetime
    end: datetime
    is_open: bool = False

    @property
    def words(self) -> str:
        """How long it is in words; empty for what is to come and has no end."""
        if self.is_open and self.start > timezone.now():
            return ""
        seconds = int((self.end - self.start).total_seconds())
        return _("%d s") % seconds if seconds < 60 else minutes_words(seconds // 60)


@dataclass(frozen=True)
class Row:
    """The queue, or a node, with what happened there, the earliest first."""

    title: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class Spans:
    """Rows of bars over the same time; each row has at least one.

    Attributes:
        title: What they show.
        rows: At least one.
        start: Where the axis begins; None: with the earliest of them.
    """

    title: str
    rows: Sequence[Row]
    start: datetime | None = None

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds that there are, with their words."""
        return {span.kind: span.label for row in self.rows for span in row.spans}

    @property
    def data(self) -> str:
        """All that the browser draws them from, as JSON; moments are in seconds since 1970."""
        rows = [{"title": row.title, "spans": [_spec(span) for span in row.spans]} for row in self.rows]
        spec = {
            "title": self.title,
            "start": self.start.timestamp() if self.start else None,
            "rows": rows,
            "summary": self.summary,
            "from": _("from"),
        }
        return json.dumps(spec, separators=(",", ":"))

    @property
    def summary(self) -> str:
        """The same in words, for readers who do not see it; rows that are alike are named together."""
        alike: dict[tuple[Span, ...], list[str]] = {}
        for row in self.rows:
            alike.setdefault(tuple(row.spans), []).append(row.title)
        return "; ".join(
            f"{', '.join(titles)}: {', '.join(f'{span.label} {span.words}'.strip() for span in spans)}"
            for spans, titles in alike.items()
        )


def _spec(span: Span) -> dict[str, str | float | bool]:
    return {
        "kind": span.kind,
        "label": span.label,
        "start": span.start.timestamp(),
        "end": span.end.timestamp(),
        "words": span.words,
        "open": span.is_open,
    }
