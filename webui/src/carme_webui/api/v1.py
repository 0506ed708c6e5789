"""The addresses of `/api/v1/`. Nobody sees or changes here what their pages would not show them."""

from http import HTTPStatus
from typing import Any, BinaryIO, cast

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import NinjaAPI, Query, Router, Status
from ninja.errors import HttpError, ValidationError
from ninja.params.functions import Path
from ninja.params.functions import Query as QueryValue

from carme import __version__
from carme import api as wire
from carme.broker.protocol import JobFacts, Recipe
from carme.errors import CarmeError, InvalidRequest, NotFound
from carme.files.client import Files, Saved
from carme.jobs import NEVER_BEGUN, SessionOptions, StartEstimate
from carme.jobs.arrays import MAXIMUM_TASK
from carme.translation import message, translated
from carme.wording import place
from carme.wording import problem as sentence
from carme_webui.accounts.models import User
from carme_webui.api import administration, bookings, files, own_images, personal, schemas
from carme_webui.api import projects as project_addresses
from carme_webui.api.access import TokenAuth, TooOften, Unknown, asker, require, token_of
from carme_webui.api.answers import ERRORS, GONE, REFUSED, answers
from carme_webui.api.problems import CONTENT_TYPE, of_error, problem
from carme_webui.api.schemas import page_of
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker, cluster_cache, entry_points
from carme_webui.files.quota import check_quota
from carme_webui.files.services import numbers_of
from carme_webui.images.catalogue import images_of
from carme_webui.jobs import submissions
from carme_webui.jobs.arrays import add_progress, resubmit_failed
from carme_webui.jobs.models import Job
from carme_webui.jobs.search import FILTERS, Search, own_jobs
from carme_webui.jobs.submissions import JobSubmission
from carme_webui.notifier import notifier
from carme_webui.projects.models import Project, access_for, usable_by
from carme_webui.sessions import actions
from carme_webui.sessions.models import NAME_PATTERN as SESSION_NAME
from carme_webui.sessions.models import Session, new_name
from carme_webui.sessions.opened import apps_of, own_sessions
from carme_webui.titles import tidy

__all__ = ["api", "urls"]


class Api(NinjaAPI):
    """An API whose document calls its refusals what they are."""

    def get_openapi_schema(self, *args: Any, **kwargs: Any) -> Any:
        document = super().get_openapi_schema(*args, **kwargs)
        for path in document["paths"].values():
            for operation in path.values():
                for status, answer in operation["responses"].items():
                    if int(status) >= HTTPStatus.BAD_REQUEST:
                        answer["description"] = ERRORS.get(
                            HTTPStatus(int(status)), HTTPStatus(int(status)).phrase
                        )
                        answer["content"] = {CONTENT_TYPE: answer["content"]["application/json"]}
        return document


api = Api(
    title="Carme",
    version=__version__,
    urls_namespace="api-v1",
    description=(
        "What the portal's pages do, for programs. Every request but that for this document needs a personal "
        "token. Times are in UTC. Refusals are problem details (RFC 9457); `detail` is the sentence that the "
        "page would show, `field` the part of the request that was wrong."
    ),
    auth=TokenAuth(),
    docs_url=None,  # its page would load scripts from elsewhere
)

PAGE_BYTES = 1 << 20
SessionName = Path(..., pattern=rf"^{SESSION_NAME}$")
JobId = Path(..., ge=1, lt=10**18)
Task = QueryValue(None, ge=0, le=MAXIMUM_TASK, description="a task of the array of this number")

# --- myself and the cluster ------------------------------------------------------------------------------

general = Router(tags=["general"])


@general.get("/profile", response=answers(wire.Account))
def profile(request: HttpRequest) -> wire.Account:
    """Whose token this is, and what it allows."""
    token = token_of(request)
    used = own_jobs(token.owner).exclude(account="").order_by("account").values_list("account", flat=True)
    return wire.Account(
        user=token.owner.username,
        email=token.owner.email,
        manager=token.owner.is_staff,
        accounts=list(used.distinct()),
        default_account=settings.SITE.slurm.default_account,
        associations=access_for(token.owner).associations,
        scopes=token.scopes,
        token_expires=token.expires,
    )


@general.get("/cluster", response=answers(wire.Overview))
def cluster(request: HttpRequest) -> HttpResponse:
    """Partitions, nodes, and the GPUs that are free now; of hidden partitions those limited to me."""
    found = cluster_cache.cluster()
    own = usable_by(asker(request), found) or found
    names = {partition.name for partition in own.partitions}
    shown = [partition for partition in found.partitions if not partition.hidden or partition.name in names]
    return HttpResponse(schemas.overview_of(found, shown), content_type="application/json; charset=utf-8")


