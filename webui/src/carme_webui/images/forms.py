"""The form that builds an image."""

from collections.abc import Sequence
from typing import Any

from django import forms
from django.conf import settings
from django.utils.translation import gettext_lazy as _

from carme.images import ImageCatalogue
from carme.images.building import MAXIMUM_TEXT
from carme_webui.images.services import ImageIn, ShareIn
from carme_webui.projects.models import Project
from carme_webui.titles import TitleField

__all__ = ["BuildForm", "ShareForm"]

KINDS = [
    ("requirements", _("Packages for pip, one per line")),
    ("definition", _("A definition of Apptainer")),
]


class BuildForm(forms.Form):
    """What is to be built.

    Args:
        catalogue: The site's images, on which packages are installed.
        projects: Those with which it can be shared.
    """

    name = forms.CharField(label=_("Name"), max_length=31)
    title = TitleField(label=_("Title"), max_length=80, required=False)
    kind = forms.ChoiceField(label=_("Built from"), choices=KINDS)
    base = forms.ChoiceField(label=_("Base image"), required=False)
    text = forms.CharField(
        label=_("Packages or definition"),
        widget=forms.Textarea(
            attrs={
                "rows": 8,
                "spellcheck": "false",
                "class": "code",
                "placeholder": "scikit-learn\npandas==2.3",
            }
        ),
        max_length=MAXIMUM_TEXT,
        strip=False,
    )
    project = forms.ChoiceField(label=_("Share with a project"), required=False)
    folder = forms.CharField(label=_("Folder"), max_length=4000, required=False)

    def __init__(
        self,
        data: Any = None,
        *,
        catalogue: ImageCatalogue,
        projects: Sequence[Project],
        initial: dict[str, Any] | None = None,
    ) -> None:
        begin = {"base": settings.SITE.images.default, "kind": "requirements"}
        super().__init__(data, initial=begin | (initial or {}), label_suffix="")
        _choose(self, "base", [(name, name) for name in catalogue.names()])
        _choose(self, "project", _projects(projects))
        if not projects:
            del self.fields["project"]
        self.fields["name"].widget.attrs |= {"autocapitalize": "none", "spellcheck": "false"}
        self.fields["name"].help_text = _("Lower-case letters, digits, dots, hyphens and underscores.")
        self.fields["base"].help_text = _(
            "For a list of packages. A definition names its base itself: From: {{ base }}."
        )
        self.fields["folder"].help_text = _(
            "Leave empty to keep it in your home, for you alone. To share it, enter a "
            "folder that the project's members can read."
        )

    @property
    def proposed(self) -> ImageIn:
        """What was requested, once the form is valid."""
        return ImageIn(**{name: value for name, value in self.cleaned_data.items() if value is not None})


class ShareForm(forms.Form):
    """With whom an image that is built is shared.

    Args:
        projects: Those with which it can be.
    """

    project = forms.ChoiceField(label=_("Share with a project"), required=False)
    folder = forms.CharField(label=_("Folder"), max_length=4000, required=False)

    def __init__(
        self, data: Any = None, *, projects: Sequence[Project], initial: dict[str, Any] | None = None
    ) -> None:
        super().__init__(data, initial=initial, label_suffix="")
        _choose(self, "project", _projects(projects))
        self.fields["folder"].help_text = _(
            "Folder for its file, which the project's members can read. Leave empty to keep "
            "the file where it is."
        )

    @property
    def proposed(self) -> ShareIn:
        """What was requested, once the form is valid."""
        return ShareIn(**self.cleaned_data)


def _projects(projects: Sequence[Project]) -> list[tuple[Any, Any]]:
    return [("", _("None: for me alone")), *((row.name, row.title) for row in projects)]


def _choose(form: forms.Form, name: str, choices: list[tuple[Any, Any]]) -> None:
    field = form.fields[name]
    assert isinstance(field, forms.ChoiceField)
    field.choices = choices
