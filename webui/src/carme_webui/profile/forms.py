"""The form of a user's own choices."""

from typing import Any

from django import forms
from django.conf import settings
from django.utils.translation import gettext_lazy as _

from carme_webui.accounts.models import THEMES, User

__all__ = ["LookForm"]


class LookForm(forms.ModelForm):
    """Language and look of the pages."""

    language = forms.ChoiceField(label=_("Language"), required=False)
    theme = forms.ChoiceField(label=_("Appearance"), required=False, choices=THEMES.items())

    class Meta:
        model = User
        fields = ("language", "theme")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, label_suffix="", **kwargs)
        field = self.fields["language"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [("", _("As the browser asks")), *settings.LANGUAGES]
