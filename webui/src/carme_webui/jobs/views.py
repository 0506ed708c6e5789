"""The pages of my jobs."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import F, Q
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import get_language, override
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.broker import AsyncBrokerClient
from carme.errors import BrokerUnavailable, CarmeError, InvalidRequest, NotFound
from carme.jobs import Cluster, JobRequest, contents, partition_of, stage_text
from carme.jobs.scripts import MAXIMUM_BYTES, sent_script
from carme.jobs.templates import TEMPLATES
from carme.reports.record import MOST_RANKS
from carme.reports.text import facts as facts_of
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.bookings.models import Booking
from carme_webui.cluster import BROKER_TIMEOUT, broker, cluster_cache
from carme_webui.files.places import Place, shown
from carme_webui.help_links import explained
from carme_webui.images.catalogue import images_of
from carme_webui.jobs import submissions
from carme_webui.jobs.arrays import add_progress, cells, failed_tasks, resubmit_failed, tasks_of
from carme_webui.jobs.forms import SearchForm, SubmitForm
from carme_webui.jobs.log import tail
from carme_webui.jobs.models import Job, silence
from carme_webui.jobs.month import month_of
from carme_webui.jobs.patterns import PATTERNS
from carme_webui.jobs.search import FILTERS, own_jobs
from carme_webui.jobs.templatetags.times import moment
from carme_webui.jobs.timeline import timeline
from carme_webui.metrics.charts import multiples_of, of_report
from carme_webui.notifier import notifier
from carme_webui.projects.models import access_for, payers, usable_by
from carme_webui.scaling import SCALING, Advice, Probe, advice, curve_of, starts
from carme_webui.sessions.clock import extensions, minutes_of_form
from carme_webui.sessions.models import Session
from carme_webui.sessions.start_estimates import gpu_hours, start_estimates

__all__ = [
    *[
        "cancel",
        "directives",
        "extend",
        "facts",
        "job",
        "job_list",
        "job_live",
        "job_use",
        "log_stream",
        "month",
        "net",
        "predict",
        "recipe",
        "resubmit",
        "submit",
        "wait",
    ],
]

PER_PAGE = 25
#: Failed tasks that an array's page names above the table of all.
MOST_NAMED = 20
TASK_DIGITS = 7
# Seconds between two polls of a log that somebody follows; longer while nothing is written.
POLL, CALM = 1.0, 5.0
# Seconds after which the browser opens a new stream: then its login is checked again.
STREAM_ENDS_AFTER = 600.0


@require_safe
def job_list(request: HttpRequest) -> HttpResponse:
    """My jobs of all years, newest first."""
    form = SearchForm(request.GET)
    search = form.search
    jobs = own_jobs(signed_in(request))
    if not search.states:  # else single tasks are looked for
        jobs = jobs.filter(Q(array_id=None) | Q(array_id=F("id")))
    page = Paginator(search.apply(jobs), PER_PAGE).get_page(request.GET.get("page"))
    if not search.states:
        add_progress(page.object_list)
    chosen = request.GET.get("state", "")
    sent = {name: value for name, value in form.cleaned_data.items() if value}
    return render(
        request,
        "jobs/list.html",
        {
            "page": page,
            "form": form,
            "query": urlencode(sent),
            "searched": bool(sent),
            "chosen": chosen if chosen in FILTERS else "",
            "states": [
                (label, urlencode(sent | {"state": key}), key) for key, (label, _states) in FILTERS.items()
            ],
            "banner": silence(),
        },
    )


@require_safe
def job(request: HttpRequest, job_id: int) -> HttpResponse:
    """One of my jobs with the end of its log."""
    return render(request, "jobs/job.html", _job_context(request, job_id))


@require_safe
def job_live(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that changes."""
    return render(request, "jobs/job_live.html", _job_context(request, job_id, log=False))


