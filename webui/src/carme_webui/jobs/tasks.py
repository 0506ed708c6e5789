"""Background work of jobs."""

from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.jobs.backfill import backfill_jobs
from carme_webui.jobs.warnings import send_warnings

__all__ = ["mirror_past", "warn"]


@app.task
def mirror_past() -> None:
    """Bring a further piece of Slurm's accounting into the portal's history."""
    backfill_jobs(broker())


@app.task
def warn() -> None:
    """Notify owners of jobs about which alerts fire, as the site's policy has it."""
    send_warnings(broker())
