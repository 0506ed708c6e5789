"""The account of a person."""

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

__all__ = ["THEMES", "User"]

#: How pages may look; the empty one is what the system says.
THEMES = {"": _("As the system says"), "light": _("Light"), "dark": _("Dark")}


class User(AbstractUser):
    """A portal account; its name is also the JupyterHub user and the Unix account."""

    username = models.CharField(
        _("user name"),
        max_length=32,
        unique=True,
        validators=[
            RegexValidator(
                r"^[a-z_][a-z0-9_-]{0,31}\Z",
                _(
                    "A user name has 1 to 32 lower-case letters, digits, hyphens and underscores and begins "
                    "with a letter or an underscore, as the Unix account does."
                ),
            )
        ],
        error_messages={"unique": _("There is already an account of that name.")},
    )
    # Empty: what the browser asks for.
    language = models.CharField(max_length=8, blank=True, choices=settings.LANGUAGES)
    theme = models.CharField(max_length=8, blank=True, choices=[(key, key) for key in THEMES if key])
    # When it was known to have what jobs need: an association in Slurm, and a home.
    enrolled = models.DateTimeField(null=True, blank=True, editable=False)
    # What differs from the defaults of `carme_webui.profile.kinds`: the kind to what is wanted of it.
    wanted = models.JSONField(default=dict, blank=True)
