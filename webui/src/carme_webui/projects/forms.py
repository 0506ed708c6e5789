"""The forms of projects."""

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from carme.errors import InvalidRequest
from carme.jobs import Cluster, parse_minutes
from carme.jobs.times import minutes_text
from carme_webui.accounts.models import User
from carme_webui.projects.models import Project
from carme_webui.projects.services import MOST, choices, manager_of
from carme_webui.titles import TitleField

__all__ = ["LimitsForm", "NewProjectForm"]


class NewProjectForm(forms.Form):
    """A new project."""

    name = forms.CharField(
        label=_("Name"),
        max_length=32,
        help_text=_("Lower-case letters, digits and hyphens. It cannot change later."),
        widget=forms.TextInput(attrs={"autocapitalize": "none", "spellcheck": "false"}),
    )
    title = TitleField(label=_("Title"), max_length=80)
    manager = forms.CharField(
        label=_("Manager"), max_length=150, help_text=_("The user who invites the others.")
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, label_suffix="", **kwargs)

    def clean_manager(self) -> User:
        try:
            return manager_of(self.cleaned_data["manager"])
        except InvalidRequest as error:
            raise forms.ValidationError(str(error)) from None


class LimitsForm(forms.Form):
    """What a project may use; an empty field is no limit.

    Args:
        project: The project.
        cluster: What there is; None while that is not known, then partitions and types stay as they are.
    """

    title = TitleField(label=_("Title"), max_length=80)
    partitions = forms.MultipleChoiceField(
        label=_("Partitions"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text=_("Choose none to allow all."),
    )
    gpus = forms.IntegerField(label=_("GPUs at a time"), min_value=0, max_value=MOST, required=False)
    nodes = forms.IntegerField(label=_("Nodes at a time"), min_value=0, max_value=MOST, required=False)
    jobs = forms.IntegerField(label=_("Running jobs at a time"), min_value=0, max_value=MOST, required=False)
    minutes = forms.CharField(
        label=_("Longest job"), max_length=32, required=False, help_text=_("Like 90 (minutes), 2h or 1d12h.")
    )
    gpu_hours = forms.IntegerField(
        label=_("GPU-hours"),
        min_value=0,
        max_value=MOST,
        required=False,
        help_text=_("In total, as far as Slurm remembers. At some sites older use counts less."),
    )

    def __init__(self, data: Any = None, *, project: Project, cluster: Cluster | None) -> None:
        initial = {name: getattr(project, name) for name in ("title", "partitions", "gpus", "nodes", "jobs")}
        initial |= {"gpu_hours": project.gpu_hours}
        initial |= {"minutes": minutes_text(project.minutes) if project.minutes else ""}
        super().__init__(data, initial=initial, label_suffix="")
        partitions, self._types = choices(project, cluster)
        field = self.fields["partitions"]
        assert isinstance(field, forms.MultipleChoiceField)
        field.choices = [(name, name) for name in partitions]
        for kind in self._types:
            self.fields[f"type-{kind}"] = forms.IntegerField(
                label=_("GPUs of type %s at a time") % kind,
                min_value=0,
                max_value=MOST,
                required=False,
                initial=project.gpu_types.get(kind),
                help_text=_("0: none."),
            )

    def clean_minutes(self) -> int | None:
        text = self.cleaned_data["minutes"]
        try:
            return parse_minutes(text) if text else None
        except InvalidRequest as error:
            raise forms.ValidationError(str(error)) from None

    @property
    def values(self) -> dict[str, Any]:
        """What `services.limit` takes, of a valid form."""
        cleaned = self.cleaned_data
        values = {name: value for name, value in cleaned.items() if not name.startswith("type-")}
        types = {kind: cleaned[f"type-{kind}"] for kind in self._types}
        return values | {"gpu_types": {kind: most for kind, most in types.items() if most is not None}}
