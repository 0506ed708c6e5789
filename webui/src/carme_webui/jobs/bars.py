"""Bars over time, of which pictures of jobs consist."""

from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _

from carme_webui.clocks import minutes_words

__all__ = ["NARROWEST", "WIDTH", "Bar", "Row"]

#: The picture's width in its own units.
WIDTH = 1000
#: Bars that are shorter could not be seen.
NARROWEST = 3


@dataclass(frozen=True)
class Bar:
    """A span of one kind in a picture that is WIDTH wide."""

    kind: str
    label: str
    start: datetime
    end: datetime
    x: int
    width: int

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.end - self.start).total_seconds()

    @property
    def words(self) -> str:
        """The same in words."""
        seconds = int(self.seconds)
        return _("%d s") % seconds if seconds < 60 else minutes_words(seconds // 60)


@dataclass(frozen=True)
class Row:
    """The queue, or a node, with what happened there."""

    title: str
    bars: list[Bar]