@require_safe
def job_use(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that says what it uses of what it requested, and what to change."""
    found = _own_job(request, job_id)
    context: dict[str, object] = {"job": found}
    try:
        report = broker().report(found.id, user=found.user)
    except CarmeError as error:
        context["failure"] = explained(error)
    else:
        charts, advice = of_report(report)
        context |= {
            "report": report,
            "facts": facts_of(report),
            "charts": charts,
            "advice": advice,
        }
        context["multiples"] = multiples_of(report)
        ranks = report.usage.training.ranks if report.usage and report.usage.training else 0
        context["most_ranks"] = MOST_RANKS if ranks > MOST_RANKS else 0
    return render(request, "jobs/job_use.html", context)


@require_safe
def month(request: HttpRequest) -> HttpResponse:
    """The part of the dashboard that says what I used this month of what I may."""
    return render(request, "jobs/month.html", {"month": month_of(signed_in(request))})


@require_safe
def facts(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that says where it began: image, repository."""
    found = _own_job(request, job_id)
    context: dict[str, object] = {"job": found}
    try:
        context["facts"] = broker().facts(found.id, user=found.user)
    except CarmeError as error:
        context["failure"] = explained(error)
    return render(request, "jobs/job_facts.html", context)


@require_safe
def net(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that shows the Petri net that it runs.

    A net is a graph, not a chart: the runtime lays it out and draws it as SVG (`carme_runtime.petri.draw`),
    here as in notebooks.
    """
    found = _own_job(request, job_id)
    try:
        drawn = broker().net(found.id, user=found.user)
    except CarmeError:
        return HttpResponse(status=204)  # what is shown stays, and the page looks again
    # As an image nothing in it can run, whatever the job has written.
    image = base64.b64encode(drawn.svg.encode()).decode()
    context = {"job": found, "net": drawn, "image": image, "at": datetime.fromtimestamp(drawn.at, UTC)}
    return render(request, "jobs/job_net.html", context)


@require_safe
def recipe(request: HttpRequest, job_id: int) -> HttpResponse:
    """The part of a job's page that says what it was submitted with."""
    found = _own_job(request, job_id)
    context: dict[str, object] = {"job": found}
    try:
        known = broker().recipe(found.id, user=found.user)
    except CarmeError as error:
        context["failure"] = explained(error)
    else:
        context["recipe"] = known
        sent = sent_script(known.request.command, known.request.files)
        context["script"] = contents.shown(sent[0]) if sent else ""
        context["words"] = [] if sent else known.request.command
        context["staged"] = stage_text(known.request.stage)
        for name in ("workdir", "results"):
            if path := getattr(known.request, name):
                context[name] = Place(shown(path), path)
    return render(request, "jobs/job_recipe.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
def submit(request: HttpRequest) -> HttpResponse:
    """The form, the check of what it says, and the job that comes of it."""
    user = signed_in(request)
    cluster, banner = _cluster_state()
    if request.method != "POST":
        form = _form(user, cluster, initial=_begin(request))
        return _form_page(request, form, banner)
    form = _form(user, cluster, data=request.POST)
    if form.is_valid() and form.submission is not None:
        site = broker()
        try:
            requested, ignored = submissions.to_request(form.submission, user, site, form.probe)
            if ignored:
                messages.warning(
                    request,
                    _("The script's #SBATCH lines have options that are ignored: %s.") % ", ".join(ignored),
                )
            if "check" in request.POST:
                found = submissions.estimate(requested, user, site)
                return _form_page(request, form, banner, found)
            job_id = submissions.submit(requested, user, site)
        except CarmeError as error:
            form.refuse(error)
        else:
            messages.success(request, _("Job %s is in the queue.") % job_id)
            return redirect("job" if Job.objects.filter(id=job_id).exists() else "job-wait", job_id)
    return _form_page(request, form, banner, status=422)


@require_POST
def directives(request: HttpRequest) -> HttpResponse:
    """The part of the form that says what the script's #SBATCH lines ask for, which the page fills in."""
    context: dict[str, object] = {}
    try:
        values, ignored = submissions.requested_by_script(request.POST.get("script", "")[:MAXIMUM_BYTES])
    except CarmeError as error:
        context["failure"] = explained(error)
    else:
        fields = SubmitForm.base_fields
        read = [(fields[name].label, value) for name, value in values.items() if name in fields]
        context |= {"values": values, "read": read, "ignored": ", ".join(ignored)}
    return render(request, "jobs/directives.html", context)


@require_POST
def predict(request: HttpRequest) -> HttpResponse:
    """The part of the form that says when such a job would begin, its cost, and what a probe predicts."""
    user = signed_in(request)
    cluster, _banner = _cluster_state()
    form = _form(user, cluster, data=request.POST)
    form.is_valid()
    context: dict[str, Any] = {"problems": [p for name in SCALING for p in form.errors.get(name, [])]}
    if form.submission is not None and cluster is not None:
        try:
            sized = submissions.like(submissions.sized(form.submission))
            context["gpu_hours"] = gpu_hours(sized)
            context["start_estimates"] = start_estimates(_single(sized), user.username, broker())
            if form.probe:
                context["advice"] = _advice(form.probe, _single(sized), cluster, user)
        except CarmeError as error:
            # Errors in the script's lines appear beside the fields that they fill in.
            if form.probe or not isinstance(error, InvalidRequest):
                context["problems"] = [explained(error)]
    return render(request, "sessions/estimate.html", context)


def _single(request: JobRequest) -> JobRequest:
    """One task of an array: when the first one begins, whatever number it has."""
    return request.model_copy(update={"array": None})


def _advice(probe: Probe, request: JobRequest, cluster: Cluster, user: User) -> Advice | None:
    """What is shown beside the form. Raises CarmeError."""
    site = broker()
    curve = curve_of(probe.path, user, site)
    partition = partition_of(request, cluster, settings.SITE).name
    return advice(
        curve,
        cluster.members(partition),
        request.gpu_type,
        (request.nodes, request.gpus_per_node),
        probe.steps,
        starts(request, user, site),
    )


@require_safe
def wait(request: HttpRequest, job_id: int) -> HttpResponse:
    """The page of a job that was submitted a moment ago, which the mirror may not have yet."""
    user = signed_in(request)
    if not own_jobs(user).filter(id=job_id).exists():
        try:
            known = broker().job(job_id, user=user.username)
        except NotFound:
            raise Http404 from None
        except CarmeError as error:
            # It is in the queue all the same, and in this list as soon as the broker answers.
            messages.error(request, explained(error))
            return redirect("jobs")
        Job.store([known])
    return redirect("job", job_id)


@require_http_methods(["GET", "HEAD", "POST"])
def cancel(request: HttpRequest, job_id: int) -> HttpResponse:
    """Ask whether to end a job of mine, and end it."""
    found = _own_job(request, job_id)
    if request.method != "POST":
        task = request.GET.get("task", "")
        shown = task if task.isascii() and task.isdigit() and found.is_array else ""
        if not shown:
            add_progress([found])
        if found.is_unfinished or shown:
            return render(request, "jobs/cancel.html", {"job": found, "task": shown})
    if request.method == "POST":
        try:
            broker().cancel(found.id, user=found.user, task=_task(request))
        except CarmeError as error:
            messages.error(request, explained(error))
        else:
            messages.success(request, _("The job is stopping."))
            notifier.notify([found.user])
    return redirect(found)


def _task(request: HttpRequest) -> int | None:
    """The task of an array that alone is meant."""
    given = request.POST.get("task", "")
    return int(given) if given.isascii() and given.isdigit() and len(given) <= TASK_DIGITS else None


@require_POST
def extend(request: HttpRequest, job_id: int) -> HttpResponse:
    """Ask for more time for a job of mine; the page then says what came of it."""
    found = _own_job(request, job_id)
    minutes = minutes_of_form(request.POST.get("minutes", ""))
    try:
        given = submissions.extend(signed_in(request), found.id, minutes, broker())
    except CarmeError as error:
        messages.error(request, explained(error))
    else:
        messages.success(request, format_html(_("The job now ends at {}."), moment(given.ends)))
    return redirect(found)


@require_POST
def resubmit(request: HttpRequest, job_id: int) -> HttpResponse:
    """Submit a batch job once more as it was; of an array all tasks, one, or those that failed."""
    found = _own_job(request, job_id)
    try:
        if "failed" in request.POST:
            new = resubmit_failed(found, broker())
        else:
            new = broker().resubmit(found.id, user=found.user, task=_task(request))
    except CarmeError as error:
        messages.error(request, explained(error))
        return redirect(found)
    messages.success(request, _("Job %s is in the queue.") % new)
    return redirect("job-wait", new)


@require_safe
def log_stream(request: HttpRequest, job_id: int) -> StreamingHttpResponse:
    """What a job of mine writes, as server-sent events: an event's id is where the next begins."""
    found = _own_job(request, job_id)
    given = request.headers.get("Last-Event-ID") or request.GET.get("offset", "")
    offset = int(given) if given.isascii() and given.isdigit() and len(given) < 16 else 0
    events = _follow(found.id, found.user, offset, get_language() or settings.LANGUAGE_CODE)
    answer = StreamingHttpResponse(events, content_type="text/event-stream")
    answer["Cache-Control"] = "no-store"
    answer["X-Accel-Buffering"] = "no"  # nginx passes each event on at once
    return answer


async def _follow(job_id: int, user: str, offset: int, language: str) -> AsyncIterator[str]:
    """The events; errors are in the reader's language, which is not that of the event loop."""
    site = AsyncBrokerClient(settings.SITE.broker.socket, timeout=BROKER_TIMEOUT)
    clock = asyncio.get_running_loop().time
    end, pause = clock() + STREAM_ENDS_AFTER, POLL
    yield "retry: 2000\n\n"
    while clock() < end:
        try:
            # The state before the text: a job that is over by now has written all it will.
            over = (await site.job(job_id, user=user)).is_over
            part = await site.log(job_id, user=user, offset=offset)
        except CarmeError as error:
            with override(language):
                trouble = {"text": str(error), "help": error.help, "more": _("More in the help")}
            yield f"event: trouble\ndata: {json.dumps(trouble)}\n\n"
            if not isinstance(error, BrokerUnavailable):
                return
            await asyncio.sleep(CALM)
            continue
        if part.text:
            offset, pause = part.offset, POLL
            yield f"id: {offset}\nevent: text\ndata: {json.dumps(part.text)}\n\n"
            if part.offset < part.size:
                continue
        elif over:
            yield f"id: {offset}\nevent: over\ndata: {json.dumps('')}\n\n"
            return
        else:
            pause = min(CALM, pause * 1.5)
            yield ": still here\n\n"
        await asyncio.sleep(pause)


def _own_job(request: HttpRequest, job_id: int) -> Job:
    return get_object_or_404(own_jobs(signed_in(request)), id=job_id)


def _cluster_state() -> tuple[Cluster | None, str]:
    try:
        return cluster_cache.cluster(), ""
    except CarmeError as error:
        return None, explained(error)


def _form(user: User, cluster: Cluster | None, data: Any = None, initial: Any = None) -> SubmitForm:
    bookings = Booking.usable(user, timezone.now())
    return SubmitForm(
        data,
        cluster=usable_by(user, cluster),
        catalogue=images_of(user),
        bookings=bookings,
        accounts=payers(user),
        qualities=access_for(user).qos,
        initial=initial,
    )


def _begin(request: HttpRequest) -> dict[str, Any]:
    """What a link into the form fills in: a pattern, or a job of mine."""
    if pattern := PATTERNS.get(request.GET.get("pattern", "")):
        values = pattern._asdict()
        name = request.GET["pattern"]
        image = settings.SITE.images.default if values.pop("in_image") else ""
        if template := TEMPLATES.get(name):
            image = template.image(images_of(signed_in(request)).names(), image)
        return values | {"image": image, "name": name}
    given = request.GET.get("job", "")
    if not (given.isascii() and given.isdigit() and len(given) <= 18):
        return {}
    found = _own_job(request, int(given))
    try:
        request_ = broker().recipe(found.id, user=found.user).request
    except CarmeError as error:
        messages.error(request, explained(error))
        return {}
    values = request_.model_dump(
        exclude={"command", "prediction", "files", "environment", "kind", "image_file"}
    )
    sent = sent_script(request_.command, request_.files)
    script = sent[0] if sent else ""
    values |= {"script": contents.shown(script), "script_encoding": contents.encoding_of(script)}
    if prediction := request_.prediction:
        values |= {"scaling": prediction.file, "steps": prediction.steps, "reason": prediction.reason}
    return values | {"stage": stage_text(request_.stage)}


def _form_page(
    request: HttpRequest, form: SubmitForm, banner: str, estimate: Any = None, status: int = 200
) -> HttpResponse:
    if form.errors:
        status = 422
    context = {"form": form, "banner": banner, "estimate": estimate, "patterns": PATTERNS}
    return render(request, "jobs/submit.html", context, status=status)


def _job_context(request: HttpRequest, job_id: int, log: bool = True) -> dict[str, object]:
    user = signed_in(request)
    version = notifier.version(user.username)  # first: what comes meanwhile is an update
    found = get_object_or_404(own_jobs(user), id=job_id)
    context: dict[str, object] = {"job": found, "banner": silence(), "version": version}
    context["extensions"] = extensions()
    session = None
    if found.kind == "session":
        session = context["session"] = Session.objects.filter(owner=user, job_id=found.id).first()
    if found.is_array and request.GET.get("task", "") != str(found.task):
        add_progress([found])
        context["tasks"] = tasks_of(found, request.GET.get("page"))
        context["cells"] = cells(found)
        context["failed"] = failed_tasks(found)[:MOST_NAMED]
        return context
    context["timeline"] = timeline(found, session)
    return context | ({"log": tail(found, broker())} if log else {})
