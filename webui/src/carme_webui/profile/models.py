"""The portal's notices to a user."""

from django.db import models
from django.utils import timezone

from carme_webui.accounts.models import User
from carme_webui.profile.kinds import Kind

__all__ = ["Mailing", "Notice"]


class Mailing(models.TextChoices):
    """What is to become, or became, of the mail. Only what is due is ever sent, so nothing is sent twice."""

    NONE = ""
    DUE = "due"
    BEING_SENT = "being sent"
    SENT = "sent"
    REFUSED = "refused"


class Notice(models.Model):
    """A sentence for a user: on pages until it has been read, and in a mail.

    What has a key is sent once: `key` names the event, such as the start of one booking.
    """

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="notices")
    kind = models.CharField(max_length=24, default=Kind.ACCOUNT.value)
    key = models.CharField(max_length=120, null=True)
    text = models.CharField(max_length=600)
    # The path of the page that it is about.
    link = models.CharField(max_length=200, blank=True)
    created = models.DateTimeField(default=timezone.now)
    on_page = models.BooleanField(default=True)
    read = models.DateTimeField(null=True)
    mailing = models.CharField(max_length=12, blank=True, choices=Mailing.choices, default=Mailing.NONE)
    tries = models.IntegerField(default=0)
    # When it is tried (again).
    due = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created", "-pk")
        indexes = (
            models.Index(fields=["user", "read"]),
            models.Index(fields=["due"], condition=models.Q(mailing="due"), name="notice_mail_due"),
        )
        constraints = (models.UniqueConstraint(fields=["user", "key"], name="told_once"),)

    def __str__(self) -> str:
        return self.text
