"""The calendar of bookings, and the pages of one booking."""

import logging
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.bookings import YEARS, BookingRequest, BookingState
from carme.errors import CarmeError
from carme.jobs import Cluster, parse_stages, stage_text
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.bookings import data, services
from carme_webui.bookings.forms import BookingForm, Kind, kinds, kinds_for, moment_of, next_start
from carme_webui.bookings.ics import calendar_text, owner_of, renew, secret_of
from carme_webui.bookings.models import Booking
from carme_webui.bookings.share import share_of
from carme_webui.bookings.table import VIEWS, Shown, table_of
from carme_webui.caches import derived
from carme_webui.clocks import reader_zone, span_words
from carme_webui.cluster import Reservations, RunningJobs, broker, cluster_cache, images
from carme_webui.datasets import datasets_of
from carme_webui.help_links import explained
from carme_webui.notifier import notifier
from carme_webui.pages import keep_refused, report_freed
from carme_webui.projects.models import own_projects
from carme_webui.sessions.models import Session

__all__ = [
    "answer_offer", "booking", "calendar", "change", "decide", "delete", "feed", "new", "offer",
    "plan_session", "renew_feed", "share",
]  # fmt: skip

logger = logging.getLogger(__name__)

#: Nodes on one page of the calendar.
LANES = 40
FEED_DAYS = 60  # of the past that a feed still shows


@require_safe
def calendar(request: HttpRequest) -> HttpResponse:
    """Who has which node when, for a day or a week from today or another day on."""
    user, now, zone = signed_in(request), timezone.now(), reader_zone()
    view = request.GET.get("view", "")
    view = view if view in VIEWS else "week"
    first = _day(request.GET.get("day", "")) or now.astimezone(zone).date()
    days, length = VIEWS[view]
    cluster, running, reservations, banner = _cluster_state()
    offered = kinds(cluster, settings.SITE)
    kind = _chosen(offered, request.GET.get("kind", ""))
    page = Paginator(_nodes(cluster, kind), LANES).get_page(request.GET.get("page"))
    shown = Shown.at(now, view, first, kind.key if kind else "", zone)
    near = Booking.related_to(user)
    table = table_of(user, near, shown, list(page), running, reservations)
    usable = [row for row in near if row.may_be_used_by(user)]
    waiting = list(Booking.open().filter(state=BookingState.REQUESTED)[:LANES]) if user.is_staff else []
    return render(
        request,
        "bookings/calendar.html",
        {
            "view": view,
            "day": first,
            "table": table,
            "page": page,
            "zone": zone,
            "kinds": offered,
            "kind": kind,
            "query": urlencode({"kind": kind.key if kind else ""}),
            "before": first - timedelta(days=days),
            "after": first + timedelta(days=days),
            "slot_minutes": length // timedelta(minutes=1),
            "usable": usable,
            "waiting": waiting,
            "offered": [row for row in near if row.offered_to_id == user.pk],
            "banner": banner,
            "feed": _feed_address(user),
        },
    )


@require_safe
def share(request: HttpRequest) -> HttpResponse:
    """The part of the calendar's page that shows how much is booked on each of its days."""
    user, now, zone = signed_in(request), timezone.now(), reader_zone()
    view = request.GET.get("view", "")
    view = view if view in VIEWS else "week"
    first = _day(request.GET.get("day", "")) or now.astimezone(zone).date()
    cluster, _running, reservations, _banner = _cluster_state()
    offered = kinds(cluster, settings.SITE)
    kind = _chosen(offered, request.GET.get("kind", ""))
    stack = None
    if kind is not None:
        days = Shown.at(now, view, first, kind.key, zone).days
        names = [name for name, _available in _nodes(cluster, kind)]
        # The limit counts all GPUs of a type in the partition: no line where several kinds of nodes have it.
        same = [
            option
            for option in offered
            if (option.partition, option.gpu_type) == (kind.partition, kind.gpu_type)
        ]
        policy = settings.SITE.booking_policy(kind.partition) if len(same) == 1 else None
        stack = share_of(user, days, names, kind.gpus, reservations, policy)
    return render(request, "bookings/share.html", {"stack": stack, "view": view})


