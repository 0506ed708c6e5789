"""Forms of administrators: news and maintenance."""

from datetime import datetime
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from carme.bookings import YEARS
from carme.bookings.clock import from_local
from carme.errors import CarmeError
from carme_webui.announcements.models import Maintenance, News
from carme_webui.clocks import site_zone
from carme_webui.titles import TitleField

__all__ = ["MaintenanceForm", "NewsForm"]

_TEXT = forms.Textarea(attrs={"rows": 5})


class _Titled(forms.ModelForm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, label_suffix="", **kwargs)


class NewsForm(_Titled):
    """News."""

    title = TitleField(label=_("Title"), max_length=120)
    text = forms.CharField(label=_("Text"), max_length=4000, required=False, widget=_TEXT)
    until = forms.DateField(
        label=_("On the dashboard until"),
        required=False,
        widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d"),
        help_text=_("Leave empty to show it while it is among the three latest."),
    )

    class Meta:
        model = News
        fields = ("title", "text", "until")


class MaintenanceForm(_Titled):
    """A time of maintenance, by the site's clocks."""

    title = TitleField(label=_("Title"), max_length=120)
    text = forms.CharField(label=_("What users should know"), max_length=4000, required=False, widget=_TEXT)
    nodes = forms.CharField(
        label=_("Nodes"),
        max_length=20_000,
        required=False,
        help_text=_("Comma-separated names. Leave empty for all nodes."),
    )
    start_date = forms.DateField(label=_("Start date"))
    start_time = forms.TimeField(label=_("Start time"))
    end_date = forms.DateField(label=_("End date"))
    end_time = forms.TimeField(label=_("End time"))

    class Meta:
        model = Maintenance
        fields = ("title", "text")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("start", "end"):
            day = forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d")
            self.fields[f"{name}_date"].widget = day
            self.fields[f"{name}_time"].widget = forms.TimeInput(attrs={"type": "time"}, format="%H:%M")
        self.fields["end_time"].help_text = _("Times are in %(zone)s.") % {"zone": site_zone().key}
        if self.instance.pk:
            row = self.instance
            self.initial["nodes"] = "" if row.whole else ", ".join(row.node_names)
            for name, moment in (("start", row.start), ("end", row.end)):
                local = moment.astimezone(site_zone())
                self.initial.update({f"{name}_date": local.date(), f"{name}_time": local.time()})
            if row.begun:
                for name in ("start_date", "start_time"):
                    self.fields[name].disabled = True

    @property
    def node_names(self) -> list[str]:
        """The nodes that were named."""
        return self.cleaned_data["nodes"].replace(",", " ").split()

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        for name in ("start", "end"):
            self._take(name, cleaned)
        return cleaned

    def _take(self, name: str, cleaned: dict[str, Any]) -> None:
        if name == "start" and self.fields["start_date"].disabled:
            return
        day, time = cleaned[f"{name}_date"], cleaned[f"{name}_time"]
        if day.year not in YEARS:
            self.add_error(f"{name}_date", _("This day is too far away."))
            return
        try:
            moment = from_local(datetime.combine(day, time).replace(second=0, microsecond=0), site_zone())
        except CarmeError as error:
            self.add_error(f"{name}_time", str(error))
        else:
            setattr(self.instance, name, moment)
