"""Housekeeping of logins."""

from allauth.idp.oidc.models import Token
from django.core.management import call_command
from django.utils import timezone

from carme_webui.celery import app

__all__ = ["clear_expired"]


@app.task
def clear_expired() -> None:
    """Delete logins and tokens that have run out."""
    call_command("clearsessions")
    Token.objects.filter(expires_at__lte=timezone.now()).delete()
