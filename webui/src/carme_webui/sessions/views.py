"""The dashboard and the pages of my sessions."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.errors import BrokerUnavailable, CarmeError
from carme.jobs import Cluster, Forecast, SessionOptions, partition_of
from carme.sessions import SessionState
from carme.translation import translated
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.announcements.models import latest_news
from carme_webui.bookings.models import Booking
from carme_webui.clocks import minutes_words
from carme_webui.cluster import broker, cluster_cache, supplies
from carme_webui.datasets import datasets_of
from carme_webui.files.quota import refusal
from carme_webui.help_links import explained
from carme_webui.images.catalogue import images_of, resolved
from carme_webui.jobs.arrays import add_progress
from carme_webui.jobs.log import Tail, tail
from carme_webui.jobs.models import Mirror, silence
from carme_webui.jobs.search import MOST_ACTIVE, active_jobs
from carme_webui.jobs.templatetags.times import moment
from carme_webui.jobs.waiting import Waiting, waiting
from carme_webui.metrics.sparks import has_metrics
from carme_webui.notifier import notifier
from carme_webui.projects.models import access_for, own_projects, payers, usable_by
from carme_webui.scaling import SCALING, Advice, advice, curve_of, probe_files, starts
from carme_webui.sessions import actions
from carme_webui.sessions.choices import OF_PRESET
from carme_webui.sessions.clock import Remaining, extensions, minutes_of_form, remaining
from carme_webui.sessions.forms import EXPERT, StartForm
from carme_webui.sessions.models import Preset, Session, new_name, values_of
from carme_webui.sessions.opened import App, apps_of, own_sessions
from carme_webui.sessions.start_estimates import gpu_hours, start_estimates
from carme_webui.sessions.supply_plan import shown
from carme_webui.sessions.timeline import Line, timeline

__all__ = [
    "dashboard",
    "dashboard_live",
    "delete_preset",
    "estimate",
    "extend",
    "probes",
    "save_preset",
    "session",
    "session_live",
    "session_state",
    "start",
    "start_again",
    "stop",
    "stream",
]

logger = logging.getLogger(__name__)

RECENT = timedelta(days=2)
# An answer about the cluster that is older than so many seconds and looks at the queue says that Slurm does
# not answer: the broker looks at the nodes at the first poll after half a minute, and if calm makes every
# fourth.
FRESH_SECONDS, FRESH_POLLS = 40.0, 6
# Seconds between two signs of life on a stream of updates, and after which the browser opens a new one: then
# its login is checked again.
HEARTBEAT = 15.0
STREAM_ENDS_AFTER = 600.0


@dataclass(frozen=True)
class Shown:
    """A session as its owner sees it now.

    Attributes:
        row: The session.
        certain: The broker answers, so that what is shown is what is.
        ends: What will end it, the nearest first.
        apps: What can be opened, the one that was requested first; empty unless it is ready.
    """

    row: Session
    certain: bool
    ends: list[Remaining]
    apps: list[App]

    @property
    def warning(self) -> Remaining | None:
        """The nearest end, when it is near enough for a warning."""
        return next((end for end in self.ends if end.level), None)

    @property
    def waiting(self) -> Waiting | None:
        """What holds it up and when it may start, while it waits."""
        reported = self.row.last_reported
        if self.row.state != SessionState.QUEUED or reported is None:
            return None
        plan = reported.estimate
        earliest, latest = (plan.earliest, plan.latest) if plan else (None, None)
        return waiting(self.row.explanation, earliest, latest)

    @property
    def heading(self) -> str:
        """The beginning of the page's title: what one wants to see of a page in the background."""
        if self.warning is not None:
            return _("%(time)s left") % {"time": self.warning.words}
        return self.row.label

    @property
    def extensible(self) -> bool:
        """Whether its owner may ask for more time."""
        reported = self.row.last_reported
        return (
            reported is not None
            and reported.ends is not None
            and self.row.state in (SessionState.READY, SessionState.STARTING)
            and settings.SITE.session_policy(reported.partition).extend
        )


