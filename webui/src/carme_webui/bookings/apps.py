"""The Django app of bookings."""

from django.apps import AppConfig


class BookingsConfig(AppConfig):
    name = "carme_webui.bookings"
    label = "bookings"
