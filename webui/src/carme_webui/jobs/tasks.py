"""Background work of jobs."""

import logging

from carme.errors import CarmeError
from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.jobs.backfill import backfill_jobs
from carme_webui.jobs.warnings import send_warnings

__all__ = ["mirror_past", "warn"]

logger = logging.getLogger(__name__)


@app.task
def mirror_past() -> None:
    """Bring a further piece of Slurm's accounting into the portal's history."""
    backfill_jobs(broker())


@app.task
def warn() -> None:
    """Notify owners of jobs about which alerts fire, as the site's policy has it."""
    try:
        send_warnings(broker())
    except CarmeError as error:
        logger.warning("Owners of jobs are notified of alerts later: %s", error)
