"""The form of a user's own choices."""

from typing import Any

from django import forms
from django.conf import settings
from django.utils.translation import gettext_lazy as _

from carme_webui.accounts.models import THEMES, User
from carme_webui.accounts.zone import zone_names

__all__ = ["AppearanceForm"]


class AppearanceForm(forms.ModelForm):
    """Language, appearance and time zone of the pages."""

    language = forms.ChoiceField(label=_("Language"), required=False)
    theme = forms.ChoiceField(label=_("Appearance"), required=False, choices=THEMES.items())
    time_zone = forms.ChoiceField(label=_("Time zone"), required=False)

    class Meta:
        model = User
        fields = ("language", "theme", "time_zone")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, label_suffix="", **kwargs)
        field = self.fields["language"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [("", _("Browser default")), *settings.LANGUAGES]
        zones = self.fields["time_zone"]
        assert isinstance(zones, forms.ChoiceField)
        browsers = self.instance.browser_zone or settings.SITE.site.time_zone
        automatic = _("The browser's (%s)") % browsers
        zones.choices = [("", automatic), *((name, name) for name in zone_names())]