@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """The form, and the booking that comes of it."""
    user = signed_in(request)
    cluster, _running, _reservations, banner = _cluster_state()
    offered = kinds_for(user, cluster)
    if request.method != "POST":
        form = BookingForm(
            offered=offered,
            projects=own_projects(user),
            start=_initial_start(request),
            initial=_initial_values(request, offered),
        )
        return _form_page(request, form, banner)
    form = BookingForm(_with_slot(request), offered=offered, projects=own_projects(user))
    if form.is_valid() and form.proposed is not None:
        try:
            created = services.book(user, form.proposed, settings.SITE, broker())
        except CarmeError as error:
            form.refuse(error)
        else:
            _notify_people(created)
            messages.success(
                request,
                _("Booked: %s.") % created.span
                if created.state != BookingState.REQUESTED
                else _("Your booking waits for a manager's approval."),
            )
            return redirect(created)
    return _form_page(request, form, banner, None, form.proposed)


@require_safe
def booking(request: HttpRequest, name: str) -> HttpResponse:
    """One booking."""
    user = signed_in(request)
    return _booking_page(request, user, _visible(user, name))


def _booking_page(
    request: HttpRequest, user: User, found: Booking, planned: dict[str, str] | None = None
) -> HttpResponse:
    """The page of a booking.

    Args:
        planned: What the form of its session had when it was refused.
    """
    *_rest, banner = _cluster_state()
    return render(
        request,
        "bookings/booking.html",
        {
            "booking": found,
            "own": found.owner == user,
            "offered": found.offered_to == user and not found.is_over,
            "session": Session.objects.filter(name=found.session_name or None, owner=user).first(),
            "images": _image_titles() if found.owner == user and not found.session_name else {},
            "may_decide": user.is_staff and found.state == BookingState.REQUESTED,
            "planned": planned
            or {
                "image": found.session_image,
                "stage": stage_text(data.stages_of(found)),
                "results": found.session_results,
            },
            "usable": found.may_be_used_by(user)
            and found.state in (BookingState.APPROVED, BookingState.ACTIVE),
            "grace": found.policy(settings.SITE).grace_minutes,
            "banner": banner,
            "zone": reader_zone(),
        },
        status=422 if planned else 200,
    )


@require_http_methods(["GET", "HEAD", "POST"])
def change(request: HttpRequest, name: str) -> HttpResponse:
    """Change a booking of mine."""
    found = _own(signed_in(request), name)
    if found.is_over:
        return redirect(found)
    cluster, _running, _reservations, banner = _cluster_state()
    offered = kinds_for(found.owner, cluster)
    if request.method != "POST":
        return _form_page(request, BookingForm(offered=offered, booking=found), banner, found)
    form = BookingForm(_with_slot(request), offered=offered, booking=found)
    if form.is_valid() and form.proposed is not None:
        try:
            services.change(found, form.proposed, settings.SITE, broker())
        except CarmeError as error:
            form.refuse(error)
            found.refresh_from_db()
        else:
            _notify_people(found)
            messages.success(request, _("Changed: %s.") % found.span)
            return redirect(found)
    return _form_page(request, form, banner, found, form.proposed)


@require_http_methods(["GET", "HEAD", "POST"])
def delete(request: HttpRequest, name: str) -> HttpResponse:
    """Ask whether to delete a booking of mine, and delete it."""
    found = _own(signed_in(request), name)
    if request.method != "POST" and not found.is_over:
        return render(request, "bookings/delete.html", {"booking": found})
    if request.method == "POST":
        try:
            freed = services.delete(found, broker())
        except CarmeError as error:
            messages.error(request, explained(error))
        else:
            _notify_people(found)
            free = _("The booking is deleted; its nodes are free for others.")
            report_freed(request, freed, _("The booking is deleted."), free)
    return redirect(found)


