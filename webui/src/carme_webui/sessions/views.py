"""The dashboard and the pages of my sessions."""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from kombu.exceptions import OperationalError

from carme.errors import BrokerUnavailable, CarmeError
from carme.jobs import Cluster, SessionOptions
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.cluster import broker, images, supplies
from carme_webui.jobs.log import Tail, tail
from carme_webui.sessions import tasks
from carme_webui.sessions.forms import StartForm
from carme_webui.sessions.models import OVER, Event, Session, State

__all__ = ["dashboard", "dashboard_live", "session", "session_live", "start", "stop"]

logger = logging.getLogger(__name__)

RECENT = timedelta(days=2)
RECENT_COUNT = 5

# The steps of a session in the order in which they happen.
ORDER = [
    State.REQUESTED,
    State.STARTING,
    "submitted",
    "job-started",
    State.RUNNING,
    State.STOPPING,
    "job-ended",
    State.ENDED,
    State.FAILED,
]


@dataclass(frozen=True)
class Step:
    """One line of a session's timeline."""

    at: datetime
    label: str
    sentence: str = ""


def own_sessions(user: User):
    """The sessions that this user may see."""
    return Session.objects.filter(owner=user).select_related("owner")


@require_safe
def dashboard(request: HttpRequest) -> HttpResponse:
    """My sessions, the start form, and what is free."""
    cluster, banner = _look()
    again = own_sessions(signed_in(request)).filter(name=request.GET.get("again", "")).first()
    form = _form(cluster, options=again.asked_for if again else None)
    return render(request, "sessions/dashboard.html", {"form": form, **_live(request, cluster, banner)})


@require_safe
def dashboard_live(request: HttpRequest) -> HttpResponse:
    """The part of the dashboard that changes."""
    return render(request, "sessions/dashboard_live.html", _live(request, *_look()))


@require_POST
def start(request: HttpRequest) -> HttpResponse:
    """Check the form and start a session."""
    cluster, banner = _look()
    form = _form(cluster, data=request.POST)
    if not form.is_valid() or form.options is None:
        context = {"form": form, **_live(request, cluster, banner)}
        return render(request, "sessions/dashboard.html", context, status=422)
    found, created = Session.request(signed_in(request), form.options, form.cleaned_data["name"])
    if created:
        try:
            tasks.start_session.delay(found.name)  # pyright: ignore[reportFunctionMemberAccess]
        except OperationalError as error:
            logger.error("The task queue cannot be reached: %s", error)
            found.move(
                State.FAILED,
                _("The portal's task queue does not answer. Try again soon, or tell an administrator."),
            )
    return redirect(found)


@require_safe
def session(request: HttpRequest, name: str) -> HttpResponse:
    """One of my sessions."""
    return render(request, "sessions/session.html", _session_context(request, name))


@require_safe
def session_live(request: HttpRequest, name: str) -> HttpResponse:
    """The part of a session's page that changes."""
    return render(request, "sessions/session_live.html", _session_context(request, name))


@require_http_methods(["GET", "HEAD", "POST"])
def stop(request: HttpRequest, name: str) -> HttpResponse:
    """Ask whether to stop a session, and stop it."""
    found = get_object_or_404(own_sessions(signed_in(request)), name=name)
    if request.method != "POST":
        if found.is_over or found.state == State.STOPPING:
            return redirect(found)
        return render(request, "sessions/stop.html", {"session": found})
    if found.move(State.STOPPING):
        try:
            tasks.stop_session.delay(found.name)  # pyright: ignore[reportFunctionMemberAccess]
        except OperationalError as error:
            # The session is marked: it is stopped as soon as the queue is back.
            logger.error("The task queue cannot be reached: %s", error)
    return HttpResponseRedirect(found.get_absolute_url())


def _look() -> tuple[Cluster | None, str]:
    """The cluster, or why it cannot be seen."""
    try:
        return broker().cluster(), ""
    except CarmeError as error:
        if not isinstance(error, BrokerUnavailable):
            logger.warning("The cluster cannot be seen: %s", error)
        return None, str(error)


def _form(cluster: Cluster | None, data: Any = None, options: SessionOptions | None = None) -> StartForm:
    return StartForm(data, cluster=cluster, catalogue=images(), site=settings.SITE, options=options)


def _live(request: HttpRequest, cluster: Cluster | None, banner: str) -> dict[str, Any]:
    mine = own_sessions(signed_in(request))
    return {
        "active": mine.exclude(state__in=OVER),
        "recent": mine.filter(state__in=OVER, changed__gt=timezone.now() - RECENT)[:RECENT_COUNT],
        "cluster": cluster,
        "supplies": supplies(cluster) if cluster else [],
        "banner": banner,
    }


def _session_context(request: HttpRequest, name: str) -> dict[str, Any]:
    found = get_object_or_404(own_sessions(signed_in(request)), name=name)
    job = found.job
    log = Tail()
    if found.wants_log and job is not None:
        log = tail(job, broker())
    return {"session": found, "options": found.asked_for, "job": job, "steps": _steps(found), "log": log}


def _steps(found: Session) -> list[Step]:
    """What happened so far, as the portal and Slurm saw it."""
    steps = {
        event.state: Step(event.at, str(State(event.state).label), event.sentence)
        for event in Event.objects.filter(session=found)
    }
    job = found.job
    if job is not None:
        times = {
            "submitted": (job.submitted, _("Job submitted"), _("Slurm job %s") % job.id),
            "job-started": (job.started, _("Job started"), job.node_list),
            "job-ended": (job.ended, _("Job ended"), job.explanation),
        }
        steps |= {key: Step(at, *words) for key, (at, *words) in times.items() if at is not None}
    # Slurm's times are whole seconds: within one the order is the one in which things happen.
    return [
        steps[key]
        for key in sorted(steps, key=lambda key: (steps[key].at.replace(microsecond=0), ORDER.index(key)))
    ]
