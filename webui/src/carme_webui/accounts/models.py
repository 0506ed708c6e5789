"""The account of a person."""

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from carme.accounts import ACCOUNT_RULE, MAXIMUM_LENGTH, is_account_name
from carme.translation import translated

__all__ = ["THEMES", "User", "check_name"]

#: How pages may look; the empty one is what the system says.
THEMES = {"": _("System default"), "light": _("Light"), "dark": _("Dark")}


def check_name(name: str) -> None:
    """See that an account may have this name. Raises ValidationError."""
    if not is_account_name(name):
        raise ValidationError(translated(ACCOUNT_RULE))


class User(AbstractUser):
    """A portal account; its name is also the JupyterHub user and the Unix account."""

    username = models.CharField(
        _("user name"),
        max_length=MAXIMUM_LENGTH,
        unique=True,
        validators=[check_name],
        error_messages={"unique": _("There is already an account of that name.")},
    )
    # Empty: what the browser asks for.
    language = models.CharField(max_length=8, blank=True, choices=settings.LANGUAGES)
    theme = models.CharField(max_length=8, blank=True, choices=[(key, key) for key in THEMES if key])
    # Empty: what the browser reported last, else the site's.
    time_zone = models.CharField(max_length=64, blank=True)
    browser_zone = models.CharField(max_length=64, blank=True, editable=False)
    # When it was known to have what jobs need: an association in Slurm, and a home.
    enrolled = models.DateTimeField(null=True, blank=True, editable=False)
    # Hints that are not to be shown any more.
    dismissed = models.JSONField(default=list, blank=True)
    # What differs from the defaults of `carme_webui.profile.kinds`: the kind to what is wanted of it.
    wanted = models.JSONField(default=dict, blank=True)
