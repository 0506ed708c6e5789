"""Forms for administrators."""

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from carme.accounts import MAXIMUM_LENGTH
from carme_webui.projects.models import Project

__all__ = ["NewUserForm"]


class NewUserForm(forms.Form):
    """A new user."""

    name = forms.CharField(
        label=_("User name"),
        max_length=MAXIMUM_LENGTH,
        help_text=_("The name of an existing Unix account."),
        widget=forms.TextInput(
            attrs={"autocapitalize": "none", "spellcheck": "false", "autocomplete": "off"}
        ),
    )
    email = forms.EmailField(label=_("E-mail"), required=False, max_length=254)
    project = forms.ModelChoiceField(
        label=_("Project"),
        required=False,
        queryset=Project.objects.filter(closed=None),
        empty_label=_("None"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, label_suffix="", **kwargs)
