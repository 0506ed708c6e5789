"""The choices of nodes and GPUs that a form shows, with what each takes, costs, and when it would start."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache

from django.conf import settings
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from carme.broker import BrokerClient
from carme.errors import CarmeError
from carme.jobs import JobRequest, Node
from carme.scaling import Choice, Curve, choices, marks
from carme_webui.accounts.models import User
from carme_webui.clocks import short_words
from carme_webui.jobs.templatetags.times import moment
from carme_webui.metrics.charts import PERCENT, Growth, Line, Place
from carme_webui.start_times import AT_ONCE, expected_start

__all__ = ["Advice", "Offer", "advice", "size_words", "starts"]


@dataclass(frozen=True)
class Start:
    """When a choice would start.

    Attributes:
        when: None: nobody can say.
        words: The same for a page, or why not.
        possible: Whether the site can start it at all.
    """

    when: datetime | None
    words: str
    possible: bool = True


@dataclass(frozen=True)
class Offer:
    """One choice.

    Attributes:
        choice: Nodes and GPUs, with what is predicted.
        start: When it would start, in words; empty: nobody can say.
        finish: When the training would be over; None: its steps or its start are unknown, or no calendar goes
            so far.
        marks: What it is of all choices: the cheapest, the fastest, what the form asks for.
    """

    choice: Choice
    start: str
    finish: datetime | None
    marks: list[str]
    chosen: bool

    @property
    def words(self) -> str:
        """Nodes and GPUs."""
        return size_words(self.choice)

    @property
    def speedup(self) -> str:
        """Times as fast as one."""
        return _short(self.choice.row.speedup)

    @property
    def percent(self) -> int:
        """Efficiency."""
        return round(100 * self.choice.row.efficiency)

    @property
    def time(self) -> str:
        """Of the whole training, or of a step."""
        hours = self.choice.hours
        return short_words(hours * 3600) if hours is not None else _ms(self.choice.row.step_ms)

    @property
    def cost(self) -> str:
        """GPU-hours, or a multiple of those of one."""
        if self.choice.hours is None:
            return _("%s times") % _short(self.choice.cost, 2)
        return _short(self.choice.cost)


@dataclass(frozen=True)
class Advice:
    """What a form shows of a result.

    Attributes:
        curve: What was read.
        offers: Choices, the smallest first.
        cheapest, fastest: Of those that the site can start; None: it can start none.
    """

    curve: Curve
    offers: list[Offer]
    cheapest: Offer | None
    fastest: Offer | None

    @property
    def has_gpus(self) -> bool:
        """Whether the choices have GPUs, or nodes alone."""
        return any(offer.choice.gpus_per_node for offer in self.offers)

    @property
    def has_hours(self) -> bool:
        """Whether the steps of the training are known."""
        return any(offer.choice.hours is not None for offer in self.offers)

    @property
    def extrapolated(self) -> bool:
        """Whether one of them is beyond what was measured."""
        return any(offer.choice.row.extrapolated for offer in self.offers)

    @property
    def chart(self) -> Growth:
        """How many times as fast each of them is, with what would be ideal and what the site accepts."""
        rows = [offer.choice.row for offer in self.offers]
        ranks = [float(row.ranks) for row in rows]
        references = [Line(_("ideal"), ranks)]
        if floor := settings.SITE.scaling.efficiency_percent:
            name = _("%d %% efficiency, below which the site asks for a reason") % floor
            references.append(Line(name, [each * floor / PERCENT for each in ranks]))
        return Growth(
            _("Times as fast"),
            _("GPUs") if self.has_gpus else _("Nodes"),
            [
                Place(each, offer.words, [mark for mark in offer.marks if mark != _("chosen")], offer.chosen)
                for each, offer in zip(ranks, self.offers, strict=True)
            ],
            Line(_("predicted"), [row.speedup for row in rows]),
            # The slower the step, the smaller the speed-up.
            Line(_("80 % interval, from"), [row.speedup * row.step_ms / row.high_ms for row in rows]),
            Line(_("80 % interval, to"), [row.speedup * row.step_ms / row.low_ms for row in rows]),
            references,
        )


def advice(
    curve: Curve,
    nodes: Sequence[Node],
    gpu_type: str | None,
    chosen: tuple[int, int],
    steps: int | None,
    start: Callable[[int, int], Start],
) -> Advice | None:
    """What a form shows; None: nothing is predicted for any choice that the partition has.

    Args:
        nodes: Among which is chosen.
        gpu_type: The requested one; None: any.
        chosen: Nodes and GPUs of each that the form asks for.
        steps: Of the whole training.
        start: Says when so many nodes with so many GPUs would start.
    """
    most_nodes, most_gpus = _bounds(nodes, gpu_type, chosen[1])
    start_of = cache(start)

    def is_possible(number: int, gpus_per_node: int) -> bool:
        return start_of(number, gpus_per_node).possible

    found = choices(curve, most_nodes, most_gpus, chosen, steps, is_possible)
    if not found:
        return None
    starting = {each: start_of(each.nodes, each.gpus_per_node) for each in found}
    possible = [each for each in found if starting[each].possible]
    best = marks(possible) if possible else ()
    offers = [_offer(each, best, chosen, starting[each]) for each in found]
    ends = [offer for offer in offers if offer.finish]
    if len(offers) > 1 and ends:
        first = min(ends, key=lambda offer: offer.finish or timezone.now())
        first.marks.append(_("done first"))
    by_choice = {offer.choice: offer for offer in offers}
    cheapest, fastest = [by_choice[each] for each in best] or (None, None)
    return Advice(curve, offers, cheapest, fastest)


def starts(request: JobRequest, user: User, broker: BrokerClient) -> Callable[[int, int], Start]:
    """Says when a job like this would start with other nodes and GPUs."""

    def start(nodes: int, gpus_per_node: int) -> Start:
        resized = request.model_copy(update={"nodes": nodes, "gpus_per_node": gpus_per_node})
        try:
            when, _earliest, refusal = expected_start(resized, user.username, broker)
        except CarmeError:
            return Start(None, _("unknown"))
        if when is None:
            return Start(None, _("not possible"), False) if refusal else Start(None, _("unknown"))
        now = timezone.now()
        return Start(now, _("now")) if when <= now + AT_ONCE else Start(when, moment(when))

    return start


def _bounds(nodes: Sequence[Node], gpu_type: str | None, gpus: int) -> tuple[int, int]:
    """How many of the nodes can be requested, and the most GPUs of one of them, of this type."""
    counts = [
        node.gpus.get(gpu_type, 0) if gpu_type else max(node.gpus.values(), default=0) for node in nodes
    ]
    most = max(counts, default=0)
    return max(1, sum(1 for count in counts if count == most or not gpus)), most


def _offer(
    choice: Choice,
    best: Sequence[Choice],
    chosen: tuple[int, int],
    start: Start,
) -> Offer:
    finish = None
    if start.when and choice.hours is not None:
        with contextlib.suppress(OverflowError):  # after the last day of calendars
            finish = start.when + timedelta(hours=choice.hours)
    is_chosen = (choice.nodes, choice.gpus_per_node) == chosen
    names = zip((_("cheapest"), _("fastest")), best, strict=False)
    found = [name for name, each in names if each == choice]
    return Offer(choice, start.words, finish, [*found, *([_("chosen")] if is_chosen else [])], is_chosen)


def size_words(choice: Choice) -> str:
    """Nodes and GPUs in words: `2 nodes, 8 GPUs`."""
    nodes = ngettext("%d node", "%d nodes", choice.nodes) % choice.nodes
    if not choice.gpus_per_node:
        return nodes
    gpus = ngettext("%d GPU", "%d GPUs", choice.gpus) % choice.gpus
    return gpus if choice.nodes == 1 else f"{gpus} ({nodes})"


def _ms(milliseconds: float) -> str:
    return _("%s ms a step") % _short(milliseconds)


def _short(value: float, places: int = 1) -> str:
    """A number with as many places as say something."""
    places = 0 if value >= 20 else places
    return number_format(round(value, places), places)  # which alone would cut digits off
