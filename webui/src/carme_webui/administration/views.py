"""The pages of administrators. Nobody else is told that there are any."""

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from auditlog.models import LogEntry
from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.dateparse import parse_date
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.bookings import BookingState
from carme.errors import CarmeError, InvalidRequest
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.accounts.second_factor import remove_second_factor
from carme_webui.administration import look
from carme_webui.administration.forms import NewUserForm
from carme_webui.administration.models import Deed
from carme_webui.administration.people import take_in
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker
from carme_webui.pages import wanted_words
from carme_webui.profile.notices import tell
from carme_webui.projects.models import Project

__all__ = [
    "approvals",
    "end_look",
    "for_admins",
    "home",
    "jobs",
    "new_user",
    "node",
    "nodes",
    "record",
    "stop",
    "user",
    "users",
]

PER_PAGE = 50
View = Callable[..., HttpResponse]


def for_admins(view: View) -> View:
    """Only administrators get this page."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not signed_in(request).is_staff:
            raise Http404
        return view(request, *args, **kwargs)

    return guarded


@require_safe
@for_admins
def home(request: HttpRequest) -> HttpResponse:
    """What there is, and the site's limits and policies as they hold."""
    site = settings.SITE
    parts = [
        (_("Sessions"), site.sessions),
        (_("Bookings"), site.bookings),
        *((_("Partition %s") % name, part) for name, part in sorted(site.partitions.items())),
        *((_("Project %s") % name, part) for name, part in sorted(site.projects.items())),
    ]
    policies = [(title, _flat(part.model_dump(mode="json", exclude_none=True))) for title, part in parts]
    return render(request, "administration/home.html", {"policies": policies})


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Keys as carme.toml has them."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += (
            _flat(value, f"{before}{key}.")
            if isinstance(value, dict)
            else [(before + key, value if isinstance(value, str) else json.dumps(value))]
        )
    return found


@require_safe
@for_admins
def record(request: HttpRequest) -> HttpResponse:
    """Every change: who, when, what, before and after; to be searched."""
    rows = LogEntry.objects.select_related("actor", "content_type").order_by("-timestamp", "-id")
    asked = {key: wanted_words(request, key, 100) for key in ("q", "who", "since", "until")}
    if asked["q"]:
        rows = rows.filter(Q(object_repr__icontains=asked["q"]) | Q(changes__icontains=asked["q"]))
    if asked["who"]:
        rows = rows.filter(Q(actor__username=asked["who"]) | Q(actor_email=asked["who"]))
    for key, lookup in (("since", "timestamp__date__gte"), ("until", "timestamp__date__lte")):
        if day := _date(asked[key]):
            rows = rows.filter(**{lookup: day})
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "administration/record.html", {"page": page, "asked": asked})


def _date(text: str) -> Any:
    try:
        return parse_date(text)
    except ValueError:
        return None


@require_safe
@for_admins
def nodes(request: HttpRequest) -> HttpResponse:
    """All nodes with their states and reasons."""
    try:
        found, failure = broker().cluster().nodes, ""
    except CarmeError as error:
        found, failure = [], str(error)
    return render(request, "administration/nodes.html", {"nodes": found, "banner": failure})


@require_POST
@for_admins
def node(request: HttpRequest, name: str) -> HttpResponse:
    """Drain a node, or resume it."""
    by, drain = signed_in(request), request.POST.get("do") == "drain"
    reason = request.POST.get("reason", "").strip()
    try:
        broker().node(name, drain, user=by.username, reason=f"{reason} ({by.username})" if reason else "")
    except CarmeError as error:
        messages.error(request, str(error))
    else:
        words = f"drained the node {name}: {reason}" if drain else f"resumed the node {name}"
        Deed.objects.create(by=by, text=words[:400])
        messages.success(request, _("Slurm is told; the list follows in a moment."))
    return redirect("admin-nodes")


@require_safe
@for_admins
def approvals(request: HttpRequest) -> HttpResponse:
    """Bookings that wait for an answer, the one that begins first first."""
    rows = Booking.open().filter(state=BookingState.REQUESTED)
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "administration/approvals.html", {"page": page})


