"""What was done that is no change of a row: the audit log holds it by this."""

from django.db import models

from carme_webui.accounts.models import User

__all__ = ["AuditEntry"]


class AuditEntry(models.Model):
    """Somebody did something to something outside of the portal's database, such as a node or a job."""

    by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    text = models.CharField(max_length=400)

    def __str__(self) -> str:
        return self.text
