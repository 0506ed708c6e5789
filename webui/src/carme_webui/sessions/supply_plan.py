"""The coming days of the GPUs as the dashboard draws them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.utils.translation import gettext as _

from carme.jobs import Forecast, GpuForecast
from carme_webui.bookings.models import moment_words
from carme_webui.caches import cached_by_arguments
from carme_webui.cluster import Supply

__all__ = ["Shown", "shown"]

WIDTH, HEIGHT = 288, 40


@dataclass(frozen=True)
class Shown:
    """GPUs of one type.

    Attributes:
        queued: GPUs that waiting jobs have asked for.
        line: The corners of the line of what will be free, in a picture of WIDTH by HEIGHT; empty if unknown.
        words: The same in words.
    """

    supply: Supply
    queued: int = 0
    line: str = ""
    words: str = ""

    @property
    def used(self) -> int:
        """What is neither free nor out of service cannot be told apart by users: it is in use."""
        return self.supply.total - self.supply.free


@cached_by_arguments
def shown(supplies: Sequence[Supply], plan: Forecast | None) -> list[Shown]:
    """Each type with its plan, where there is one."""
    kinds = {kind.gpu_type: kind for kind in plan.kinds} if plan else {}
    found = []
    for supply in supplies:
        kind = kinds.get(supply.kind)
        if plan is None or kind is None or not kind.free:
            found.append(Shown(supply))
        else:
            found.append(Shown(supply, kind.queued, _line(kind), _words(kind, plan, supply.free)))
    return found


def _line(kind: GpuForecast) -> str:
    """A line in steps, `x,y x,y ...`, with corners only where something changes."""
    width, most = WIDTH / len(kind.free), max(1, kind.total)
    corners: list[tuple[float, float]] = []
    for place, count in enumerate(kind.free):
        height = HEIGHT - HEIGHT * count / most
        if not corners or corners[-1][1] != height:
            corners += [(place * width, corners[-1][1])] if corners else []
            corners.append((place * width, height))
    corners.append((WIDTH, corners[-1][1]))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


def _words(kind: GpuForecast, plan: Forecast, free: int) -> str:
    """When more of them will be free than now; else that it stays so.

    Args:
        free: How many are free at this moment: some of them may be spoken for within the first step.
    """
    now, most = kind.free[0], max(kind.free)
    place = kind.free.index(most)
    when = moment_words(plan.start + place * timedelta(minutes=plan.step_minutes))
    if most > max(now, free):
        return _("By Slurm's plan %(count)s will be free from %(when)s.") % {"count": most, "when": when}
    if now < free and place:
        reported = {"taken": free - now, "count": most, "when": when}
        words = _("By Slurm's plan %(taken)s of them are taken soon; %(count)s are free again from %(when)s.")
        return words % reported
    if now < free:
        return _("By Slurm's plan %(taken)s of them are taken soon.") % {"taken": free - now}
    if free == kind.total:
        return _("All GPUs are free.")
    return _("No more are expected within three days.")
