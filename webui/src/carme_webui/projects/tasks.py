"""Background work of projects."""

from carme_webui.celery import app
from carme_webui.cluster import broker
from carme_webui.projects.reconcile import reconcile

__all__ = ["reconcile_projects"]


@app.task
def reconcile_projects() -> None:
    """Make projects and Slurm's accounts agree, and read what is used."""
    reconcile(broker())