@require_safe
def dashboard(request: HttpRequest) -> HttpResponse:
    """My sessions, the start form, and what is free."""
    cluster, banner = _cluster_state()
    name = request.GET.get("again")
    earlier = own_sessions(signed_in(request)).filter(name=name).first() if name else None
    form = _form(request, cluster, options=earlier.requested_options if earlier else None)
    context = {"form": form, **_live(request, cluster, banner)}
    return render(request, "sessions/dashboard.html", context | {"announced": latest_news()})


@require_safe
def dashboard_live(request: HttpRequest) -> HttpResponse:
    """The part of the dashboard that changes."""
    return render(request, "sessions/dashboard_live.html", _live(request, *_cluster_state()))


@require_POST
def start(request: HttpRequest) -> HttpResponse:
    """Check the form and start a session."""
    cluster, banner = _cluster_state()
    form = _form(request, cluster, data=request.POST)
    if full := refusal(signed_in(request)):
        form.add_error(None, full)
    if not form.is_valid() or form.options is None:
        context = {"form": form, **_live(request, cluster, banner)}
        return render(request, "sessions/dashboard.html", context, status=422)
    return _start(request, form.options, form.cleaned_data["name"])


@require_POST
def estimate(request: HttpRequest) -> HttpResponse:
    """The part of the form that says when what it asks for would begin."""
    cluster, _banner = _cluster_state()
    named = request.POST.get("hardware", "").startswith(OF_PRESET)
    form = _form(request, cluster, data=request.POST, presets=None if named else [])
    context: dict[str, Any] = {}
    if form.is_valid() and form.options is not None:
        context["chosen"] = form.options
        try:
            requested = resolved(form.options, signed_in(request))
            context["gpu_hours"] = gpu_hours(requested)
            context["start_estimates"] = start_estimates(requested, signed_in(request).username, broker())
        except CarmeError as error:
            context["banner"] = explained(error)
    context["problems"] = [problem for name in SCALING for problem in form.errors.get(name, [])]
    if form.curve is not None and cluster is not None:
        context["advice"] = _advice(form, cluster, signed_in(request))
    return render(request, "sessions/estimated.html", context)


def _advice(form: StartForm, cluster: Cluster, user: User) -> Advice | None:
    """What the probe's result says of choices like the form's; a reason may be missing yet."""
    assert form.curve is not None
    given = form.requested
    names = ("gpu_type", "partition", "account", "qos", "reservation", *EXPERT)
    optional = {key: given.get(key) or None for key in names}
    try:
        options = SessionOptions.read({"image": given["image"], "minutes": given["minutes"], **optional})
        request = resolved(options, user).request(name="estimate", command=["true"], environment={})
        partition = partition_of(options, cluster, settings.SITE).name
        return advice(
            form.curve,
            cluster.members(partition),
            options.gpu_type,
            (given["nodes"], given["gpus_per_node"]),
            given.get("steps"),
            starts(request, user, broker()),
        )
    except CarmeError:
        return None  # the error is shown beside its field


@require_safe
def probes(request: HttpRequest) -> HttpResponse:
    """Results of probes in my home, which the form proposes."""
    try:
        found = [] if hasattr(request, "impersonator") else probe_files(signed_in(request), broker())
    except CarmeError:
        found = []
    return render(request, "scaling/files.html", {"files": found})


@require_POST
def save_preset(request: HttpRequest) -> HttpResponse:
    """Remember what the form asks for, under its title; one of the same name is replaced."""
    user = signed_in(request)
    cluster, banner = _cluster_state()
    form = _form(request, cluster, data=request.POST)
    if form.is_valid() and form.options is not None:
        try:
            preset = actions.save_preset(user, form.options.title or form.options.image, form.options)
        except CarmeError as error:
            form.add_error(None, explained(error))
        else:
            messages.success(request, _("Saved as “%s”.") % preset.name)
            return redirect("dashboard")
    context = {"form": form, **_live(request, cluster, banner)}
    return render(request, "sessions/dashboard.html", context, status=422)


