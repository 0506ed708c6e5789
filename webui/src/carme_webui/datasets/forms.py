"""The form that enters a dataset, and the job that comes of it."""

import posixpath
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from django import forms
from django.conf import settings
from django.utils.translation import gettext_lazy as _

from carme.jobs import Cluster, JobRequest
from carme_webui.cluster import fitted

__all__ = ["DatasetForm", "request_of", "suggested"]

#: Reading all of a folder mostly waits for the file system.
CPUS, MEMORY_MB = 2, 1024
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z"


class DatasetForm(forms.Form):
    """What is entered under which name."""

    name = forms.RegexField(
        _NAME,
        label=_("Name"),
        max_length=64,
        help_text=_("A name that is there already gets a new version."),
        error_messages={"invalid": _("Use 1 to 64 letters, digits, dots, underscores or hyphens.")},
    )
    path = forms.CharField(
        label=_("Folder or archive"),
        max_length=4000,
        help_text=_(
            "An absolute path in your home or on the scratch. An archive (tar, also with gzip, bzip2 or xz, "
            "or zip) is unpacked beside it."
        ),
    )
    title = forms.CharField(label=_("What it is"), max_length=200, required=False)
    licence = forms.CharField(
        label=_("Licence"),
        max_length=200,
        required=False,
        help_text=_("Under which terms it may be used."),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, label_suffix="", **kwargs)

    def clean_path(self) -> str:
        path = self.cleaned_data["path"]
        if not path.startswith("/") or any(not letter.isprintable() for letter in path):
            raise forms.ValidationError(_("Write an absolute path, like /home/you/data."))
        return posixpath.normpath(path)


def suggested(path: str) -> str:
    """A name for what lies at a path."""
    last = re.sub(r"\.(tar|tgz|tbz2?|txz|zip|tar\.[a-z0-9]+)$", "", path.rstrip("/").rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9_.-]", "-", last).strip(".-")[:64]


def request_of(form: DatasetForm, cluster: Cluster, user: str) -> JobRequest:
    """The job of the user's that reads all files and enters them. Raises InvalidRequest."""
    given = form.cleaned_data
    words = [f"--title={given['title']}", f"--licence={given['licence']}"]
    request = JobRequest(
        name=f"dataset-{given['name']}"[:64],
        kind="batch",
        command=[_program(), "datasets", "add", *words, "--", given["name"], given["path"]],
        minutes=min(settings.SITE.staging.minutes, settings.SITE.sessions.maximum_minutes),
    )
    return fitted(request, cluster, user, CPUS, MEMORY_MB)


def _program() -> str:
    """The command `carme`: beside this Python, or found by its name where no part is installed (`./dev`)."""
    beside = Path(sysconfig.get_path("scripts")) / "carme"
    return str(beside) if beside.exists() else shutil.which("carme") or str(beside)
