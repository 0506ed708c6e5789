"""The fields of a prediction, which the start form and the batch form share."""

from django import forms
from django.forms.boundfield import BoundField
from django.utils.translation import gettext_lazy as _

from carme.scaling.predictions import MOST_FILE, MOST_REASON, MOST_STEPS
from carme_webui.scaling.probes import Probe
from carme_webui.titles import TitleField

__all__ = ["SCALING", "ScalingFields"]

SCALING = ("scaling", "steps", "reason")


class ScalingFields(forms.Form):
    """A probe's result, the training's steps, and why so many GPUs are requested."""

    scaling = forms.CharField(
        label=_("Result of a probe"),
        max_length=MOST_FILE,
        required=False,
        widget=forms.TextInput(
            attrs={
                "placeholder": "scale.json",
                "list": "probe-files",
                "autocomplete": "off",
                "spellcheck": "false",
            }
        ),
        help_text=_("A file that carme-run --scale-probe wrote, by its path or its name in your home."),
    )
    steps = forms.IntegerField(
        label=_("Training steps"),
        min_value=1,
        max_value=MOST_STEPS,
        required=False,
        help_text=_("Of the whole training, to see hours and GPU-hours."),
    )
    reason = TitleField(
        label=_("Reason for many GPUs"),
        max_length=MOST_REASON,
        required=False,
        help_text=_(
            "Needed where the efficiency is below what your site accepts. Administrators can read it."
        ),
    )

    @property
    def scaling_fields(self) -> list[BoundField]:
        """These fields."""
        return [self[name] for name in SCALING]

    @property
    def has_scaling(self) -> bool:
        """Whether one of them has a value or an error."""
        return any(field.value() or field.errors for field in self.scaling_fields)

    @property
    def probe(self) -> Probe | None:
        """What they say, once they have been checked; None: nothing."""
        cleaned = getattr(self, "cleaned_data", {})
        path = (cleaned.get("scaling") or "").strip()
        return Probe(path, cleaned.get("steps"), cleaned.get("reason") or "") if path else None
