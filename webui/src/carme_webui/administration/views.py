"""The pages of administrators. Nobody else sees that there are any."""

import csv
import json
from collections.abc import Callable, Iterable
from datetime import date
from functools import wraps
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from auditlog.models import LogEntry
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.dateparse import parse_date
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.bookings import YEARS, BookingState
from carme.errors import CarmeError, InvalidRequest
from carme.jobs import Job as SlurmJob
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.administration import impersonation, services
from carme_webui.administration.forms import NewUserForm
from carme_webui.administration.node_rows import NodeRow, jobs_by_node
from carme_webui.administration.overview import measure_titles, overview
from carme_webui.administration.people import onboard
from carme_webui.bookings.models import Booking
from carme_webui.clocks import reader_zone
from carme_webui.cluster import broker
from carme_webui.help_links import explained
from carme_webui.jobs.models import Job
from carme_webui.pages import keep_refused, refused_reason, wanted_words
from carme_webui.projects.models import Project
from carme_webui.sessions.models import Session

__all__ = [
    "approvals",
    "end_impersonation",
    "export_record",
    "for_admins",
    "home",
    "job",
    "jobs",
    "new_user",
    "node",
    "nodes",
    "policies",
    "record",
    "stop",
    "user",
    "users",
]

PER_PAGE = 50
View = Callable[..., HttpResponseBase]


def for_admins(view: View) -> View:
    """Only administrators get this page."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not signed_in(request).is_staff:
            raise Http404
        return view(request, *args, **kwargs)

    return guarded


@require_safe
@for_admins
def home(request: HttpRequest) -> HttpResponse:
    """The cluster at a glance."""
    context = {"overview": overview(request.GET.get("by", "")), "measures": measure_titles()}
    return render(request, "administration/overview.html", context)


@require_safe
@for_admins
def policies(request: HttpRequest) -> HttpResponse:
    """The site's limits and policies as they hold."""
    parts = [(title, [(key, _written(value)) for key, value in part]) for title, part in services.policies()]
    return render(request, "administration/policies.html", {"policies": parts})


def _written(value: Any) -> str:
    """A value as carme.toml has it."""
    return value if isinstance(value, str) else json.dumps(value)


@require_safe
@for_admins
def record(request: HttpRequest) -> HttpResponse:
    """Every change: who, when, what, before and after; to be searched."""
    requested, rows = _searched(request)
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    kinds = services.changed_kinds()
    context = {
        "page": page,
        "lines": [
            (
                row,
                services.action_name(row),
                kinds.get(row.content_type.model, services.kind_name(row)),
                services.changed_values(row),
            )
            for row in page
        ],
        "requested": requested,
        "kinds": kinds,
        "filtered": any(requested.values()),
        "query": urlencode(requested),
    }
    return render(request, "administration/record.html", context)