@require_POST
def plan_session(request: HttpRequest, name: str) -> HttpResponse:
    """Have a session start in the first minute of a booking of mine, or none."""
    user = signed_in(request)
    found = _own(user, name)
    given = {key: request.POST.get(key, "")[:4096].strip() for key in ("image", "stage", "results")}
    try:
        stage = parse_stages(given["stage"], datasets_of(user))
        services.plan_session(found, given["image"], images(), stage, given["results"] or None)
    except CarmeError as error:
        messages.error(request, explained(error))
        return _booking_page(request, user, found, given)
    messages.success(
        request,
        _("A session starts in the first minute of this booking.")
        if found.session_image
        else _("No session starts automatically."),
    )
    return redirect(found)


@require_POST
def offer(request: HttpRequest, name: str) -> HttpResponse:
    """Offer a booking of mine to another user, or to nobody any more."""
    found = _own(signed_in(request), name)
    before = found.offered_to
    try:
        services.offer(found, request.POST.get("user", "").strip())
    except CarmeError as error:
        messages.error(request, explained(error))
    else:
        taker = found.offered_to
        notifier.notify(affected.username for affected in (before, taker) if affected)
        messages.success(
            request,
            _("%s may take over this booking now. It stays yours until then.") % taker.username
            if taker
            else _("The booking stays yours."),
        )
    return redirect(found)


@require_POST
def answer_offer(request: HttpRequest, name: str) -> HttpResponse:
    """Take over a booking that was offered to me, or do not."""
    user = signed_in(request)
    found = _visible(user, name)
    former = found.owner.username
    try:
        if request.POST.get("answer") == "accept":
            services.accept(found, user, settings.SITE, broker())
            messages.success(request, _("The booking is yours now."))
        else:
            services.decline(found, user)
            messages.success(request, _("You did not take the booking over."))
    except CarmeError as error:
        messages.error(request, explained(error))
    notifier.notify([former])
    _notify_people(found)
    return redirect(found if found.may_be_seen_by(user) else "bookings")


@require_POST
def decide(request: HttpRequest, name: str) -> HttpResponse:
    """A manager approves or refuses a booking."""
    user = signed_in(request)
    if not user.is_staff:
        raise Http404
    found = get_object_or_404(Booking.objects.select_related("owner"), name=name)
    reason = " ".join(request.POST.get("reason", "").split())[:200]
    back = found.get_absolute_url()
    queue = request.POST.get("back") == "queue"
    if queue:
        page = request.POST.get("page", "")[:9]
        back = reverse("admin-approvals") + (f"?{urlencode({'page': page})}" if page else "")
    try:
        if request.POST.get("answer") == "approve":
            services.approve(found, broker(), reason)
        else:
            services.deny(found, reason)
    except CarmeError as error:
        messages.error(request, explained(error))
        if queue:
            keep_refused(request, "admin-approvals", found.name, reason)
        return redirect(back)
    _notify_people(found)
    messages.success(request, _("Done: %s.") % found.label)
    logger.info("%s decided on booking %s: %s", user.username, found.name, found.label)
    return redirect(back)


@login_not_required
@require_safe
def feed(request: HttpRequest, username: str, secret: str) -> HttpResponse:
    """The bookings of anyone who knows the secret address."""
    owner = owner_of(username, secret)
    if owner is None:
        raise Http404
    now = timezone.now()
    rows = Booking.objects.filter(end__gt=now - timedelta(days=FEED_DAYS)).select_related("owner")
    shown = [
        row
        for row in rows
        if row.may_be_used_by(owner) and (not row.is_over or (row.ended and row.ended > row.start))
    ]
    answer = HttpResponse(calendar_text(shown, now), content_type="text/calendar; charset=utf-8")
    answer["Cache-Control"] = "private, no-store"
    return answer


@require_POST
def renew_feed(request: HttpRequest) -> HttpResponse:
    """Give my feed another address."""
    renew(signed_in(request))
    messages.success(request, _("Your calendar feed has a new address; the old one does not work any more."))
    return redirect("bookings")


def _visible(user: User, name: str) -> Booking:
    """A booking whose page this user may see: own, shared or offered, any for a manager."""
    found = get_object_or_404(Booking.objects.select_related("owner", "offered_to", "project"), name=name)
    if not found.may_be_seen_by(user):
        raise Http404
    return found


