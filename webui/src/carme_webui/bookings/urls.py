"""Addresses of bookings."""

from django.urls import path, register_converter
from django.urls.converters import StringConverter

from carme.bookings import NAME_PATTERN
from carme_webui.bookings import views


class BookingNameConverter(StringConverter):
    """The names that the portal gives."""

    regex = NAME_PATTERN


register_converter(BookingNameConverter, "booking_name")

urlpatterns = [
    path("", views.calendar, name="bookings"),
    path("share/", views.share, name="booking-share"),
    path("new/", views.new, name="booking-new"),
    path("feed/", views.renew_feed, name="booking-feed-renew"),
    path("feed/<str:username>/<slug:secret>.ics", views.feed, name="booking-feed"),
    path("<booking_name:name>/", views.booking, name="booking"),
    path("<booking_name:name>/change/", views.change, name="booking-change"),
    path("<booking_name:name>/delete/", views.delete, name="booking-delete"),
    path("<booking_name:name>/session/", views.plan_session, name="booking-session"),
    path("<booking_name:name>/offer/", views.offer, name="booking-offer"),
    path("<booking_name:name>/answer/", views.answer_offer, name="booking-answer"),
    path("<booking_name:name>/decide/", views.decide, name="booking-decide"),
]