_OF_IMAGE = {"name", "title", "description", "digest"}


@general.get("/images", response=answers(list[wire.ImageOut]))
def image_list(request: HttpRequest) -> list[wire.ImageOut]:
    """What sessions and jobs can run in: the site's images, mine, and those of my projects."""
    shown: list[wire.ImageOut] = []
    catalogue = images_of(asker(request))
    for name in catalogue.names():
        try:
            image = catalogue.get(name)
        except CarmeError:
            continue  # it cannot be used
        shown.append(wire.ImageOut(**image.model_dump(include=_OF_IMAGE), apps=entry_points(image)))
    return shown


@general.get("/images/at/{name}", response=answers(wire.ImageDetails, HTTPStatus.NOT_FOUND))
def image_details(request: HttpRequest, name: str) -> wire.ImageDetails:
    """One of them, with its packages."""
    try:
        image = images_of(asker(request)).get(name)
    except InvalidRequest as error:
        raise NotFound(error.message, error.remedy) from None
    return wire.ImageDetails(**image.model_dump(include={*_OF_IMAGE, "packages"}), apps=entry_points(image))


# --- sessions --------------------------------------------------------------------------------------------

sessions = Router(tags=["sessions"])


def _session(row: Session) -> wire.SessionOut:
    base = settings.SITE.site.url
    return schemas.session_out(
        row, [wire.App(name=app.name, title=app.title, url=f"{base}{app.url}") for app in apps_of(row)]
    )


def _my_session(user: User, name: str) -> Session:
    return get_object_or_404(own_sessions(user), name=name)


@sessions.get("", response=answers(wire.Page[wire.SessionOut]))
def list_sessions(request: HttpRequest, search: Query[schemas.SessionSearch]) -> Any:
    """My sessions, newest first."""
    rows = own_sessions(asker(request))
    if search.state is not None:
        rows = rows.filter(state=search.state)
    if search.active is not None:
        over = {"state": "ended"}
        rows = rows.exclude(**over) if search.active else rows.filter(**over)
    return page_of(rows, search, _session)


@sessions.post("", response={**answers(wire.SessionOut, status=HTTPStatus.CREATED), 200: wire.SessionOut})
def start_session(request: HttpRequest, requested: schemas.SessionStart) -> Any:
    """Start a session. 200 instead of 201: there was one of this name already."""
    user = require(request, "sessions")
    stages = [stage.model_dump() for stage in submissions.stages_of(requested.stage, user)]
    values = requested.model_dump(exclude={"name"}) | {"title": tidy(requested.title), "stage": stages}
    options = SessionOptions.read(values)
    usable = Booking.usable(user, timezone.now())
    projects = list(Project.of(user))
    access, seen = access_for(user), broker().cluster()
    actions.check_options(options, seen, images_of(user), settings.SITE, usable, projects, access)
    check_quota(user)
    found, created = actions.start(user, options, requested.name or new_name())
    return Status(HTTPStatus.CREATED if created else HTTPStatus.OK, _session(found))


@sessions.get("/{name}", response=answers(wire.SessionOut, *GONE))
def show_session(request: HttpRequest, name: str = SessionName) -> Any:
    """One of my sessions."""
    return _session(_my_session(asker(request), name))


@sessions.delete("/{name}", response=answers(wire.SessionOut, *GONE, status=HTTPStatus.ACCEPTED))
def stop_session(request: HttpRequest, name: str = SessionName) -> Any:
    """Stop a session; one that is over stays as it is."""
    found = _my_session(require(request, "sessions"), name)
    actions.stop(found)
    return Status(HTTPStatus.ACCEPTED, _session(found))


@sessions.post("/{name}/extend", response=answers(wire.Extended, *REFUSED))
def extend_session(request: HttpRequest, requested: schemas.Extension, name: str = SessionName) -> Any:
    """Give a session more time."""
    found = _my_session(require(request, "sessions"), name)
    return actions.extend(found, requested.minutes, broker()).model_dump()


# --- jobs ------------------------------------------------------------------------------------------------

jobs = Router(tags=["jobs"])


def _my_job(user: User, job_id: int) -> Job:
    return get_object_or_404(own_jobs(user), id=job_id)


@jobs.get("", response=answers(wire.Page[wire.JobOut]))
def list_jobs(request: HttpRequest, search: Query[schemas.JobSearch]) -> Any:
    """My jobs of all years, newest first."""
    states = FILTERS[search.state][1] if search.state else ()
    requested = search.model_dump(include={"kind", "partition", "since", "until", "array"})
    rows = Search(text=search.q.strip(), states=states, **requested).apply(own_jobs(asker(request)))
    return page_of(rows, search, schemas.job_out)


