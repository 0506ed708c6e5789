"""Background work of accounts: what signing in and out begins, and housekeeping."""

import logging
from typing import Any

from allauth.idp.oidc.models import Token
from django.conf import settings
from django.core.management import call_command
from django.utils import timezone

from carme.errors import CarmeError
from carme_webui.accounts.models import User
from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.sessions.hub import Hub, HubError

__all__ = ["clear_expired", "enrol", "sign_out_of_hub"]

logger = logging.getLogger(__name__)

#: Seconds until a hub that did not answer is notified again, and how often.
TRY_AGAIN_SECONDS = 30
TRIES = 24 * 3600 // TRY_AGAIN_SECONDS


@app.task
def clear_expired() -> None:
    """Delete logins and tokens that have run out."""
    call_command("clearsessions")
    Token.objects.filter(expires_at__lte=timezone.now()).delete()


@app.task(bind=True, max_retries=TRIES, default_retry_delay=TRY_AGAIN_SECONDS)
def sign_out_of_hub(self: Any, user: str, before: float) -> None:
    """Notify JupyterHub that what it knows of a user's logins counts no more; a day long, if it is away.

    Args:
        before: Logins from before this time, in seconds since 1970.
    """
    try:
        Hub(settings.SITE).sign_out(user, before=before)
    except HubError as error:
        logger.warning("The hub was not notified that %s signed out: %s", user, error)
        if not self.request.is_eager:  # a page waits
            raise self.retry(exc=error) from None


@app.task
def enrol(name: str) -> None:
    """Give a user an association in Slurm and a home."""
    try:
        broker().enrol(name, user=name)
    except CarmeError as error:
        logger.warning("%s has signed in and cannot run jobs yet: %s", name, error)
    else:
        User.objects.filter(username=name).update(enrolled=timezone.now())
