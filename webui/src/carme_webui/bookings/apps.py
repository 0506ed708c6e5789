"""The Django app of bookings."""

from typing import Any

from django.apps import AppConfig
from django.db import transaction
from django.db.models.signals import post_delete, post_save

from carme_webui.notifier import notifier


class BookingsConfig(AppConfig):
    name = "carme_webui.bookings"
    label = "bookings"

    def ready(self) -> None:
        for signal in (post_save, post_delete):
            signal.connect(_changed, sender=self.get_model("Booking"), dispatch_uid="calendar")


def _changed(**_about: Any) -> None:
    """The calendar looks again, now and when others can see the change."""
    notifier.count_booking()
    transaction.on_commit(notifier.count_booking)
