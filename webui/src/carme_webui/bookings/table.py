"""The calendar's table: who has which node when.

Most of it is the same for all readers, who learn no more of others' bookings and jobs than that they are
there. That is cached until something of it changes; the rows of nodes on which something is the reader's own
are made anew.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import lru_cache
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from django.core.cache import caches
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from carme.bookings import BookingState
from carme.bookings.reconcile import is_ours
from carme.broker.protocol import RunningJob
from carme_webui.accounts.models import User
from carme_webui.bookings.lanes import Cell, Day, Item, Lane, Slot, lay_out, slots_of
from carme_webui.bookings.models import Booking
from carme_webui.caches import cache_key
from carme_webui.clocks import reader_zone, span_words
from carme_webui.cluster import Reservations, RunningJobs
from carme_webui.notifier import notifier

__all__ = ["VIEWS", "Shown", "table_of"]

#: Days and the length of a column in each view.
VIEWS = {"day": (1, timedelta(minutes=30)), "week": (7, timedelta(hours=3))}
#: Stands for a node's name, in which it cannot be.
PLACEHOLDER = "\0"
PAST_CELL = SafeString('<td class="past"></td>')


#: For how long readers are shown the same table, unless a booking changes or the broker reports other jobs on
#: these nodes, or other reservations.
SECONDS = 60.0

Nodes = Sequence[tuple[str, bool]]


@lru_cache(maxsize=128)
def _days(view: str, first: date, zone: ZoneInfo) -> list[Day]:
    days, length = VIEWS[view]
    return slots_of(first, days, length, zone)


@dataclass(frozen=True)
class Shown:
    """Which part of the calendar is shown, no matter who reads it.

    Attributes:
        view: One of VIEWS.
        first: The first day.
        kind: The key of the kind of nodes.
        past: How many of the columns are over.
        now: When the column began in which we are.
        today: The day that it is by the reader's clocks.
    """

    view: str
    first: date
    kind: str
    past: int
    now: datetime | None
    today: date
    zone: ZoneInfo

    @classmethod
    def at(cls, now: datetime, view: str, first: date, kind: str, zone: ZoneInfo) -> "Shown":
        """What is shown at a moment."""
        slots = [slot for day in _days(view, first, zone) for slot in day.slots]
        past = sum(slot.end <= now for slot in slots)
        running = next((slot.start for slot in slots if slot.start <= now < slot.end), None)
        return cls(view, first, kind, past, running, now.astimezone(zone).date(), zone)

    @property
    def days(self) -> list[Day]:
        """The columns."""
        return _days(self.view, self.first, self.zone)


@dataclass(frozen=True)
class _Common:
    """What one reader sees, or everybody to whom nothing of it belongs.

    Attributes:
        head: The table's head.
        items: What each node is kept for, each with what it stands for: a booking, a job.
        rows: The row of each node.
    """

    head: SafeString
    items: dict[str, dict[Hashable, Item]]
    rows: dict[str, SafeString]


def table_of(
    user: User,
    near: Iterable[Booking],
    shown: Shown,
    nodes: Nodes,
    running: RunningJobs,
    reservations: Reservations,
) -> SafeString:
    """Head and body of the table for a reader.

    Args:
        near: The reader's bookings, those of others included that the reader may use.
        nodes: Names, and whether they take jobs.
        running: Jobs with the nodes' names.
    """
    if user.is_staff:  # reads whose everything is
        common = _make(user, shown, nodes, running, reservations)
        rows = common.rows
    else:
        common = _common(shown, nodes, running, reservations)
        rows = common.rows | _own_rows(user, near, shown, nodes, running, common)
    # All parts are escaped.
    return SafeString(common.head + "<tbody>\n" + "".join(rows.values()) + "</tbody>")


def _common(shown: Shown, nodes: Nodes, running: RunningJobs, reservations: Reservations) -> _Common:
    # One place for each table, so that those which are over do not push others out.
    key, cache = cache_key("table", shown, tuple(nodes)), caches["calendars"]
    # On a large site some job begins or ends with each answer, but seldom on one of these nodes.
    jobs = [running.on_node(name) for name, _available in nodes]
    sources = notifier.bookings_version(), jobs, reservations.number
    known: tuple[object, _Common] | None = cache.get(key)
    if known is None or known[0] != sources:
        known = sources, _make(None, shown, nodes, running, reservations)
        cache.set(key, known, SECONDS)
    return known[1]


def _make(
    reader: User | None, shown: Shown, nodes: Nodes, running: RunningJobs, reservations: Reservations
) -> _Common:
    """What a reader sees; without one, what everybody sees to whom nothing of it belongs."""
    items = _items(reader, shown, {name for name, _available in nodes}, running, reservations)
    return _Common(_head(shown), items, _rows(shown, nodes, items))


def _own_rows(
    user: User, near: Iterable[Booking], shown: Shown, nodes: Nodes, running: RunningJobs, common: _Common
) -> dict[str, SafeString]:
    """The rows of nodes on which something is the reader's own, in place of those that everybody sees."""
    start, end = _bounds(shown)
    own: dict[Hashable, Item] = {}
    for row in near:
        if row.may_be_used_by(user) and row.start < end and row.end > start:
            own |= _of_booking(row, user)
    for job, nodes_of_job in running.of_user(user.username):
        own |= _of_job(job, nodes_of_job, user.username)
    if not own:
        return {}
    items: dict[str, dict[Hashable, Item]] = {}
    for key, item in own.items():
        items.setdefault(item.node, common.items.get(item.node, {}) | {})[key] = item
    return _rows(shown, [node for node in nodes if node[0] in items], items)