def _own(user: User, name: str) -> Booking:
    rows = Booking.objects.select_related("owner", "offered_to", "project")
    return get_object_or_404(rows, name=name, owner=user)


def _image_titles() -> dict[str, str]:
    """The images that can be started, by name."""
    catalogue, titles = images(), {}
    for name in catalogue.names():
        with suppress(CarmeError):  # one that cannot be read is not offered
            titles[name] = catalogue.get(name).title
    return titles


def _form_page(
    request: HttpRequest,
    form: BookingForm,
    banner: str,
    found: Booking | None = None,
    proposed: BookingRequest | None = None,
) -> HttpResponse:
    slots: list[tuple[str, str]] = []
    if proposed is not None and "time" in form.errors:
        length = proposed.end - proposed.start
        with suppress(CarmeError):  # the form itself says what is wrong
            slots = [
                (start.isoformat(), span_words(start, start + length, reader_zone()))
                for start in services.free_starts(proposed, settings.SITE, broker(), found)
            ]
    context = {"form": form, "booking": found, "slots": slots, "banner": banner}
    return render(request, "bookings/form.html", context, status=422 if form.is_bound else 200)


def _with_slot(request: HttpRequest) -> Any:
    """What was sent; one of the free times that were offered replaces day and time."""
    data = request.POST.copy()
    if slot := moment_of(data.get("slot", "")):
        local = slot.astimezone(reader_zone())
        data["date"], data["time"] = local.strftime("%Y-%m-%d"), local.strftime("%H:%M")
        data["zone"] = reader_zone().key
    return data


def _initial_values(request: HttpRequest, offered: list[Kind]) -> dict[str, Any]:
    """What a link into the form fills in."""
    kind = _chosen(offered, request.GET.get("kind", ""))
    requested = {"kind": kind.key} if kind else {}
    if node := request.GET.get("node", ""):
        requested["node_names"] = node[:256]
    minutes = request.GET.get("minutes", "")
    if minutes.isdecimal() and len(minutes) < 7 and int(minutes):
        requested["length"] = f"{int(minutes)}m" if int(minutes) % 60 else f"{int(minutes) // 60}h"
    return requested


def _initial_start(request: HttpRequest) -> datetime:
    now = timezone.now()
    requested = moment_of(request.GET.get("start", ""))
    return max(requested, now) if requested else next_start(now)


def _chosen(offered: list[Kind], key: str) -> Kind | None:
    return next((kind for kind in offered if kind.key == key), offered[0] if offered else None)


def _day(text: str) -> date | None:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return None
    return day if day.year in YEARS else None


#: While the broker is away: the same ones for all pages, which share what is made of them.
_NO_JOBS, _NO_RESERVATIONS = RunningJobs(), Reservations()


def _cluster_state() -> tuple[Cluster | None, RunningJobs, Reservations, str]:
    """The cluster and who uses it, or why it cannot be seen."""
    try:
        return cluster_cache.cluster(), cluster_cache.running(), cluster_cache.reservations(), ""
    except CarmeError as error:
        return None, _NO_JOBS, _NO_RESERVATIONS, explained(error)


def _nodes(cluster: Cluster | None, kind: Kind | None) -> list[tuple[str, bool]]:
    if cluster is None or kind is None:
        return []
    key = "nodes", kind.partition, kind.gpu_type, kind.gpus
    return derived.get(cluster, key, lambda known: _nodes_of(known, kind))


def _nodes_of(cluster: Cluster, kind: Kind) -> list[tuple[str, bool]]:
    members = {
        name
        for partition in cluster.partitions
        if partition.name == kind.partition
        for name in partition.node_names
    }
    return [
        (node.name, node.available)
        for node in cluster.nodes
        if node.name in members and node.gpus.get(kind.gpu_type) == kind.gpus
    ]


def _feed_address(user: User) -> str:
    path = reverse("booking-feed", args=[user.username, secret_of(user)])
    return f"{settings.SITE.site.url}{path}"


def _notify_people(found: Booking) -> None:
    notifier.notify(person.username for person in found.people())
