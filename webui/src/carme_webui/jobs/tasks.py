"""Background work of jobs."""

from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.jobs.past import read_past

__all__ = ["mirror_past"]


@app.task
def mirror_past() -> None:
    """Bring a further piece of Slurm's accounting into the portal's history."""
    read_past(broker())
