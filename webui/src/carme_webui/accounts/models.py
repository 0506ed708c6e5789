"""The account of a person."""

from django.contrib.auth.models import AbstractUser
from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

__all__ = ["User"]


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
