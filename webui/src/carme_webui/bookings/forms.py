"""The form of a booking."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django import forms
from django.conf import settings
from django.utils.translation import gettext_lazy as _
from pydantic import ValidationError

from carme.bookings import YEARS, BookingRequest
from carme.bookings.clock import from_local
from carme.config import Settings
from carme.errors import CarmeError, InvalidRequest
from carme.jobs import Cluster, parse_minutes
from carme.jobs.requests import refusal
from carme.translation import message
from carme_webui.accounts.models import User
from carme_webui.accounts.zone import zone_names
from carme_webui.bookings.models import Booking
from carme_webui.caches import derived
from carme_webui.clocks import minutes_words, reader_zone
from carme_webui.help_links import explained
from carme_webui.projects.models import Project, usable_by
from carme_webui.titles import TitleField

__all__ = ["BookingForm", "Kind", "kinds", "kinds_for", "moment_of", "next_start"]


class Kind(NamedTuple):
    """Nodes that can be booked: those of a partition with so many GPUs of a type."""

    partition: str
    gpu_type: str
    gpus: int
    nodes: int

    @property
    def key(self) -> str:
        """The kind as a form sends it."""
        return f"{self.partition}:{self.gpu_type}:{self.gpus}"

    @property
    def label(self) -> str:
        """The kind in words."""
        return f"{self.gpus} \N{MULTIPLICATION SIGN} {self.gpu_type} ({self.partition})"


def kinds(cluster: Cluster | None, site: Settings) -> list[Kind]:
    """What can be booked at this site; first that of the default partition, with which forms begin."""
    if cluster is None:
        return []
    counts = derived.get(cluster, "kinds", _counts)
    found = [
        Kind(*key, number) for key, number in sorted(counts.items()) if site.booking_policy(key[0]).enabled
    ]
    return sorted(found, key=lambda kind: kind.partition != site.slurm.default_partition)


def _counts(cluster: Cluster) -> dict[tuple[str, str, int], int]:
    """How many nodes each partition has with so many GPUs of a type."""
    counts: Counter[tuple[str, str, int]] = Counter()
    nodes = {node.name: node for node in cluster.nodes}
    for partition in cluster.partitions:
        for name in partition.node_names:
            for kind, count in (nodes[name].gpus if name in nodes else {}).items():
                if count:
                    counts[partition.name, kind, count] += 1
    return counts


def kinds_for(user: User, cluster: Cluster | None) -> list[Kind]:
    """What a user can book: nodes of partitions that take the user's jobs."""
    own = usable_by(user, cluster)
    names = {partition.name for partition in own.partitions} if own else set[str]()
    return [kind for kind in kinds(cluster, settings.SITE) if kind.partition in names]