def _rows(shown: Shown, nodes: Nodes, items: dict[str, dict[Hashable, Item]]) -> dict[str, SafeString]:
    free = _free_columns(shown.first, shown.view, shown.past, shown.kind, get_language(), shown.zone)
    all_items = [item for name, _available in nodes for item in items.get(name, {}).values()]
    lanes = lay_out(nodes, all_items, shown.days, _free_cells(free))
    return {lane.node: _row(lane) for lane in lanes}


def _head(shown: Shown) -> SafeString:
    context = {
        "days": shown.days,
        "view": shown.view,
        "now": shown.now,
        "today": shown.today,
        "zone": shown.zone,
        "query": urlencode({"kind": shown.kind}),
    }
    return render_to_string("bookings/calendar_head.html", context)


def _bounds(shown: Shown) -> tuple[datetime, datetime]:
    days = shown.days
    return days[0].slots[0].start, days[-1].slots[-1].end


@lru_cache(maxsize=128)
def _free_columns(
    first: date, view: str, past: int, kind: str, language: str | None, zone: ZoneInfo
) -> dict[datetime, str]:
    """The cell of each column where a node is free, by the column's beginning; the same for all readers.

    Args:
        past: How many of the columns are over.
        language: That of the words; they are made in the one that is active.
    """
    _days_shown, length = VIEWS[view]
    columns = [slot for day in _days(view, first, zone) for slot in day.slots]
    pattern: dict[datetime, str] = {column.start: PAST_CELL for column in columns[:past]}
    for column in columns[past:]:
        start = column.start.astimezone(zone)
        query = urlencode(
            {"kind": kind, "start": start.isoformat(), "minutes": length // timedelta(minutes=1)}
        )
        pattern[column.start] = format_html(
            '<td><a class="free" href="{}?{}&amp;node={}" data-start="{}">'
            '<span class="unseen">{}</span></a></td>',
            reverse("booking-new"),
            query,
            PLACEHOLDER,
            start.isoformat(),
            _("Book %(node)s from %(when)s")
            % {"node": PLACEHOLDER, "when": date_format(start, _("D j M, H:i"))},
        )
    return pattern


def _free_cells(pattern: dict[datetime, str]) -> Callable[[str, bool, Sequence[Slot]], SafeString]:
    """What makes the cells of free times; what all nodes have in common is made once."""
    cells: dict[tuple[datetime, int], str] = {}

    def free(node: str, available: bool, slots: Sequence[Slot]) -> SafeString:
        if not available:
            return SafeString(PAST_CELL * len(slots))
        run = slots[0].start, len(slots)
        if run not in cells:
            cells[run] = "".join(pattern[slot.start] for slot in slots)
        # All parts are escaped.
        return SafeString(cells[run].replace(PLACEHOLDER, escape(node)))

    return free


def _row(lane: Lane) -> SafeString:
    """The row of a node: a template would take most of the calendar's time for them."""
    # All parts are escaped.
    cells = SafeString("".join(_taken_cell(cell) if cell.items else cell.free for cell in lane.cells))
    out = (
        format_html(' <span class="state failed">{}</span>', _("out of order")) if not lane.available else ""
    )
    return format_html('<tr><th scope="row" class="node">{}{}</th>{}</tr>\n', lane.node, out, cells)


def _taken_cell(cell: Cell) -> str:
    classes = " ".join(item.kind for item in cell.items)
    entries = SafeString("".join(map(_entry, cell.items)))
    return format_html('<td colspan="{}" class="{}">{}</td>', cell.span, classes, entries)


def _entry(item: Item) -> str:
    words = format_html(
        '<span class="label">{}</span><span class="unseen">, {}</span>', item.label, item.words
    )
    if item.url:
        return format_html('<a class="item" href="{}">{}</a>', item.url, words)
    return format_html('<span class="item">{}</span>', words)


def _items(
    reader: User | None,
    shown: Shown,
    names: set[str],
    running: RunningJobs,
    reservations: Reservations,
) -> dict[str, dict[Hashable, Item]]:
    """What is shown of bookings, of the administrators' reservations, and of running jobs, by node.

    Args:
        names: The nodes that are shown.
    """
    start, end = _bounds(shown)
    within = Booking.open().filter(start__lt=end, end__gt=start)
    here = [number for number, nodes in within.values_list("pk", "node_names") if not names.isdisjoint(nodes)]
    rows = Booking.open().filter(pk__in=here)
    found: dict[Hashable, Item] = {}
    # Only managers read whose they are.
    for row in rows if reader is not None else rows.select_related(None):
        found |= _of_booking(row, reader)
    for reservation in reservations.of_others:
        label = _("Maintenance") if reservation.maintenance else _("Reserved")
        words = span_words(reservation.start, reservation.end, reader_zone())
        found |= {
            (reservation.name, node): Item(node, reservation.start, reservation.end, "blocked", label, words)
            for node in reservation.node_names
        }
    name = reader.username if reader is not None else None
    for node in names:
        for job in running.on_node(node):
            found |= _of_job(job, [node], name)
    by_node: dict[str, dict[Hashable, Item]] = {}
    for key, item in found.items():
        if item.node in names:
            by_node.setdefault(item.node, {})[key] = item
    return by_node


def _of_booking(row: Booking, reader: User | None) -> dict[Hashable, Item]:
    """A booking on each of its nodes; without a reader, as one sees it to whom it is nothing."""
    usable = reader is not None and row.may_be_used_by(reader)
    managed = reader is not None and reader.is_staff
    own = reader is not None and row.owner_id == reader.pk
    kind = "requested" if row.state == BookingState.REQUESTED else "mine" if own else "shared"
    kind = kind if usable or kind == "requested" else "other"
    label = row.heading if usable or managed else _("Booked")
    url = row.get_absolute_url() if usable or managed else ""
    if managed and not usable:
        label = f"{label} ({row.owner.username})"
    words = f"{row.span}, {_right(row, own)}" if usable else row.span
    return {
        (Booking, row.pk, node): Item(node, row.start, row.end, kind, label, words, url)
        for node in row.node_names
    }


def _right(row: Booking, own: bool) -> str:
    """Why a reader may use a booking."""
    if row.project is not None:
        return _("project %s") % row.project.title
    return _("your booking") if own else _("shared by %s") % row.owner.username


def _of_job(job: RunningJob, nodes: list[str], reader: str | None) -> dict[Hashable, Item]:
    """A running job on each of its nodes, unless it runs in a booking, as a user of that name sees it.

    Without a name it is nobody's own.
    """
    if job.started is None or is_ours(job.reservation):
        return {}
    until = job.ends
    own = reader is not None and job.user == reader
    label = _("My job %s") % job.id if own else _("In use")
    url = reverse("job", args=[job.id]) if own else ""
    words = span_words(job.started, until, reader_zone()) if until else _("no time limit")
    return {
        (RunningJob, job.id, node): Item(node, job.started, until, "job", label, words, url) for node in nodes
    }