@require_safe
@for_admins
def export_record(request: HttpRequest) -> StreamingHttpResponse:
    """The same search as a table for other programs."""
    _requested, rows = _searched(request)
    lines = csv.writer(Line())
    head = ["time", "user", "action", "kind", "object", "changes", "address"]
    parts = (lines.writerow(line) for line in chain([head], map(_exported, rows.iterator(chunk_size=1000))))
    answer = StreamingHttpResponse(parts, content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = 'attachment; filename="carme-audit-log.csv"'
    return answer


class Line:
    """A file that gives back what is written to it."""

    def write(self, text: str) -> str:
        """The text itself."""
        return text


def _exported(entry: LogEntry) -> list[str]:
    values = [
        entry.timestamp.isoformat(),
        entry.actor.username if entry.actor else "",
        entry.get_action_display(),  # type: ignore[attr-defined]
        services.kind_name(entry),
        entry.object_repr,
        services.changed_values(entry),
        entry.remote_addr or "",
    ]
    # Spreadsheets take what begins like this for a formula.
    return [f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value for value in values]


def _searched(request: HttpRequest) -> tuple[dict[str, str], "QuerySet[LogEntry]"]:
    """What is looked for in the audit log, and what is found; days are those of the reader's clocks."""
    sent = {key: wanted_words(request, key, 100) for key in ("q", "who", "kind", "since", "until")}
    if sent["kind"] not in services.changed_kinds():
        sent["kind"] = ""
    since, until = _date(sent["since"]), _date(sent["until"])
    rows = services.changes(sent["q"], sent["who"], since, until, kind=sent["kind"], zone=reader_zone())
    return sent, rows


def _date(text: str) -> date | None:
    """A day of a form; None for what is not a day, or for a day before any record."""
    try:
        day = parse_date(text)
    except ValueError:
        return None
    return day if day and day.year in YEARS else None


@require_safe
@for_admins
def nodes(request: HttpRequest) -> HttpResponse:
    """All nodes with their states and reasons; after a change the page follows until Slurm has made it."""
    jobs: list[SlurmJob] = []
    try:
        found, failure = broker().cluster().nodes, ""
        jobs = broker().jobs()
    except CarmeError as error:
        found, failure = [], explained(error)
    sent, do = request.GET.get("sent", ""), request.GET.get("do", "")
    drained = do == "drain"
    waits = any(each.name == sent and each.available is drained for each in found)
    running = jobs_by_node(jobs)
    rows = [NodeRow.of(each, running.get(each.name, []), waits and each.name == sent) for each in found]
    follow = urlencode({"sent": sent, "do": do}) if waits else ""
    context = {"rows": rows, "banner": failure, "follow": follow}
    if "live" in request.GET:
        return render(request, "administration/nodes_live.html", context)
    context["refused"] = refused_reason(request, "admin-nodes")
    return render(request, "administration/nodes.html", context)


@require_POST
@for_admins
def node(request: HttpRequest, name: str) -> HttpResponse:
    """Drain a node, or resume it."""
    do, reason = request.POST.get("do", ""), request.POST.get("reason", "")
    try:
        services.set_node(signed_in(request), name, do == "drain", reason, broker())
    except CarmeError as error:
        messages.error(request, explained(error))
    else:
        messages.success(request, _("Sent to Slurm. The list refreshes shortly."))
        return redirect(f"{reverse('admin-nodes')}?{urlencode({'sent': name, 'do': do})}")
    keep_refused(request, "admin-nodes", name, reason)
    return redirect("admin-nodes")


@require_safe
@for_admins
def approvals(request: HttpRequest) -> HttpResponse:
    """Bookings that wait for an answer, the one that begins first first."""
    rows = Booking.open().filter(state=BookingState.REQUESTED)
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    context = {"page": page, "refused": refused_reason(request, "admin-approvals")}
    return render(request, "administration/approvals.html", context)


@require_safe
@for_admins
def jobs(request: HttpRequest) -> HttpResponse:
    """All jobs and sessions that wait or run."""
    wanted = wanted_words(request, "q", 80)
    try:
        found, failure = services.find_jobs(wanted, broker()), ""
    except CarmeError as error:
        found, failure = [], explained(error)
    page = Paginator(found, PER_PAGE).get_page(request.GET.get("page"))
    known = User.objects.filter(username__in={job.user for job in page}).values_list("username", flat=True)
    titles = _titles(page)
    rows = [(Job.of(each), titles.get(each.id, "")) for each in page]
    context = {"page": page, "rows": rows, "wanted": wanted, "banner": failure, "known": set(known)}
    return render(request, "administration/jobs.html", context)


def _titles(jobs: Iterable[Any]) -> dict[int, str]:
    """What the sessions are called that run in these jobs."""
    rows = Session.objects.filter(job_id__in=[job.id for job in jobs])
    return {row.job_id: row.title for row in rows if row.job_id is not None}


@require_safe
@for_admins
def job(request: HttpRequest, number: int) -> HttpResponse:
    """One job of anybody's."""
    try:
        reported = broker().job(number)
    except CarmeError as error:
        messages.error(request, explained(error))
        return redirect("admin-jobs")
    found = Job.of(reported)
    known = User.objects.filter(username=found.user).exists()
    context = {"job": found, "title": _titles([found]).get(number, ""), "known": known}
    if reported.prediction:
        context |= {"prediction": reported.prediction, "percent": round(100 * reported.prediction.efficiency)}
    return render(request, "administration/job.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def stop(request: HttpRequest, number: int) -> HttpResponse:
    """End somebody's job, and say why."""
    words = request.POST.get("message", "")
    try:
        if request.method != "POST":
            return render(request, "administration/stop.html", {"job": broker().job(number)})
        services.stop_job(signed_in(request), number, words, broker())
    except CarmeError as error:
        messages.error(request, explained(error))
        # What was written is not lost, even while the broker is away.
        known = Job.objects.filter(id=min(number, 2**63 - 1)).first() if words else None
        if known is None:
            return redirect("admin-jobs")
        return render(request, "administration/stop.html", {"job": known, "words": words}, status=422)
    messages.success(request, _("Job %s is stopped. Its owner gets a message.") % number)
    return redirect("admin-jobs")


@require_safe
@for_admins
def users(request: HttpRequest) -> HttpResponse:
    """All users."""
    wanted = wanted_words(request, "q", 80)
    rows = services.find_users(wanted)
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "administration/users.html", {"page": page, "wanted": wanted})


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def new_user(request: HttpRequest) -> HttpResponse:
    """Onboard a user: account, association in Slurm, home, project."""
    form = NewUserForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        by = signed_in(request).username
        try:
            user, password, done = onboard(by, values["name"], values["email"], values["project"], broker())
        except CarmeError as error:
            field = error.field if isinstance(error, InvalidRequest) else None
            form.add_error(field if field in form.fields else None, explained(error))
        else:
            context = {"onboarded": user, "password": password, "done": done}
            return render(request, "administration/onboarded.html", context)
    return render(request, "administration/new_user.html", {"form": form}, status=422 if form.errors else 200)


@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def user(request: HttpRequest, name: str) -> HttpResponse:
    """One user, and what an admin may do about the account."""
    by, found = signed_in(request), get_object_or_404(User, username=name)
    if request.method == "POST":
        return _act(request, by, found)
    projects = Project.objects.filter(memberships__user=found)
    number = request.GET.get("job", "")
    about = _("Your job %s:") % number + " " if number.isascii() and number.isdigit() else ""
    context = {"found": found, "projects": projects, "about": about[:60]}
    return render(request, "administration/user.html", context)


def _act(request: HttpRequest, by: User, found: User) -> HttpResponse:
    match request.POST.get("do"):
        case "impersonate" if not found.is_staff and found.is_active:
            impersonation.begin(request, found)
            return redirect("dashboard")
        case "close" if found != by:
            services.set_active(by, found, False)
            messages.success(request, _("%s cannot sign in any more.") % found.username)
        case "open":
            services.set_active(by, found, True)
            messages.success(request, _("%s can sign in again.") % found.username)
        case "second-factor":
            services.remove_second_factor(found)
            messages.success(request, _("The second factor of %s is reset.") % found.username)
        case "message" if words := request.POST.get("message", "").strip():
            services.send_message(by, found, words)
            messages.success(request, _("Message sent to %s.") % found.username)
        case _:
            messages.error(request, _("This cannot be done with this account."))
    return redirect("admin-user", found.username)


@require_POST
def end_impersonation(request: HttpRequest) -> HttpResponse:
    """End the read-only view of a user's pages."""
    impersonation.end(request)
    return redirect("admin-users")
