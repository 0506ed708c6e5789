"""Background work of bookings."""

from carme_webui.bookings.reconcile import reconcile
from carme_webui.celery import app
from carme_webui.cluster import broker

__all__ = ["reconcile_bookings"]


@app.task
def reconcile_bookings() -> None:
    """Make bookings and Slurm's reservations agree, and give back what nobody uses."""
    reconcile(broker())
