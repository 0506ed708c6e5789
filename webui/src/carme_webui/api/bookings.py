"""Bookings, for programs."""

from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.http import Http404, HttpRequest
from django.shortcuts import get_object_or_404
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Query, Router, Status
from ninja.params.functions import Path
from pydantic import BaseModel
from pydantic import ValidationError as ModelError

from carme import api as wire
from carme.bookings import NAME_PATTERN as BOOKING_NAME
from carme.bookings import BookingRequest, BookingState
from carme.errors import InvalidRequest
from carme.jobs import refusal
from carme_webui.accounts.models import User
from carme_webui.api import schemas
from carme_webui.api.access import asker, require, require_admin
from carme_webui.api.answers import GONE, REFUSED, answers
from carme_webui.api.schemas import Paging, page_of
from carme_webui.bookings import services
from carme_webui.bookings.forms import kinds_for
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker, cluster_cache, images
from carme_webui.jobs import submissions
from carme_webui.notifier import notifier
from carme_webui.titles import tidy

__all__ = ["router"]

BookingName = Path(..., pattern=rf"^{BOOKING_NAME}$")

router = Router(tags=["bookings"])


class BookingSearch(Paging):
    """Which bookings."""

    state: BookingState | None = None
    partition: schemas.Words = ""
    since: schemas.Moment | None = None
    until: schemas.Moment | None = None


class SlotSearch(BaseModel):
    """What is requested, and when best."""

    partition: schemas.Words
    gpu_type: schemas.Words
    gpus_per_node: int
    nodes: int = 1
    start: schemas.Moment
    minutes: int


@router.get("", response=answers(wire.Page[wire.BookingOut]))
def list_bookings(request: HttpRequest, search: Query[BookingSearch]) -> Any:
    """My bookings, newest first. Those that others share with me are among 'usable' ones."""
    rows = _bookings().filter(owner=asker(request))
    wanted = {"state": search.state, "partition": search.partition}
    wanted |= {"end__gt": search.since, "start__lt": search.until}
    rows = rows.filter(**{name: value for name, value in wanted.items() if value})
    return page_of(rows, search, schemas.booking_out)


@router.post("", response=answers(wire.BookingOut, HTTPStatus.CONFLICT, status=HTTPStatus.CREATED))
def create_booking(request: HttpRequest, requested: schemas.BookingIn) -> Any:
    """Book nodes. `state` is 'requested' where a manager must approve it first."""
    user = require(request, "bookings")
    proposed = _booking_request(requested.model_dump() | {"title": tidy(requested.title)})
    booking = services.book(user, proposed, settings.SITE, broker())
    _notify(booking)
    return Status(HTTPStatus.CREATED, schemas.booking_out(booking))


@router.get("/usable", response=answers(list[wire.BookingOut]))
def usable_bookings(request: HttpRequest) -> Any:
    """Bookings that I may use, mine and those shared with me, the next one first."""
    user = asker(request)
    return [schemas.booking_out(row, user) for row in Booking.usable(user, timezone.now())]


@router.get("/kinds", response=answers(list[wire.NodeKind]))
def booking_kinds(request: HttpRequest) -> Any:
    """Which nodes I can book."""
    return [wire.NodeKind.model_validate(kind) for kind in kinds_for(asker(request), cluster_cache.cluster())]


@router.get("/slots", response=answers(list[wire.Slot]))
def free_slots(request: HttpRequest, search: Query[SlotSearch]) -> Any:
    """The times nearest to `start` at which these nodes could be had."""
    values = search.model_dump()
    proposed = _booking_request(values | {"start": search.start.replace(microsecond=0)})
    starts = services.free_starts(proposed, settings.SITE, broker())
    return [wire.Slot(start=start, end=start + (proposed.end - proposed.start)) for start in starts]


