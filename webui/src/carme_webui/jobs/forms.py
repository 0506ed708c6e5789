"""The form that submits a batch job, and the one that searches."""

import shlex
from datetime import datetime, time, timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.forms.boundfield import BoundField
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from pydantic import ValidationError

from carme.bookings import YEARS
from carme.errors import CarmeError, InvalidRequest
from carme.images import ImageCatalogue
from carme.jobs import MAXIMUM_MINUTES, Cluster, contents, refusal, split_stages
from carme.jobs.scripts import MAXIMUM_BYTES
from carme_webui.bookings.models import Booking
from carme_webui.clocks import site_zone
from carme_webui.help_links import explained
from carme_webui.jobs.search import FILTERS, KINDS, Search
from carme_webui.jobs.submissions import JobSubmission
from carme_webui.scaling import SCALING, ScalingFields
from carme_webui.sessions.choices import times
from carme_webui.sessions.time_fields import TIME, TimeFields, time_begun_with, time_sent

__all__ = ["SearchForm", "SubmitForm"]


#: What every job needs beside its script and its time; the rest is for few.
COMMON = ("name", "image", "gpus_per_node", "nodes")
#: Jobs run longer than sessions. None is offered until the evening: a job's time begins when it leaves the
#: queue, and nobody knows how long it is until the evening then.
HOURS = (1, 4, 24)


class SubmitForm(TimeFields, ScalingFields):
    """A batch job: a script that is written here, or one in my home.

    Args:
        cluster: The broker's snapshot; None while the broker is down.
        catalogue: The site's images.
        bookings: Those that may be used.
        accounts: Accounts that can be chosen, with titles; without any, one can be written.
        qualities: Qualities of service that can be chosen.
    """

    script = forms.CharField(
        label=_("Script"),
        widget=forms.Textarea(attrs={"rows": 9, "spellcheck": "false", "class": "code"}),
        max_length=MAXIMUM_BYTES,
        required=False,
        strip=False,
    )
    # Of a job that is submitted once more the script may be no UTF-8: how its bytes are shown here.
    script_encoding = forms.CharField(widget=forms.HiddenInput, max_length=16, required=False)
    # Names of the fields that the user set, from the page's script: these count even as the form begins.
    own_fields = forms.CharField(widget=forms.HiddenInput, max_length=1000, required=False)
    script_path = forms.CharField(label=_("Or a script in your home"), max_length=4096, required=False)
    arguments = forms.CharField(label=_("Script arguments"), max_length=4096, required=False)
    name = forms.CharField(label=_("Name"), max_length=64, required=False)
    image = forms.CharField(label=_("Image"), widget=forms.Select, required=False)
    partition = forms.CharField(label=_("Partition"), widget=forms.Select, required=False)
    gpu_type = forms.CharField(label=_("GPU type"), widget=forms.Select, required=False)
    gpus_per_node = forms.IntegerField(label=_("GPUs per node"), min_value=0)
    nodes = forms.IntegerField(label=_("Nodes"), min_value=1)
    cpus_per_node = forms.IntegerField(label=_("Processors per node"), min_value=1, required=False)
    memory_mb_per_node = forms.IntegerField(label=_("Memory per node (MiB)"), min_value=1, required=False)
    account = forms.CharField(label=_("Account"), max_length=64, required=False)
    qos = forms.CharField(label=_("Quality of service"), widget=forms.Select, required=False)
    reservation = forms.CharField(label=_("Booking"), widget=forms.Select, required=False)
    array = forms.CharField(label=_("Array tasks"), max_length=1000, required=False)
    workdir = forms.CharField(label=_("Folder"), max_length=4096, required=False)
    stage = forms.CharField(label=_("Data"), max_length=4000, required=False)
    results = forms.CharField(label=_("Results"), max_length=4096, required=False)

    def __init__(
        self,
        data: Any = None,
        *,
        cluster: Cluster | None,
        catalogue: ImageCatalogue,
        bookings: list[Booking],
        accounts: list[tuple[str, str]] | None = None,
        qualities: list[str] | None = None,
        initial: dict[str, Any] | None = None,
    ) -> None:
        default = settings.SITE.sessions.default_minutes
        partitions = cluster.partitions if cluster else []
        limits = [partition.max_minutes or MAXIMUM_MINUTES for partition in partitions]
        choices = times(default, max(limits, default=MAXIMUM_MINUTES), timezone.now(), HOURS, evening=False)
        #: What the page's script compares with.
        self.begin = {"nodes": 1, "gpus_per_node": 0, "minutes": default}
        values = self.begin | (initial or {})
        values |= time_begun_with(choices, values["minutes"])
        if data:
            data = dict(data.items()) | time_sent(choices, data)
        super().__init__(data, initial=values, label_suffix="")
        self.offer_times(choices)
        self.submission: JobSubmission | None = None
        kinds = sorted({kind for node in cluster.nodes for kind in node.gpus}) if cluster else []
        self._choices("image", _("No image (run on the host)"), catalogue.names())
        self._choices("partition", _("Site default"), [partition.name for partition in partitions])
        self._choices("gpu_type", _("Any type"), kinds)
        self._choices("reservation", _("None"), {row.name: f"{row.heading}: {row.span}" for row in bookings})
        if accounts:
            self.fields["account"].widget = forms.Select()
            self._choices("account", _("None"), dict(accounts))
        self._choices("qos", _("That of the account"), qualities or [])
        if not qualities:
            del self.fields["qos"]
        self.fields["script_path"].help_text = _("A path from your home, like train.sh, or a whole path.")
        self.fields["script"].help_text = _(
            "The first line may name the interpreter, like #!/usr/bin/env python3. #SBATCH lines fill in the "
            "fields that you leave unchanged."
        )
        if self["script_encoding"].value() == contents.PAGE_ENCODING:
            self.fields["script"].help_text = _(
                "This script is not UTF-8. It is shown as Latin-1, and all bytes that you do not change stay "
                "as they are."
            )
        self.fields["array"].help_text = _(
            "One task per number: 0-99, or 0-99%4 to run four at a time. Each finds its "
            "number in SLURM_ARRAY_TASK_ID."
        )
        self.fields["workdir"].help_text = _("Working directory (default: home)")
        self.fields["stage"].help_text = _(
            "Datasets or absolute paths of folders. Copied to the nodes before your time starts. "
            "Find them in $CARME_DATA."
        )
        self.fields["results"].help_text = _("Files in $CARME_RESULTS are copied here when the job ends.")
        for name in ("workdir", "stage", "results"):
            self.fields[name].widget.attrs |= {"placeholder": "/home/...", "spellcheck": "false"}
        self.fields["stage"].widget.attrs["placeholder"] = "/scratch/..."
        for name in ("cpus_per_node", "memory_mb_per_node"):
            self.fields[name].widget.attrs["placeholder"] = _("Automatic")

    @property
    def common_fields(self) -> list[BoundField]:
        """The fields that every job needs beside its script."""
        return [self[name] for name in COMMON]

    @property
    def advanced_fields(self) -> list[BoundField]:
        """The fields that few need."""
        usual = ("script", *COMMON, *TIME, *SCALING)
        return [field for field in self.visible_fields() if field.name not in usual]

    @property
    def has_advanced(self) -> bool:
        """Whether one of these has a value, or an error."""
        return any(field.value() or field.errors for field in self.advanced_fields)

    def _choices(self, name: str, none: Any, offered: Any) -> None:
        widget = self.fields[name].widget
        assert isinstance(widget, forms.Select)
        pairs = list(offered.items()) if isinstance(offered, dict) else [(each, each) for each in offered]
        widget.choices = [("", none), *pairs]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        # What is left as the form begins is not requested: the script may say it.
        own = cleaned.pop("own_fields", "").split()
        values = {
            name: value
            for name, value in cleaned.items()
            if value not in (None, "")
            and (name in own or self.begin.get(name) != value)
            and name not in (*SCALING, "time", "hours")
        }
        if values.pop("script_encoding", "") == contents.PAGE_ENCODING and "script" in values:
            try:
                values["script"] = contents.typed(values["script"])
            except ValueError:
                self.add_error(
                    "script",
                    _(
                        "The script has letters that its encoding, Latin-1, does not have. Remove them, "
                        "or start a new job."
                    ),
                )
                return cleaned
        if values.get("script_path") and not values.get("script", "").strip():
            values.pop("script", None)
        if not values.get("script", "").strip() and not values.get("script_path"):
            # What the job would cost, and when it would begin, is known before its script.
            self.add_error("script", _("Write a script here, or name one in your home below More options."))
        try:
            values["stage"] = split_stages(values.get("stage", ""))
        except InvalidRequest as error:
            self.add_error("stage", explained(error))
            return cleaned
        try:
            values["arguments"] = shlex.split(values.get("arguments", ""))
        except ValueError:
            self.add_error("arguments", _("A quotation mark is not closed. Close it, or leave it out."))
            return cleaned
        try:
            self.submission = JobSubmission(**values)
        except ValidationError as error:
            self.refuse(refusal(error, JobSubmission))
        return cleaned

    def refuse(self, error: CarmeError) -> None:
        """Show an error where it belongs."""
        field = (error.field or "").partition("[")[0]
        self.add_error(field if field in self.fields else None, explained(error))
        # The broker and Slurm refuse a time only after the form was checked.
        self.show_wrong("time", ("hours", "minutes"))