@require_POST
def delete_preset(request: HttpRequest, number: int) -> HttpResponse:
    """Forget one of my presets."""
    Preset.objects.filter(owner=signed_in(request), pk=number).delete()
    return redirect("dashboard")


@require_POST
def start_again(request: HttpRequest, name: str) -> HttpResponse:
    """Start a session with the options of an earlier one; what is not possible now leads to the form."""
    options = _own_session(request, name).requested_options
    fresh = request.POST.get("name", "")
    data = {key: "" if value is None else value for key, value in values_of(options).items()}
    cluster, banner = _cluster_state()
    form = _form(request, cluster, data=data | {"name": fresh})
    if not form.is_valid() or form.options is None:
        context = {"form": form, **_live(request, cluster, banner)}
        return render(request, "sessions/dashboard.html", context, status=422)
    return _start(request, form.options, form.cleaned_data["name"])


@require_safe
def session(request: HttpRequest, name: str) -> HttpResponse:
    """One of my sessions."""
    return render(request, "sessions/session.html", _session_context(request, name))


@require_safe
def session_live(request: HttpRequest, name: str) -> HttpResponse:
    """The part of a session's page that changes."""
    context = {"alone": True, **_session_context(request, name)}
    return render(request, "sessions/session_live.html", context)


@require_safe
def session_state(request: HttpRequest, name: str) -> JsonResponse:
    """Whether one of my sessions is over, and why: JupyterLab asks when it does not answer.

    With `token` its page may send the forms that stop it and start it again, the latter with `fresh` as name.
    """
    found = _own_session(request, name)
    answer = JsonResponse(
        {
            "over": found.is_over,
            "state": found.state,
            "sentence": translated(found.explanation),
            "token": get_token(request),
            "fresh": new_name(),
        }
    )
    answer["Cache-Control"] = "no-store"
    return answer


@require_http_methods(["GET", "HEAD", "POST"])
def stop(request: HttpRequest, name: str) -> HttpResponse:
    """Ask whether to stop a session, and stop it."""
    found = _own_session(request, name)
    if request.method != "POST":
        if found.is_over or found.state == SessionState.STOPPING:
            return redirect(found)
        return render(request, "sessions/stop.html", {"session": found})
    actions.stop(found)
    return redirect(found)


@require_POST
def extend(request: HttpRequest, name: str) -> HttpResponse:
    """Ask for more time; the page then says what came of it."""
    found = _own_session(request, name)
    try:
        given = actions.extend(found, minutes_of_form(request.POST.get("minutes", "")), broker())
    except CarmeError as error:
        messages.error(request, explained(error))
    else:
        messages.success(request, format_html(_("The session now ends at {}."), moment(given.ends)))
    return redirect(found)


