"""The pages of my jobs."""

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from carme.errors import CarmeError
from carme.jobs import JobState, Phase
from carme.reports.text import as_fragment
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.cluster import broker
from carme_webui.jobs.log import tail
from carme_webui.jobs.models import Job, Mirror
from carme_webui.news import news

__all__ = ["job", "job_list", "job_live", "job_use"]

PER_PAGE = 25

RUNNING = [
    state
    for state in JobState
    if state.phase in (Phase.RUNNING, Phase.ENDING) and state is not JobState.UNKNOWN
]
FILTERS = {
    "": (_("All"), list(JobState)),
    "pending": (_("Waiting"), [state for state in JobState if state.phase is Phase.PENDING]),
    "running": (_("Running"), RUNNING),
    "completed": (_("Completed"), [JobState.COMPLETED]),
    "cancelled": (_("Cancelled"), [JobState.CANCELLED]),
    "failed": (
        _("Failed"),
        [
            state
            for state in JobState
            if state is JobState.UNKNOWN
            or (state.phase is Phase.OVER and state not in (JobState.COMPLETED, JobState.CANCELLED))
        ],
    ),
}


def own_jobs(user: User):
    """The jobs that this user may see."""
    return Job.objects.filter(user=user.username)


@require_safe
def job_list(request: HttpRequest) -> HttpResponse:
    """My jobs, newest first."""
    chosen = request.GET.get("state", "")
    if chosen not in FILTERS:
        chosen = ""
    jobs = own_jobs(signed_in(request))
    if chosen:
        jobs = jobs.filter(state__in=FILTERS[chosen][1])
    page = Paginator(jobs, PER_PAGE).get_page(request.GET.get("page"))
    return render(
        request,
        "jobs/list.html",
        {
            "page": page,
            "chosen": chosen,
            "filters": [(key, label) for key, (label, _states) in FILTERS.items()],
            "banner": Mirror.load().failure,
        },
    )


@require_safe
def job(request: HttpRequest, job_id: int) -> HttpResponse:
    """One of my jobs with the end of its log."""
    return render(request, "jobs/job.html", _job_context(request, job_id))


@require_safe
def job_live(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that changes."""
    return render(request, "jobs/job_live.html", _job_context(request, job_id))


@require_safe
def job_use(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that says what it uses of what it asked for, and what to change."""
    found = get_object_or_404(own_jobs(signed_in(request)), id=job_id)
    context: dict[str, object] = {"job": found}
    try:
        # All that comes from elsewhere is escaped there.
        context["report"] = mark_safe(as_fragment(broker().report(found.id, user=found.user)))
    except CarmeError as error:
        context["failure"] = str(error)
    return render(request, "jobs/job_use.html", context)


def _job_context(request: HttpRequest, job_id: int) -> dict[str, object]:
    user = signed_in(request)
    version = news.version(user.username)  # first: what comes meanwhile is news
    found = get_object_or_404(own_jobs(user), id=job_id)
    log = tail(found, broker())
    return {"job": found, "log": log, "banner": Mirror.load().failure, "version": version}