@router.get("/{name}", response=answers(wire.BookingOut, *GONE))
def show_booking(request: HttpRequest, name: str = BookingName) -> Any:
    """A booking of mine, or one that I may use or take over; for a manager any."""
    user = asker(request)
    found = get_object_or_404(_bookings(), name=name)
    if not found.may_be_seen_by(user):
        raise Http404
    return schemas.booking_out(found, user)


@router.patch("/{name}", response=answers(wire.BookingOut, *REFUSED))
def change_booking(request: HttpRequest, requested: schemas.BookingChange, name: str = BookingName) -> Any:
    """Change a booking of mine."""
    found = _my_booking(require(request, "bookings"), name)
    values = {
        key: value for key, value in requested.model_dump(exclude_unset=True).items() if value is not None
    }
    if "title" in values:
        values["title"] = tidy(values["title"])
    if found.is_over:
        raise InvalidRequest(_("This booking is over."), _("Make a new booking."))
    services.change(found, _booking_request(found.proposed.model_dump() | values), settings.SITE, broker())
    _notify(found)
    return schemas.booking_out(found)


@router.delete("/{name}", response=answers(wire.BookingOut, *GONE))
def delete_booking(request: HttpRequest, name: str = BookingName) -> Any:
    """Delete a booking of mine; its nodes are free for others."""
    found = _my_booking(require(request, "bookings"), name)
    services.delete(found, broker())
    _notify(found)
    return schemas.booking_out(found)


@router.put("/{name}/session", response=answers(wire.BookingOut, *GONE))
def plan_session(request: HttpRequest, requested: schemas.SessionPlan, name: str = BookingName) -> Any:
    """Have a session start in the first minute of a booking of mine, its data brought to the nodes before."""
    user = require(request, "bookings")
    found = _my_booking(user, name)
    stages = submissions.stages_of(requested.stage, user)
    services.plan_session(found, requested.image or "", images(), stages, requested.results)
    return schemas.booking_out(found)


@router.put("/{name}/offer", response=answers(wire.BookingOut, *GONE))
def offer_booking(request: HttpRequest, requested: schemas.Offer, name: str = BookingName) -> Any:
    """Offer a booking of mine to another user. It stays mine until they take it over."""
    found = _my_booking(require(request, "bookings"), name)
    before = found.offered_to
    services.offer(found, (requested.user or "").strip())
    notifier.notify(each.username for each in (before, found.offered_to) if each)
    return schemas.booking_out(found)


@router.post("/{name}/offer", response=answers(wire.BookingOut, *REFUSED))
def answer_offer(request: HttpRequest, requested: schemas.OfferAnswer, name: str = BookingName) -> Any:
    """Take over a booking that was offered to me, or do not."""
    user = require(request, "bookings")
    rows = _bookings().filter(offered_to=user)
    found = get_object_or_404(rows, name=name)
    former = found.owner.username
    if requested.accept:
        services.accept(found, user, settings.SITE, broker())
    else:
        services.decline(found, user)
    notifier.notify([former])
    _notify(found)
    return schemas.booking_out(found, user)


@router.post("/{name}/decision", response=answers(wire.BookingOut, *REFUSED))
def decide_booking(request: HttpRequest, requested: schemas.Decision, name: str = BookingName) -> Any:
    """Approve or refuse a booking that waits for that; for administrators."""
    user = require_admin(request)
    found = get_object_or_404(_bookings(), name=name)
    reason = " ".join(requested.reason.split())
    if requested.approve:
        services.approve(found, broker(), reason)
    else:
        services.deny(found, reason)
    _notify(found)
    return schemas.booking_out(found, user)


def _bookings() -> "QuerySet[Booking]":
    return Booking.objects.select_related("owner", "project", "offered_to")


def _my_booking(user: User, name: str) -> Booking:
    return get_object_or_404(_bookings(), name=name, owner=user)


def _booking_request(values: dict[str, Any]) -> BookingRequest:
    try:
        return BookingRequest(**values)
    except ModelError as error:
        raise refusal(error, BookingRequest) from None


def _notify(found: Booking) -> None:
    notifier.notify(person.username for person in found.people())
