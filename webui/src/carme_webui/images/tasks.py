"""Background work of own images."""

from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.images.services import settle_all

__all__ = ["settle_builds"]


@app.task
def settle_builds() -> None:
    """See which builds have ended."""
    settle_all(broker())
