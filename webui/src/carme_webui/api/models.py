"""Personal tokens of the API."""

import hashlib
import secrets
from datetime import datetime, timedelta

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from carme_webui.accounts.models import User

__all__ = ["FOR_ADMINS", "LONGEST", "PREFIX", "SCOPES", "Token"]

PREFIX = "carme_"
LONGEST = timedelta(days=366)
#: How often it is noted that a token was used.
NOTED_EVERY = timedelta(minutes=1)

#: What a token may be allowed, with the words of the profile page. Reading is allowed
#: to each, but for the contents of files and what administrators alone see.
SCOPES = {
    "sessions": _("start, extend and stop sessions"),
    "jobs": _("submit and cancel jobs"),
    "bookings": _("make, change and delete bookings"),
    "images": _("build and delete images"),
    "files-read": _("list my folders and download files"),
    "files": _("upload, rename and delete files"),
    "projects": _("answer invitations, and manage my projects"),
    "profile": _("change my notification settings"),
    "admin": _("do what administrators do"),
}
#: Of no use to others, who are not shown it.
FOR_ADMINS = "admin"


class Token(models.Model):
    """A secret by which a program acts for its owner. Only its digest is kept.

    The secret has 256 random bits, so that a plain SHA-256 cannot be turned round.
    """

    owner = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    label = models.CharField(max_length=80)
    # What the owner recognises it by.
    start = models.CharField(max_length=16)
    digest = models.CharField(max_length=64, unique=True)
    scopes = models.JSONField(default=list)
    created = models.DateTimeField(default=timezone.now)
    expires = models.DateTimeField()
    used = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created",)

    def __str__(self) -> str:
        return f"{self.start}... of {self.owner}"

    @classmethod
    def make(cls, owner: User, label: str, scopes: list[str], expires: datetime) -> tuple["Token", str]:
        """A new token and its secret, which is shown this once."""
        secret = PREFIX + secrets.token_urlsafe(32)
        token = cls.objects.create(
            owner=owner,
            label=label,
            start=secret[: len(PREFIX) + 4],
            digest=_digest(secret),
            scopes=scopes,
            expires=expires,
        )
        return token, secret

    @classmethod
    def find(cls, secret: str) -> "Token | None":
        """The token with this secret; None when there is none, it is over, or its owner may not sign in."""
        now = timezone.now()
        rows = cls.objects.select_related("owner").filter(digest=_digest(secret), expires__gt=now)
        token = rows.filter(owner__is_active=True).first()
        if token is not None and (token.used is None or now - token.used > NOTED_EVERY):
            cls.objects.filter(pk=token.pk).update(used=now)
        return token

    @property
    def has_expired(self) -> bool:
        """It is of no use any more."""
        return self.expires <= timezone.now()

    @property
    def allowed(self) -> str:
        """What it may do, in words."""
        return ", ".join([str(_("read")), *(str(SCOPES[scope]) for scope in self.scopes if scope in SCOPES)])


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
