"""The background task that keeps the mirror of jobs."""

import logging

from carme.errors import CarmeError
from carme_webui.alone import alone
from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.jobs.mirror import mirror
from carme_webui.jobs.models import Mirror

__all__ = ["mirror_jobs"]

logger = logging.getLogger(__name__)


@app.task
def mirror_jobs() -> None:
    """Bring the portal's jobs up to date. Twice at once it runs once."""
    with alone("mirror-jobs", seconds=120) as mine:
        if not mine:
            return
        try:
            mirror(broker())
        except CarmeError as error:
            state = Mirror.load()
            if state.failure != str(error):  # said once, not every two seconds
                logger.warning("The jobs could not be read: %s", error)
                state.failure = str(error)
                state.save(update_fields=["failure"])
