"""The form that starts a session."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from django import forms
from django.forms.boundfield import BoundField
from django.forms.widgets import ChoiceWidget
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from carme.config import Settings
from carme.datasets import Datasets
from carme.errors import CarmeError
from carme.images import Image, ImageCatalogue
from carme.jobs import Access, Cluster, SessionOptions, parse_stages
from carme.scaling import Curve
from carme_webui.bookings.models import Booking
from carme_webui.caches import cache_key, cached
from carme_webui.clocks import minutes_words, reader_zone
from carme_webui.cluster import entry_points, supplies
from carme_webui.help_links import explained
from carme_webui.images.cards import card as card_of
from carme_webui.images.cards import unreadable_card
from carme_webui.projects.models import Project
from carme_webui.scaling import ScalingFields
from carme_webui.scaling.fields import SCALING
from carme_webui.sessions.actions import check_options, minutes_in
from carme_webui.sessions.choices import CUSTOM, cards, matching, times
from carme_webui.sessions.models import NAME_PATTERN, Preset, new_name, values_of
from carme_webui.sessions.time_fields import TimeFields, time_begun_with, time_sent
from carme_webui.titles import TitleField

__all__ = ["StartForm"]

#: For how long the fields of a form of the same content are cached.
FIELDS_SECONDS = 600

#: Fewer qualities of service than this leave no choice.
MOST_NEEDLESS = 2

_MAY_BE_EMPTY = ("gpu_type", "partition", "account", "qos", "reservation")

#: The numbers that a card stands for.
NUMBERS = ("gpu_type", "gpus_per_node", "nodes")
#: What follows from the GPUs unless it is requested.
EXPERT = ("cpus_per_node", "memory_mb_per_node")
#: What few need.
MORE = ("title", "app", "partition", "account", "qos", "reservation", "stage", "results", *EXPERT)
#: What is not an option of a session by itself.
NOT_SENT = frozenset({"name", "hardware", "hours", "time", *SCALING})
#: What an address may fill in.
FILLED_IN = frozenset(
    {"title", "image", "app", "partition", "gpu_type", "gpus_per_node", "nodes", "minutes"}
    | {"account", "qos", "reservation", "stage", "results", *EXPERT, *SCALING}
)


class StartForm(TimeFields, ScalingFields):
    """What the owner asks for. Choices and limits are those of the cluster as it is now.

    Args:
        cluster: The broker's snapshot; None while the broker is down, then nothing can be started.
        catalogue: The site's images.
        site: The site's configuration.
        options: Earlier options to begin with.
        projects: Those that the owner is in.
        accounts: Accounts that the owner can choose, with titles; by default those of the projects.
        access: What Slurm lets the owner use; None: that is not known.
        bookings: Those that the owner may use.
        booking: The name of the one to begin with.
        requested: Values of fields to begin with, as the query of an address has them.
        datasets: Those that the owner sees; None: the site's.
        read: Reads the result of a probe, by its path; None: nobody can.
        presets: The owner's, whose hardware is offered too.
    """

    # Made with the form, so that a form sent twice starts one session.
    name = forms.CharField(widget=forms.HiddenInput, required=False)
    image = forms.CharField(label=_("Image"), widget=forms.RadioSelect)
    hardware = forms.ChoiceField(label=_("Hardware"), widget=forms.RadioSelect, required=False)
    gpu_type = forms.CharField(label=_("GPU type"), widget=forms.Select, required=False)
    gpus_per_node = forms.IntegerField(label=_("GPUs per node"), min_value=0)
    nodes = forms.IntegerField(label=_("Nodes"), min_value=1)
    title = TitleField(label=_("Title"), max_length=80, required=False)
    app = forms.CharField(label=_("Open with"), widget=forms.Select, required=False)
    partition = forms.CharField(label=_("Partition"), widget=forms.Select, required=False)
    cpus_per_node = forms.IntegerField(label=_("Processors per node"), min_value=1, required=False)
    memory_mb_per_node = forms.IntegerField(label=_("Memory per node (MiB)"), min_value=1, required=False)
    account = forms.CharField(label=_("Project"), widget=forms.Select, required=False)
    qos = forms.CharField(label=_("Quality of service"), widget=forms.Select, required=False)
    reservation = forms.CharField(label=_("Booking"), widget=forms.Select, required=False)
    stage = forms.CharField(
        label=_("Data"),
        required=False,
        max_length=4000,
        help_text=_(
            "Datasets or absolute paths of folders. Copied to the node before your time starts. "
            "Find them in $CARME_DATA."
        ),
    )
    results = forms.CharField(
        label=_("Results"),
        required=False,
        max_length=4096,
        help_text=_("Files in $CARME_RESULTS are copied here when the session ends."),
    )

    def __init__(
        self,
        data: Any = None,
        *,
        cluster: Cluster | None,
        catalogue: ImageCatalogue,
        site: Settings,
        options: SessionOptions | None = None,
        projects: Sequence[Project] = (),
        accounts: Sequence[tuple[str, str]] | None = None,
        access: Access | None = None,
        bookings: Sequence[Booking] = (),
        booking: str = "",
        requested: Mapping[str, str] | None = None,
        datasets: Datasets | None = None,
        read: Callable[[str], Curve] | None = None,
        presets: Sequence[Preset] = (),
    ) -> None:
        self._supplies = supplies(cluster) if cluster else []
        initial: dict[str, Any] = {
            "name": new_name(),
            "image": site.images.default,
            "app": "lab",
            "partition": site.slurm.default_partition,
            "gpus_per_node": 1 if self._supplies else 0,
            "nodes": 1,
            "minutes": site.sessions.default_minutes,
        }
        if options is not None:
            initial |= values_of(options)
        self._projects = {row.account: row for row in projects}
        self._accounts = list(accounts or [(row.account, row.title) for row in projects])
        self._access = access
        self._bookings = {row.name: row for row in bookings}
        if row := self._bookings.get(booking):
            initial |= {
                "reservation": row.name,
                "account": row.project.account if row.project else "",
                "partition": row.partition,
                "gpu_type": row.gpu_type,
                "gpus_per_node": row.gpus_per_node,
                "nodes": len(row.node_names),
                "minutes": max(1, min(minutes_in(row), site.session_policy(row.partition).maximum_minutes)),
            }
        initial |= {key: value for key, value in (requested or {}).items() if key in FILLED_IN}
        self.presets = presets
        self._cards = cards(site, cluster, self._supplies, presets)
        self._times = times(site.sessions.default_minutes, site.longest_session, timezone.now())
        initial["hardware"] = matching(self._cards, initial)
        initial |= time_begun_with(self._times, initial["minutes"])
        super().__init__(data and self._filled_in(data), initial=initial, label_suffix="")
        self._cluster, self._catalogue, self._site = cluster, catalogue, site
        self._datasets = datasets or Datasets(site.staging.datasets)
        self.options: SessionOptions | None = None
        self.curve: Curve | None = None
        self.requested: dict[str, Any] = {}
        self._read = read
        self._offer()

    def _filled_in(self, data: Any) -> dict[str, Any]:
        """What was sent, with the numbers of the chosen card and time."""
        filled: dict[str, Any] = dict(data.items())
        filled["hardware"] = data.get("hardware") or CUSTOM
        for card in self._cards:
            if card.key == filled["hardware"]:
                filled |= card.values
        return filled | time_sent(self._times, data)

    def full_clean(self) -> None:
        """Check it; what is wrong with a number is shown beside that number."""
        super().full_clean()
        self.show_wrong("hardware", NUMBERS)

    def _offer(self) -> None:
        """Choices, limits and their words."""
        field = self.fields["hardware"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [*((card.key, card) for card in self._cards), (CUSTOM, _("Custom"))]
        self.offer_times(self._times)
        kinds = self._supplies
        partitions = self._cluster.partitions if self._cluster else []
        offered = {name: self._image(name) for name in self._catalogue.names()}
        # The one that the form begins with is in sight, however many there are.
        shown = sorted(offered.items(), key=lambda pair: pair[0] != self["image"].value())
        self._choices(
            "image", [(name, card_of(image) if image else unreadable_card(name)) for name, image in shown]
        )
        apps: dict[str, str] = {}
        for image in filter(None, offered.values()):
            apps = entry_points(image) | apps
        self._choices("app", list(apps.items()))
        if len(apps) < 2:
            del self.fields["app"]
        self._choices("gpu_type", [("", _("Any type"))] + [(kind.kind, kind.kind) for kind in kinds])
        self._choices("partition", [(partition.name, partition.name) for partition in partitions])
        default = self._site.slurm.default_partition
        if len(partitions) < 2 and all(each.default or each.name == default for each in partitions):
            del self.fields["partition"]
        self._choices("account", [("", _("None")), *self._accounts])
        if any(account not in self._projects for account, _title in self._accounts):
            self.fields["account"].label = _("Account")
        if not self._accounts:
            del self.fields["account"]
        qualities = self._access.qos if self._access else []
        self._choices("qos", [("", _("That of the account")), *((name, name) for name in qualities)])
        if len(qualities) < MOST_NEEDLESS:
            del self.fields["qos"]
        offers = [(row.name, f"{row.heading}: {row.span}") for row in self._bookings.values()]
        self._choices("reservation", [("", _("None")), *offers])
        if not offers:
            del self.fields["reservation"]
        most = self._site.longest_session
        limits = {
            "gpus_per_node": max((kind.per_node for kind in kinds), default=0),
            "nodes": max((len(partition.node_names) for partition in partitions), default=1),
            "hours": most // 60,
            "minutes": most,
        }
        for name, limit in limits.items():
            self.fields[name].widget.attrs["max"] = limit
        self.fields["minutes"].help_text = _("At most %s.") % minutes_words(most)
        names = Datasets(self._site.staging.datasets).names()
        self.fields["stage"].widget.attrs |= {
            "placeholder": ", ".join([*names[:3], "/scratch/..."]),
            "autocomplete": "off",
            "spellcheck": "false",
        }
        self.fields["results"].widget.attrs |= {"placeholder": "/home/...", "spellcheck": "false"}
        self.fields["title"].widget.attrs |= {"placeholder": _("Optional"), "autocomplete": "off"}
        for name in EXPERT:
            self.fields[name].widget.attrs["placeholder"] = _("Automatic")

    @property
    def number_fields(self) -> list[BoundField]:
        """The numbers of hardware that is on no card."""
        return [self[name] for name in NUMBERS]

    @property
    def advanced_fields(self) -> list[BoundField]:
        """The fields that few need."""
        return [self[name] for name in MORE if name in self.fields]

    @property
    def has_advanced(self) -> bool:
        """Whether one of these has a value of its own, or an error."""
        usual = {"app": "lab", "partition": self._site.slurm.default_partition}
        return any(
            field.errors or (field.value() or usual.get(field.name, "")) != usual.get(field.name, "")
            for field in self.advanced_fields
        )

    @property
    def shown(self) -> SafeString:
        """Its visible fields as HTML.

        Most readers are shown the same fields.
        """
        if self.is_bound:
            return self._rendered()
        key = cache_key(
            "start-form", reader_zone().key, *(_attributes(field) for field in self.visible_fields())
        )
        return cached("pages", key, self._rendered, FIELDS_SECONDS)

    def _rendered(self) -> SafeString:
        return render_to_string("sessions/start_fields.html", {"form": self})

    def _choices(self, name: str, choices: list[tuple[Any, Any]]) -> None:
        widget = self.fields[name].widget
        assert isinstance(widget, ChoiceWidget)
        widget.choices = choices

    def _image(self, name: str) -> Image | None:
        try:
            return self._catalogue.get(name)
        except CarmeError:
            return None  # it cannot be used, and the check says why

    def clean_name(self) -> str:
        name = self.cleaned_data["name"]
        return name if re.fullmatch(NAME_PATTERN, name) else new_name()

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        if self._cluster is None:
            raise forms.ValidationError(
                _("Nothing can be started now, because the cluster does not answer. Try again in a moment.")
            )
        wanted = {key: value for key, value in cleaned.items() if key not in NOT_SENT}
        wanted |= {key: cleaned.get(key) or None for key in _MAY_BE_EMPTY}
        wanted["app"] = cleaned.get("app") or "lab"
        try:
            wanted["stage"] = parse_stages(cleaned.get("stage") or "", self._datasets)
            wanted["results"] = cleaned.get("results") or None
            if self._read and (probe := self.probe):
                self.curve, self.requested = self._read(probe.path), dict(cleaned)
                size = cleaned["nodes"], cleaned["gpus_per_node"]
                wanted["prediction"] = self.curve.prediction(*size, probe.steps, probe.reason)
            options = SessionOptions.read(wanted)
            rows, projects = list(self._bookings.values()), list(self._projects.values())
            check_options(options, self._cluster, self._catalogue, self._site, rows, projects, self._access)
        except CarmeError as error:
            field = error.field if error.field in self.fields else None
            if error.field == "partition" and field is None and "reservation" in self.fields:
                field = "reservation"  # the only choice that leads to a partition here
            self.add_error(field, explained(error))
        else:
            self.options = options
        return cleaned


def _attributes(field: BoundField) -> Hashable:
    """All that a field of an unbound form says, for the browser."""
    inner = field.field
    choices = inner.widget.choices if isinstance(inner.widget, ChoiceWidget) else ()
    return (
        *(field.name, str(field.value()), str(field.label), str(field.help_text)),
        *(inner.required, inner.disabled),
        tuple((name, str(value)) for name, value in inner.widget.attrs.items()),
        tuple((str(value), str(label)) for value, label in choices),
    )
