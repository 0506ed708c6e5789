"""Many who book the same nodes in the same moment."""

import threading
from datetime import timedelta

import pytest
from django.db import close_old_connections, connections
from django.utils import timezone

from carme.bookings import BookingRequest
from carme.errors import InvalidRequest
from carme_webui.accounts.models import User
from carme_webui.bookings import services
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker as site_broker

from .fake_broker import FakeBroker


@pytest.mark.django_db(transaction=True)
def test_no_node_is_booked_twice_by_those_who_come_at_the_same_moment(broker: FakeBroker, rules) -> None:
    from django.conf import settings

    users = [User.objects.create_user(f"user{number}") for number in range(6)]
    start = timezone.now().replace(second=0, microsecond=0) + timedelta(hours=1)
    proposed = BookingRequest(partition="gpu", gpu_type="a100", gpus_per_node=4, start=start, minutes=60)
    together = threading.Barrier(len(users))
    refused: list[str] = []

    def book(user: User) -> None:
        together.wait()
        try:
            services.book(user, proposed, settings.SITE, site_broker())
        except InvalidRequest as error:
            refused.append(error.message)
        finally:
            close_old_connections()
            connections.close_all()

    threads = [threading.Thread(target=book, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row.node_names for row in Booking.objects.all()) == [["n1"], ["n2"]]
    assert len(refused) == 4 and all("is free for the whole time" in words for words in refused)
    assert {name for reservation in broker.reservations.values() for name in reservation.node_names} == {
        "n1",
        "n2",
    }
