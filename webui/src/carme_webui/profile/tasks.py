"""Background work of profiles."""

from carme_webui.celery import app
from carme_webui.profile.mails import send_due

__all__ = ["send_mails"]


@app.task
def send_mails() -> None:
    """Send the mails that are due."""
    send_due()
