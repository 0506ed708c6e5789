"""What the portal tells a user."""

from django.db import models
from django.utils import timezone

from carme_webui.accounts.models import User

__all__ = ["Notice"]


class Notice(models.Model):
    """A sentence for a user, shown until it has been read."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="notices")
    text = models.CharField(max_length=600)
    created = models.DateTimeField(default=timezone.now)
    read = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created", "-pk")
        indexes = (models.Index(fields=["user", "read"]),)

    def __str__(self) -> str:
        return self.text
