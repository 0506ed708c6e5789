"""When the owner of what runs is warned of its end: one rule for the portal's pages and for JupyterLab."""

from datetime import datetime, timedelta
from typing import NamedTuple

__all__ = ["LEVELS", "Level", "level_of", "warned_at"]


class Level(NamedTuple):
    """How near the end is: at most so long, and at most such a share of the whole time.

    By the share as well, as what lasts five minutes is not near its end when it begins.
    """

    name: str
    before: timedelta
    share: float

    def left(self, whole: timedelta | None) -> timedelta:
        """With how much time left it begins; `whole` None: no share is known."""
        return self.before if whole is None else min(self.before, whole * self.share)


#: The nearest last.
LEVELS = (Level("near", timedelta(minutes=15), 0.25), Level("urgent", timedelta(minutes=5), 0.1))


def level_of(left: timedelta, whole: timedelta | None) -> str:
    """The level that holds with so much time left; empty: none."""
    return next((each.name for each in reversed(LEVELS) if left <= each.left(whole)), "")


def warned_at(ends: datetime, whole: timedelta | None) -> list[datetime]:
    """The moments at which the owner is warned, one for each level."""
    return [ends - each.left(whole) for each in LEVELS]