class BookingForm(forms.Form):
    """What is to be booked. Times are those of the reader's clocks.

    Args:
        offered: The kinds of nodes.
        projects: Those that may be booked for.
        booking: The booking that is changed.
        start: When it begins, unless the form says so.
    """

    kind = forms.CharField(label=_("Node type"), widget=forms.Select)
    nodes = forms.IntegerField(label=_("Nodes"), min_value=1)
    node_names = forms.CharField(label=_("On node"), max_length=2000, required=False)
    date = forms.DateField(label=_("Day"), widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d"))
    time = forms.TimeField(
        label=_("Start time"), widget=forms.TimeInput(attrs={"type": "time"}, format="%H:%M")
    )
    length = forms.CharField(label=_("Duration"), max_length=32)
    title = TitleField(label=_("Title"), max_length=80, required=False)
    project = forms.CharField(label=_("For"), widget=forms.Select, required=False)
    users = forms.CharField(label=_("Who else may use it"), max_length=2000, required=False)
    # By whose clocks the times are; the reader may have moved meanwhile.
    zone = forms.CharField(widget=forms.HiddenInput, required=False)

    def __init__(
        self,
        data: Any = None,
        *,
        offered: Sequence[Kind],
        projects: Sequence[Project] = (),
        booking: Booking | None = None,
        start: datetime | None = None,
        initial: dict[str, Any] | None = None,
    ) -> None:
        zone = self._zone = _written_in(data)
        values: dict[str, Any] = {
            "zone": zone.key,
            "nodes": 1,
            "length": "2h",
            "kind": offered[0].key if offered else "",
        }
        if booking is not None:
            start = booking.start
            values |= {
                "kind": f"{booking.partition}:{booking.gpu_type}:{booking.gpus_per_node}",
                "nodes": len(booking.node_names),
                "length": length_text(booking.minutes),
                "title": booking.title,
                "users": ", ".join(booking.users),
                "project": booking.project.name if booking.project else "",
            }
            projects = [booking.project] if booking.project else []
        if start is not None:
            local = start.astimezone(zone)
            values |= {"date": local.date(), "time": local.time()}
        super().__init__(data, initial=values | (initial or {}), label_suffix="")
        self._booking = booking
        self.proposed: BookingRequest | None = None
        widget = self.fields["kind"].widget
        assert isinstance(widget, forms.Select)
        widget.choices = [(kind.key, kind.label) for kind in offered]
        chooser = self.fields["project"].widget
        assert isinstance(chooser, forms.Select)
        chooser.choices = [
            ("", _("Me and the users I name")),
            *((project.name, _("Project %s") % project.title) for project in projects),
        ]
        self.fields["project"].help_text = _("All members of a project may use what is booked for it.")
        if booking is not None:
            self.fields["project"].disabled = True
        if not projects:
            del self.fields["project"]
        self.fields["nodes"].widget.attrs["max"] = max((kind.nodes for kind in offered), default=1)
        self.fields["node_names"].help_text = _("Leave empty for any such node. Separate names by commas.")
        self.fields["node_names"].widget.attrs |= {"spellcheck": "false", "autocomplete": "off"}
        self.fields["time"].help_text = _("Times are in %(zone)s.") % {"zone": zone.key}
        longest = [settings.SITE.booking_policy(kind.partition).longest_minutes for kind in offered]
        self.fields["length"].help_text = _("Like 90 (minutes), 2h or 1d12h; at most %(most)s.") % {
            "most": minutes_words(max(longest, default=0))
        }
        self.fields["users"].help_text = _("Comma-separated user names.")
        if booking is not None and booking.state == "active":
            for name in ("date", "time"):
                self.fields[name].disabled = True

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        partition, _colon, rest = cleaned["kind"].partition(":")
        gpu_type, _colon, gpus = rest.partition(":")
        try:
            self.proposed = _booking_request(
                {
                    "partition": partition,
                    "gpu_type": gpu_type,
                    "gpus_per_node": int(gpus) if gpus.isdecimal() and len(gpus) < 6 else 0,
                    "nodes": cleaned["nodes"],
                    "node_names": cleaned["node_names"].replace(",", " ").split(),
                    "start": self._start(cleaned),
                    "minutes": parse_minutes(cleaned["length"]),
                    "title": cleaned["title"],
                    "users": cleaned["users"].replace(",", " ").split(),
                    "project": cleaned.get("project", ""),
                }
            )
        except CarmeError as error:
            self.refuse(error)
        return cleaned

    def _start(self, cleaned: dict[str, Any]) -> datetime:
        if slot := moment_of(self.data.get("slot", "")):
            return slot  # a moment, as clocks may show a time twice
        if self._booking is not None:
            local = self._booking.start.astimezone(self._zone)
            same = (local.date(), local.replace(second=0).time()) == (
                cleaned["date"],
                cleaned["time"].replace(second=0),
            )
            if same:
                return self._booking.start
        if cleaned["date"].year not in YEARS:
            raise InvalidRequest(
                message("This day is too far away."), message("Choose one of the next weeks."), field="start"
            )
        naive = datetime.combine(cleaned["date"], cleaned["time"]).replace(second=0, microsecond=0)
        return from_local(naive, self._zone)

    def refuse(self, error: CarmeError) -> None:
        """Show an error where it belongs."""
        places = {"start": "time", "minutes": "length", "gpus_per_node": "kind", "partition": "kind"}
        places |= {"gpu_type": "kind"}
        field = error.field or ""
        field = places.get(field, field.partition("[")[0])
        self.add_error(field if field in self.fields else None, explained(error))


def _written_in(data: Any) -> ZoneInfo:
    """The zone of a form that was sent; of a new one the reader's."""
    name = data.get("zone", "") if data else ""
    return ZoneInfo(name) if name in zone_names() else reader_zone()


def _booking_request(values: dict[str, Any]) -> BookingRequest:
    try:
        return BookingRequest(**values)
    except ValidationError as error:
        raise refusal(error, BookingRequest) from None


def moment_of(text: str) -> datetime | None:
    """One of the free times that were offered; None for anything else."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None or moment.year not in YEARS:
        return None
    return moment.astimezone(UTC).replace(microsecond=0)


def length_text(minutes: int) -> str:
    """Minutes as the form takes them: `90m`, `2h`, `1d`."""
    for unit, size in (("d", 1440), ("h", 60)):
        if minutes % size == 0:
            return f"{minutes // size}{unit}"
    return f"{minutes}m"


def next_start(now: datetime) -> datetime:
    """The next full hour by the reader's clocks."""
    local = now.astimezone(reader_zone()).replace(minute=0, second=0, microsecond=0)
    return local + timedelta(hours=1)