class SearchForm(forms.Form):
    """What is looked for in the list of jobs. What cannot be understood is left out."""

    q = forms.CharField(label=_("Name or number"), max_length=200, required=False)
    state = forms.ChoiceField(
        label=_("State"), choices=[(key, label) for key, (label, _states) in FILTERS.items()], required=False
    )
    kind = forms.ChoiceField(label=_("Kind"), choices=[("", _("All")), *KINDS.items()], required=False)
    since = forms.DateField(label=_("From"), widget=forms.DateInput(attrs={"type": "date"}), required=False)
    until = forms.DateField(label=_("To"), widget=forms.DateInput(attrs={"type": "date"}), required=False)

    def __init__(self, data: Any) -> None:
        super().__init__(data, label_suffix="")
        self.fields["q"].widget.attrs["type"] = "search"

    @property
    def search(self) -> Search:
        """The search; days are those of the site's clocks."""
        self.is_valid()
        cleaned = self.cleaned_data
        until = _midnight(cleaned.get("until"), timedelta(days=1))
        return Search(
            text=cleaned.get("q", ""),
            states=FILTERS[cleaned.get("state", "")][1] if cleaned.get("state") else (),
            kind=cleaned.get("kind", ""),
            since=_midnight(cleaned.get("since")),
            until=until,
        )


def _midnight(day: Any, later: timedelta = timedelta()) -> datetime | None:
    if day is None or day.year not in YEARS:
        return None
    return datetime.combine(day, time(), site_zone()) + later