@require_safe
@for_admins
def jobs(request: HttpRequest) -> HttpResponse:
    """All jobs and sessions that wait or run."""
    try:
        found, failure = broker().jobs(), ""
    except CarmeError as error:
        found, failure = [], str(error)
    wanted = wanted_words(request, "q", 80)
    if wanted:
        found = [job for job in found if wanted in (job.user, job.account, str(job.id)) or wanted in job.name]
    page = Paginator(sorted(found, key=lambda job: -job.id), PER_PAGE).get_page(request.GET.get("page"))
    known = User.objects.filter(username__in={job.user for job in page}).values_list("username", flat=True)
    context = {"page": page, "wanted": wanted, "banner": failure, "known": set(known)}
    return render(request, "administration/jobs.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def stop(request: HttpRequest, number: int) -> HttpResponse:
    """End somebody's job, and say why."""
    by = signed_in(request)
    try:
        job = broker().job(number)
    except CarmeError as error:
        messages.error(request, str(error))
        return redirect("admin-jobs")
    if request.method != "POST":
        return render(request, "administration/stop.html", {"job": job})
    message = " ".join(request.POST.get("message", "").split())[:300]
    try:
        broker().cancel(number)  # for nobody: not as its owner
    except CarmeError as error:
        messages.error(request, str(error))
        return redirect("admin-jobs")
    Deed.objects.create(by=by, text=f"ended job {number} ({job.name}) of {job.user}: {message}"[:400])
    if owner := User.objects.filter(username=job.user).first():

        def text() -> str:
            said = _("An administrator ended your job %(number)s (%(name)s).")
            return f"{said % {'number': number, 'name': job.name}} {message}".strip()

        tell(owner, text, link=reverse("job", args=[number]))
    messages.success(request, _("Job %s is ended; its owner is told.") % number)
    return redirect("admin-jobs")


@require_safe
@for_admins
def users(request: HttpRequest) -> HttpResponse:
    """All users."""
    rows = User.objects.order_by("username")
    if wanted := wanted_words(request, "q", 80):
        rows = rows.filter(Q(username__icontains=wanted) | Q(email__icontains=wanted))
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "administration/users.html", {"page": page, "wanted": wanted})


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def new_user(request: HttpRequest) -> HttpResponse:
    """Take in a user: account, association in Slurm, home, project."""
    form = NewUserForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        by = signed_in(request).username
        try:
            made, password, done = take_in(by, values["name"], values["email"], values["project"], broker())
        except CarmeError as error:
            field = error.field if isinstance(error, InvalidRequest) else None
            form.add_error(field if field in form.fields else None, str(error))
        else:
            context = {"made": made, "password": password, "done": done}
            return render(request, "administration/taken_in.html", context)
    return render(request, "administration/new_user.html", {"form": form}, status=422 if form.errors else 200)


@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def user(request: HttpRequest, name: str) -> HttpResponse:
    """One user, and what an admin may do about the account."""
    by, found = signed_in(request), get_object_or_404(User, username=name)
    if request.method == "POST":
        return _act(request, by, found)
    projects = Project.objects.filter(memberships__user=found)
    return render(request, "administration/user.html", {"found": found, "projects": projects})


def _act(request: HttpRequest, by: User, found: User) -> HttpResponse:
    match request.POST.get("do"):
        case "look" if not found.is_staff and found.is_active:
            look.begin(request, found)
            return redirect("dashboard")
        case "close" if found != by:
            found.is_active = False
            found.save()
            messages.success(request, _("%s cannot sign in any more.") % found.username)
        case "open":
            found.is_active = True
            found.save()
            messages.success(request, _("%s can sign in again.") % found.username)
        case "second-factor":
            remove_second_factor(found)
            tell(found, lambda: _("An administrator took the second factor off your account."))
            messages.success(request, _("%s has no second factor now.") % found.username)
        case "message" if words := " ".join(request.POST.get("message", "").split())[:400]:
            tell(found, lambda: _("A message of an administrator: %s") % words)
            Deed.objects.create(by=by, text=f"told {found.username}: {words}"[:400])
            messages.success(request, _("%s is told.") % found.username)
        case _:
            messages.error(request, _("This cannot be done with this account."))
    return redirect("admin-user", found.username)


@require_POST
def end_look(request: HttpRequest) -> HttpResponse:
    """Be oneself again."""
    look.end(request)
    return redirect("admin-users")
