"""Background work of maintenance."""

from carme_webui.announcements import services
from carme_webui.celery import app
from carme_webui.cluster import broker

__all__ = ["reconcile_maintenance"]


@app.task
def reconcile_maintenance() -> None:
    """Make maintenance and Slurm's reservations agree, and notify whom it concerns."""
    services.reconcile(broker())
