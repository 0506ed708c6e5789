"""The fields of a time, which the start form and the batch form share: a choice, or hours and minutes."""

from collections.abc import Sequence
from typing import Any

from django import forms
from django.forms.boundfield import BoundField
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from carme_webui.sessions.choices import CUSTOM, EVENING, evening_minutes

__all__ = ["TIME", "TimeFields", "time_begun_with", "time_sent"]

TIME = ("time", "hours", "minutes")
#: Of a number of minutes in an address.
DIGITS = 9

#: The choices of a time with their words, as `choices.times` makes them.
Times = Sequence[tuple[str, str]]


def time_begun_with(times: Times, minutes: Any) -> dict[str, Any]:
    """The fields' values for so many minutes, which an address may name in whatever words."""
    text = str(minutes)
    values: dict[str, Any] = {"time": text if text in dict(times) else CUSTOM, "minutes": minutes}
    if text.isascii() and text.isdigit():
        values["hours"], values["minutes"] = divmod(int(text[:DIGITS]), 60)
    return values


def time_sent(times: Times, data: Any) -> dict[str, Any]:
    """The fields' values of what was sent, with the minutes of the chosen time."""
    chosen = data.get("time") or CUSTOM
    if chosen == EVENING and chosen in dict(times):
        return {"time": chosen, "hours": "", "minutes": evening_minutes(timezone.now())}
    if chosen in dict(times):
        return {"time": chosen, "hours": "", "minutes": chosen}
    return {"time": chosen}


class TimeFields(forms.Form):
    """A time: one of some choices, or hours and minutes."""

    time = forms.ChoiceField(label=_("Time"), widget=forms.RadioSelect, required=False)
    hours = forms.IntegerField(label=_("Hours"), min_value=0, required=False)
    # With the hours; alone it may be more than an hour.
    minutes = forms.IntegerField(label=_("Minutes"), min_value=0, required=False)

    def offer_times(self, times: Times) -> None:
        """Set the choices."""
        field = self.fields["time"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [*times, (CUSTOM, _("Custom"))]

    @property
    def time_fields(self) -> list[BoundField]:
        """A time that is not a choice."""
        return [self["hours"], self["minutes"]]

    def full_clean(self) -> None:
        """Check it; what is wrong with a number is shown beside that number."""
        super().full_clean()
        self.show_wrong("time", ("hours", "minutes"))

    def show_wrong(self, choice: str, names: Sequence[str]) -> None:
        """Show the fields of these names in place of a choice where one of them is wrong."""
        if self.is_bound and any(name in self.errors for name in names):
            self.data = {**self.data, choice: CUSTOM}

    def clean_minutes(self) -> int:
        """All of the time, in minutes."""
        total = 60 * (self.cleaned_data.get("hours") or 0) + (self.cleaned_data.get("minutes") or 0)
        if not total and "hours" not in self.errors:
            raise forms.ValidationError(_("Enter a time of at least one minute."))
        return total