@require_safe
def stream(request: HttpRequest) -> StreamingHttpResponse:
    """One server-sent event for each change; it holds the version only, the page then loads its live part.

    See https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    user = signed_in(request).username
    seen = request.headers.get("Last-Event-ID") or request.GET.get("seen", "")
    answer = StreamingHttpResponse(_events(user, seen), content_type="text/event-stream")
    answer["Cache-Control"] = "no-store"
    answer["X-Accel-Buffering"] = "no"  # nginx passes each event on at once
    return answer


async def _events(user: str, seen: str) -> AsyncIterator[str]:
    clock = asyncio.get_running_loop().time
    end = clock() + STREAM_ENDS_AFTER
    yield "retry: 1000\n\n"
    while clock() < end:
        version = await notifier.wait(user, seen, HEARTBEAT)
        yield ": still here\n\n" if version == seen else f"id: {version}\nevent: update\ndata: {version}\n\n"
        seen = version


def _own_session(request: HttpRequest, name: str) -> Session:
    return get_object_or_404(own_sessions(signed_in(request)), name=name)


def _start(request: HttpRequest, options: SessionOptions, name: str) -> HttpResponse:
    """Make the session and ask the hub for it, without waiting for the answer.

    Its page follows; with `then=open` that page gives way to the session itself as soon as it is ready.
    """
    found, _created = actions.start(signed_in(request), options, name)
    opens = "?open=1" if request.POST.get("then") == "open" else ""
    return redirect(f"{found.get_absolute_url()}{opens}")


def _cluster_state() -> tuple[Cluster | None, str]:
    """The cluster, or why it cannot be seen."""
    try:
        cluster = cluster_cache.cluster()
    except CarmeError as error:
        if not isinstance(error, BrokerUnavailable):
            logger.warning("The cluster cannot be seen: %s", error)
        return None, explained(error)
    return cluster, _silence(cluster.taken)


def _silence(taken: datetime) -> str:
    """A sentence when what is known of the cluster is old."""
    age = timezone.now() - taken
    if age.total_seconds() < FRESH_SECONDS + FRESH_POLLS * settings.SITE.slurm.poll_seconds:
        return ""
    return _(
        "Slurm has not answered for %s. This page shows the state of that time. Running sessions continue."
    ) % minutes_words(max(1, int(age.total_seconds() // 60)))


def _form(
    request: HttpRequest,
    cluster: Cluster | None,
    data: Any = None,
    options: SessionOptions | None = None,
    presets: list[Preset] | None = None,
) -> StartForm:
    user = signed_in(request)
    # Impersonation shows pages of the portal, never files of the user's home.
    impersonated = hasattr(request, "impersonator")
    return StartForm(
        data,
        cluster=usable_by(user, cluster),
        catalogue=images_of(user),
        site=settings.SITE,
        options=options,
        projects=own_projects(user),
        accounts=payers(user),
        access=access_for(user),
        bookings=Booking.usable(user, timezone.now()),
        booking=request.GET.get("booking", ""),
        requested=request.GET.dict(),
        datasets=datasets_of(user),
        read=None if impersonated else lambda path: curve_of(path, user, broker()),
        presets=Preset.of(user) if presets is None else presets,
    )


def _show(row: Session, banner: str) -> Shown:
    """The session, and whether that is certain: a banner says why it is not."""
    reported = row.last_reported
    ends = remaining(reported, timezone.now()) if reported is not None and not row.is_over else []
    return Shown(row, certain=not banner, ends=ends, apps=apps_of(row))


def _live(request: HttpRequest, cluster: Cluster | None, banner: str) -> dict[str, Any]:
    user = signed_in(request)
    version = notifier.version(user.username)
    rows = Session.recent_of(user, timezone.now() - RECENT)
    banner = silence() or banner
    running = active_jobs(user)
    add_progress(running[:MOST_ACTIVE])
    return {
        "active": [_show(row, banner) for row in rows if not row.is_over],
        "jobs": running[:MOST_ACTIVE],
        "more_jobs": len(running) > MOST_ACTIVE,
        "recent": [(row, new_name()) for row in rows if row.is_over],
        "cluster": cluster,
        "supplies": shown(supplies(cluster), _plan()) if cluster else [],
        "banner": banner,
        "version": version,
        "measures": has_metrics(),
    }


def _plan() -> Forecast | None:
    try:
        return cluster_cache.forecast()
    except CarmeError:
        return None  # what is free now is still worth showing


def _session_context(request: HttpRequest, name: str) -> dict[str, Any]:
    version = notifier.version(signed_in(request).username)  # first: what comes meanwhile is an update
    found = _own_session(request, name)
    mirror = Mirror.load()
    cluster, silence = _cluster_state()
    banner = mirror.silence or silence
    job = found.job
    log = tail(job, broker()) if found.wants_log and job is not None else Tail()
    lines: list[Line] = timeline(found, job)
    return {
        "session": found,
        "shown": _show(found, banner),
        "reported": found.last_reported,
        "options": found.requested_options,
        "job": job,
        "lines": lines,
        "log": log,
        "banner": banner,
        "known_at": mirror.updated if mirror.silence or cluster is None else cluster.taken,
        "time_limit": minutes_words((job and job.minutes_limit) or found.requested_options.minutes),
        "extensions": extensions(),
        "fresh": new_name(),
        "version": version,
    }