@jobs.post("", response=answers(wire.Submitted, HTTPStatus.CONFLICT, status=HTTPStatus.CREATED))
def submit_job(request: HttpRequest, requested: JobSubmission) -> Any:
    """Submit a batch job, or an array of them; an array's number is that of all its tasks together.

    What the request leaves out is taken from the script's `#SBATCH` lines; the answer names those `ignored`.
    """
    user = require(request, "jobs")
    site = broker()
    wanted = submissions.to_request(requested, user, site)
    job_id = submissions.submit(wanted.request, user, site)
    return Status(HTTPStatus.CREATED, {"id": job_id, "ignored": wanted.ignored})


@jobs.post("/check", response=answers(StartEstimate, HTTPStatus.CONFLICT))
def check_job(request: HttpRequest, requested: JobSubmission) -> Any:
    """Check a batch job as its submission would, and say when it would begin. Nothing is submitted."""
    user = require(request, "jobs")
    site = broker()
    wanted = submissions.to_request(requested, user, site)
    return submissions.estimate(wanted.request, user, site).model_dump()


@jobs.put(
    "/inputs",
    response=answers(Saved, *REFUSED, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra={"requestBody": {"required": True, "content": files.BYTES}},
)
def keep_input(
    request: HttpRequest,
    name: str = files.UploadName,
    offset: int = QueryValue(..., ge=0, lt=submissions.MOST_INPUT, description="where the part belongs"),
    size: int = QueryValue(..., ge=1, le=submissions.MOST_INPUT, description="all of its bytes"),
) -> Any:
    """A part, of 8 MiB at most, of what a job is to read: a private file of my home, removed 90 days later.

    The answer says its `path`, which the job's command can be given.
    """
    user = require(request, "jobs")
    requested = {"offset": str(offset), "size": str(size), "length": request.META.get("CONTENT_LENGTH")}
    part = cast(BinaryIO, request)  # a request can be read
    return Files(broker(), user.username).keep(name, part, **numbers_of(requested)).model_dump()


@jobs.get("/{job_id}", response=answers(wire.JobOut, *GONE))
def show_job(request: HttpRequest, job_id: int = JobId, task: int | None = Task) -> Any:
    """One of my jobs, a whole array, or a task of one; as long as that waits, what it waits together with."""
    user = asker(request)
    row = Job.of_array(user.username, job_id, task)
    if row is None:
        # Submitted a moment ago, or by other means: Slurm may know of it before the portal does.
        known = broker().job(job_id, user=user.username, task=task)
        if known.reason == NEVER_BEGUN:
            return schemas.job_out(Job.of(known))  # the row with its number is another task's
        Job.store([known])
        row = _my_job(user, known.id)
    if task is None:
        add_progress([row])
    return schemas.job_out(row)


@jobs.get("/{job_id}/array", response=answers(wire.ArrayOut, *GONE))
def show_array(request: HttpRequest, job_id: int = JobId) -> Any:
    """How far the tasks of an array are: how many failed, and which are in which state."""
    row = _my_job(asker(request), job_id)
    if not row.is_array:
        raise NotFound(
            _("Job %d is not an array.") % job_id, _("See its state with: jobs/%d") % job_id, code="no-array"
        )
    return schemas.array_out(row)


@jobs.delete("/{job_id}", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def cancel_job(request: HttpRequest, job_id: int = JobId, task: int | None = Task) -> Any:
    """End a job, an array, or a task of one; what is over stays as it is."""
    user = require(request, "jobs")
    broker().cancel(job_id, user=user.username, task=task)
    notifier.notify([user.username])
    return Status(HTTPStatus.NO_CONTENT, None)


@jobs.get("/{job_id}/log", response=answers(wire.LogOut, *REFUSED))
def job_log(
    request: HttpRequest,
    job_id: int = JobId,
    offset: int = QueryValue(0, ge=0, lt=2**53),
    limit: int = QueryValue(65_536, ge=1, le=PAGE_BYTES),
    task: int | None = Task,
    tail: int | None = QueryValue(None, ge=0, le=1_000_000),
) -> Any:
    """What a job, or a task of an array, has written, from byte `offset` on, or the last `tail` lines."""
    return _text(request, job_id, "log", offset, limit, task, tail=tail)


@jobs.get("/{job_id}/result", response=answers(wire.LogOut, *REFUSED))
def job_result(
    request: HttpRequest,
    job_id: int = JobId,
    offset: int = QueryValue(0, ge=0, lt=2**53),
    limit: int = QueryValue(PAGE_BYTES, ge=1, le=PAGE_BYTES),
    task: int | None = Task,
) -> Any:
    """What a job left in `$CARME_JOB_FOLDER/result`, from byte `offset` on; for the Python client."""
    return _text(request, job_id, "result", offset, limit, task)


def _text(
    request: HttpRequest,
    job_id: int,
    what: str,
    offset: int,
    limit: int,
    task: int | None,
    **more: int | None,
) -> Any:
    user, site = asker(request), broker()
    # The state before the text: a job that is over by now has written all it will.
    over = site.job(job_id, user=user.username, task=task).is_over
    part = getattr(site, what)(job_id, user=user.username, offset=offset, limit=limit, task=task, **more)
    return wire.LogOut(**part.model_dump(), over=over)


@jobs.get("/{job_id}/facts", response=answers(JobFacts, *REFUSED))
def job_facts(request: HttpRequest, job_id: int = JobId, task: int | None = Task) -> Any:
    """Where a job began: its image's digest, and the Git revision of its working folder."""
    return broker().facts(job_id, user=asker(request).username, task=task).model_dump()


@jobs.get("/{job_id}/recipe", response=answers(Recipe, *REFUSED))
def job_recipe(request: HttpRequest, job_id: int = JobId) -> Any:
    """What a batch job was submitted with, without the values of its environment."""
    return broker().recipe(job_id, user=asker(request).username).model_dump()


@jobs.post("/{job_id}/extend", response=answers(wire.Extended, *REFUSED))
def extend_job(
    request: HttpRequest, requested: schemas.Extension, job_id: int = JobId, task: int | None = Task
) -> Any:
    """Give a running job, or a task of an array, more time."""
    user = require(request, "jobs")
    return submissions.extend(user, job_id, requested.minutes, broker(), task).model_dump()


@jobs.post("/{job_id}/resubmit", response=answers(wire.Submitted, *REFUSED, status=HTTPStatus.CREATED))
def resubmit_job(
    request: HttpRequest,
    job_id: int = JobId,
    task: int | None = Task,
    failed: bool = QueryValue(False, description="only the tasks of the array that failed"),
) -> Any:
    """Submit a batch job, an array, a task of one, or those that failed once more as they were."""
    user = require(request, "jobs")
    if failed:
        new = resubmit_failed(_my_job(user, job_id), broker())
    else:
        new = broker().resubmit(job_id, user=user.username, task=task)
    notifier.notify([user.username])
    return Status(HTTPStatus.CREATED, {"id": new})


# --- refusals --------------------------------------------------------------------------------------------


@api.exception_handler(ValidationError)
def _invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
    detail: Any = dict(error.errors[0])
    # The first words say where it was sent: "query", "search"; "body", "requested", "minutes".
    where = list(detail["loc"])
    detail["loc"] = where[2:] or where[1:]
    detail.setdefault("input", None)
    field = place(detail)
    named = len(where) > 2 or where[0] in ("path", "query")
    subject = repr(field) if named else message("The request")
    if detail["type"] == "extra_forbidden":
        why = message("There is no field {field!r} in this request.", field=field)
    elif detail["type"] == "string_pattern_mismatch":
        why = message("{subject} is not of the form that it must have.", subject=subject)
    else:
        why = sentence(detail, subject)
    remedy = _("Correct it and send the request again.")
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{translated(why)} {remedy}", "invalid", field or None)


@api.exception_handler(Unknown)
def _unknown(request: HttpRequest, error: Unknown) -> HttpResponse:
    return problem(HTTPStatus.UNAUTHORIZED, str(error), error.code, WWW_Authenticate="Bearer")


@api.exception_handler(CarmeError)
def _refused(request: HttpRequest, error: CarmeError) -> HttpResponse:
    return of_error(error)


@api.exception_handler(TooOften)
def _too_often(request: HttpRequest, error: TooOften) -> HttpResponse:
    message = _("Too many requests in one minute. Try again in %d s.") % error.seconds
    return problem(HTTPStatus.TOO_MANY_REQUESTS, message, Retry_After=str(error.seconds))


@api.exception_handler(HttpError)
def _http(request: HttpRequest, error: HttpError) -> HttpResponse:
    return problem(HTTPStatus(error.status_code), f"{error}.".replace("..", "."))


api.add_router("", general)
api.add_router("/sessions", sessions)
api.add_router("/jobs", jobs)
api.add_router("/bookings", bookings.router)
api.add_router("/images/own", own_images.router)
api.add_router("/files", files.router)
api.add_router("/presets", personal.presets)
api.add_router("/notices", personal.notices)
api.add_router("/projects", project_addresses.router)
api.add_router("/invitations", project_addresses.invitations)
api.add_router("/news", administration.announced)
api.add_router("/maintenance", administration.maintained)
api.add_router("/admin", administration.router)
urls = api.urls
for _pattern in urls[0]:
    assert _pattern.callback is not None
    _pattern.callback = login_not_required(_pattern.callback)  # tokens, not logins
