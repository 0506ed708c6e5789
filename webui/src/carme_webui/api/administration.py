"""What administrators do, for programs: as on their pages, with a token of the scope `admin` alone."""

from datetime import date
from http import HTTPStatus
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Query, Router, Status
from ninja.params.functions import Path
from pydantic import Field, field_validator

from carme import api as wire
from carme.bookings import YEARS, BookingState
from carme.errors import InvalidRequest
from carme.jobs import Job, Node
from carme.translation import translated
from carme_webui.accounts.models import User
from carme_webui.administration import services
from carme_webui.administration.people import onboard
from carme_webui.announcements import services as announcements
from carme_webui.announcements.models import Maintenance, News
from carme_webui.api import schemas
from carme_webui.api.access import require_admin
from carme_webui.api.answers import REFUSED, answers
from carme_webui.api.schemas import Body, Paging, Second, Words, page_of
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker
from carme_webui.projects.models import Membership, Project
from carme_webui.titles import tidy

__all__ = ["announced", "maintained", "router"]

router = Router(tags=["administration"])
announced = Router(tags=["news and maintenance"])
maintained = Router(tags=["news and maintenance"])

UserName = Path(..., pattern=r"^[A-Za-z0-9_.-]{1,150}$")
NodeName = Path(..., pattern=r"^[A-Za-z0-9_.-]{1,64}$")
Number = Path(..., ge=1, lt=2**63)
MaintenanceName = Path(..., pattern=r"^[a-z0-9-]{1,32}$")


# --- users -----------------------------------------------------------------------------------------------


class Found(Paging):
    """Which of them."""

    q: Words = Field(default="", description="what to look for")


class NewUser(Body):
    """Who is onboarded: the name of a Unix account that is there."""

    name: Words
    email: Words = Field(default="", max_length=254)
    project: Words = Field(default="", description="the name of a project to join at once")


class Access(Body):
    """Whether a user may sign in."""

    active: bool


class Message(Body):
    """A message to a user."""

    message: Words = Field(min_length=1, max_length=400)


def _user(row: User) -> wire.UserOut:
    memberships: QuerySet[Membership] = row.memberships  # pyright: ignore[reportAttributeAccessIssue]
    return wire.UserOut(
        name=row.username,
        email=row.email,
        active=row.is_active,
        admin=row.is_staff,
        joined=row.date_joined,
        last_login=row.last_login,
        projects=sorted(membership.project.name for membership in memberships.all()),
    )


def _users(q: str = "") -> "QuerySet[User]":
    return services.find_users(q.strip()).prefetch_related("memberships__project")


@router.get("/users", response=answers(wire.Page[wire.UserOut], *REFUSED))
def list_users(request: HttpRequest, search: Query[Found]) -> Any:
    """All users, the latest first; `q`: part of a name or address."""
    require_admin(request)
    return page_of(_users(search.q), search, _user)


@router.post("/users", response=answers(wire.Onboarded, *REFUSED, status=HTTPStatus.CREATED))
def onboard_user(request: HttpRequest, requested: NewUser) -> Any:
    """Onboard a user: portal account, association in Slurm, home, quotas, project. It may be repeated."""
    by = require_admin(request)
    project = Project.objects.filter(name=requested.project, closed=None).first()
    if requested.project and project is None:
        raise InvalidRequest(
            _("There is no open project %r.") % requested.project[:40],
            _("See the list of projects."),
            field="project",
        )
    account, password, done = onboard(
        by.username, requested.name.strip(), requested.email.strip(), project, broker()
    )
    reported = wire.Onboarded(user=_user(_users().get(pk=account.pk)), password=password, done=done)
    return Status(HTTPStatus.CREATED, reported)


@router.get("/users/{name}", response=answers(wire.UserOut, *REFUSED))
def show_user(request: HttpRequest, name: str = UserName) -> Any:
    """One user."""
    require_admin(request)
    return _user(get_object_or_404(_users(), username=name))


@router.patch("/users/{name}", response=answers(wire.UserOut, *REFUSED))
def change_user(request: HttpRequest, requested: Access, name: str = UserName) -> Any:
    """Let a user sign in again, or no more, and not use tokens either."""
    by, found = require_admin(request), get_object_or_404(_users(), username=name)
    services.set_active(by, found, requested.active)
    return _user(found)


@router.post("/users/{name}/messages", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def write_to_user(request: HttpRequest, requested: Message, name: str = UserName) -> Any:
    """Send a user a message, on pages and by mail."""
    services.send_message(require_admin(request), get_object_or_404(User, username=name), requested.message)
    return Status(HTTPStatus.NO_CONTENT, None)


@router.delete("/users/{name}/second-factor", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def remove_second_factor(request: HttpRequest, name: str = UserName) -> Any:
    """Take the second factor off the account of a user who has lost it; the user is notified."""
    require_admin(request)
    services.remove_second_factor(get_object_or_404(User, username=name))
    return Status(HTTPStatus.NO_CONTENT, None)


# --- nodes and jobs --------------------------------------------------------------------------------------


class Drain(Body):
    """Why a node takes no more jobs."""

    reason: Words = Field(min_length=1)


class Stop(Body):
    """Why a job is ended; its owner is notified."""

    message: Words = ""


@router.get("/nodes", response=answers(list[Node], *REFUSED))
def list_nodes(request: HttpRequest) -> Any:
    """All nodes with their states and reasons."""
    require_admin(request)
    return broker().cluster().nodes


@router.put("/nodes/{name}/drain", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def drain_node(request: HttpRequest, requested: Drain, name: str = NodeName) -> Any:
    """Let no more jobs start on a node; those that run go on."""
    services.set_node(require_admin(request), name, True, requested.reason, broker())
    return Status(HTTPStatus.NO_CONTENT, None)


@router.delete("/nodes/{name}/drain", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def resume_node(request: HttpRequest, name: str = NodeName) -> Any:
    """Let jobs start on a node again."""
    services.set_node(require_admin(request), name, False, "", broker())
    return Status(HTTPStatus.NO_CONTENT, None)


@router.get("/jobs", response=answers(wire.Page[wire.OthersJob], *REFUSED))
def list_all_jobs(request: HttpRequest, search: Query[Found]) -> Any:
    """All jobs and sessions that wait or run; `q`: a user, account or number, or part of a name."""
    require_admin(request)
    found = services.find_jobs(search.q.strip(), broker())
    if search.cursor:
        found = [job for job in found if job.id < int(search.cursor)]
    part = found[: search.limit]
    more = len(found) > len(part)
    return {"items": [_job(job) for job in part], "next": str(part[-1].id) if more else None}


def _job(job: Job) -> wire.OthersJob:
    same = set(wire.OthersJob.model_fields) - {"active", "explanation"}
    values = {name: getattr(job, name) for name in same}
    return wire.OthersJob(**values, active=job.is_active, explanation=translated(job.explanation))


@router.post("/jobs/{number}/stop", response=answers(wire.OthersJob, *REFUSED))
def stop_any_job(request: HttpRequest, requested: Stop, number: int = Path(..., ge=1, lt=10**18)) -> Any:
    """End somebody's job or session; its owner is notified of the reason."""
    return _job(services.stop_job(require_admin(request), number, requested.message, broker()))


# --- what is decided, and what was changed ---------------------------------------------------------------


class ChangeSearch(Found):
    """Which changes; `q`: part of what was changed, or of its values."""

    who: Words = ""
    kind: Words = Field(default="", description="of what, as the answers call it, like `booking`")
    since: date | None = Field(default=None, description="the first day (UTC)")
    until: date | None = Field(default=None, description="the last day")

    @field_validator("since", "until")
    @classmethod
    def _in_known_years(cls, day: date | None) -> date | None:
        if day is not None and day.year not in YEARS:
            raise ValueError(f"must lie in the years {YEARS[0]} to {YEARS[-1]}")
        return day


@router.get("/approvals", response=answers(wire.Page[wire.BookingOut], *REFUSED))
def list_approvals(request: HttpRequest, search: Query[Paging]) -> Any:
    """Bookings that wait for an answer, the latest first; answer by `bookings/NAME/decision`."""
    user = require_admin(request)
    rows = (
        Booking.open().filter(state=BookingState.REQUESTED).select_related("owner", "project", "offered_to")
    )
    return page_of(rows, search, lambda row: schemas.booking_out(row, user))


@router.get("/record", response=answers(wire.Page[wire.ChangeOut], *REFUSED))
def list_changes(request: HttpRequest, search: Query[ChangeSearch]) -> Any:
    """The audit log, the latest first: who, when, what, before and after."""
    require_admin(request)
    kind = services.kind_key(search.kind.strip())
    rows = services.changes(search.q.strip(), search.who.strip(), search.since, search.until, kind=kind)
    return page_of(rows, search, _change)


def _change(row: Any) -> wire.ChangeOut:
    return wire.ChangeOut(
        number=row.pk,
        when=row.timestamp,
        who=row.actor.username if row.actor else "",
        address=row.remote_addr or "",
        action=str(row.get_action_display()),
        kind=services.kind_name(row),
        what=row.object_repr,
        changes={field: list(change) for field, change in row.changes_dict.items() if len(change) == 2},
    )


@router.get("/policies", response=answers(list[wire.PolicyOut], *REFUSED))
def list_policies(request: HttpRequest) -> Any:
    """The site's limits and policies as they hold."""
    require_admin(request)
    return [wire.PolicyOut(title=title, values=dict(values)) for title, values in services.policies()]


# --- news and maintenance --------------------------------------------------------------------------------


class NewsIn(Body):
    """An announcement."""

    title: Words = Field(min_length=1, max_length=120)
    text: schemas.Text = Field(default="", max_length=4000)
    until: date | None = Field(default=None, description="the last day on the dashboard")

    _in_known_years = field_validator("until")(ChangeSearch._in_known_years.__func__)  # type: ignore[attr-defined]


class MaintenanceIn(Body):
    """A time at which nodes take no jobs; without `nodes`, all of them."""

    title: Words = Field(min_length=1, max_length=120)
    text: schemas.Text = Field(default="", max_length=4000)
    nodes: list[Words] = Field(default=[], max_length=5000)
    start: Second
    end: Second


class MaintenanceChange(Body):
    """What is to be other than it was; what is left out stays."""

    title: Words | None = Field(default=None, min_length=1, max_length=120)
    text: schemas.Text | None = Field(default=None, max_length=4000)
    nodes: list[Words] | None = Field(default=None, max_length=5000)
    start: Second | None = None
    end: Second | None = None


@announced.get("", response=answers(list[wire.NewsOut]))
def list_news(request: HttpRequest) -> Any:
    """What the dashboard announces, the latest first."""
    return [_news(row) for row in News.latest()]


@announced.get("/all", response=answers(wire.Page[wire.NewsOut]))
def list_all_news(request: HttpRequest, search: Query[Paging]) -> Any:
    """All news, the latest first."""
    return page_of(News.objects.all(), search, _news)


def _news(row: News) -> wire.NewsOut:
    same = {name: getattr(row, name) for name in ("title", "text", "created", "until")}
    return wire.NewsOut(number=row.pk, **same)


@announced.post("", response=answers(wire.NewsOut, *REFUSED, status=HTTPStatus.CREATED))
def write_news(request: HttpRequest, requested: NewsIn) -> Any:
    """Publish an announcement; for administrators."""
    return Status(HTTPStatus.CREATED, _write(News(by=require_admin(request)), requested))


@announced.put("/{number}", response=answers(wire.NewsOut, *REFUSED))
def change_news(request: HttpRequest, requested: NewsIn, number: int = Number) -> Any:
    """Change news; for administrators."""
    require_admin(request)
    return _write(get_object_or_404(News, pk=number), requested)


def _write(row: News, requested: NewsIn) -> wire.NewsOut:
    row.title, row.text, row.until = tidy(requested.title), requested.text, requested.until
    announcements.publish(row)
    return _news(row)


@announced.delete("/{number}", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def delete_news(request: HttpRequest, number: int = Number) -> Any:
    """Take news away; for administrators."""
    require_admin(request)
    announcements.delete(get_object_or_404(News, pk=number))
    return Status(HTTPStatus.NO_CONTENT, None)


@maintained.get("", response=answers(list[wire.MaintenanceOut]))
def list_maintenance(request: HttpRequest) -> Any:
    """Maintenance that is planned or going on, the next one first."""
    return [_maintenance(row) for row in Maintenance.planned(timezone.now())]


def _maintenance(row: Maintenance) -> wire.MaintenanceOut:
    return wire.MaintenanceOut.model_validate(row, from_attributes=True)


@maintained.post("", response=answers(wire.MaintenanceOut, *REFUSED, status=HTTPStatus.CREATED))
def plan_maintenance(request: HttpRequest, requested: MaintenanceIn) -> Any:
    """Plan maintenance, kept free by Slurm; those whom it concerns are notified. For administrators."""
    by = require_admin(request)
    row = Maintenance(
        title=tidy(requested.title), text=requested.text, start=requested.start, end=requested.end
    )
    announcements.plan(row, by, requested.nodes, broker())
    return Status(HTTPStatus.CREATED, _maintenance(row))


@maintained.patch("/{name}", response=answers(wire.MaintenanceOut, *REFUSED))
def change_maintenance(
    request: HttpRequest, requested: MaintenanceChange, name: str = MaintenanceName
) -> Any:
    """Change maintenance; the start of one that has begun stays. For administrators."""
    by, row = require_admin(request), _planned(name)
    before = Maintenance.objects.get(pk=row.pk)
    values = {
        key: value for key, value in requested.model_dump(exclude_unset=True).items() if value is not None
    }
    nodes = values.pop("nodes", [] if row.whole else row.node_names)
    if row.begun and values.get("start", row.start) != row.start:
        raise InvalidRequest(
            _("This maintenance has begun, so its start cannot change."), _("Change its end."), field="start"
        )
    if "title" in values:
        values["title"] = tidy(values["title"])
    for key, value in values.items():
        setattr(row, key, value)
    announcements.plan(row, by, nodes, broker(), before)
    return _maintenance(row)


@maintained.delete("/{name}", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def cancel_maintenance(request: HttpRequest, name: str = MaintenanceName) -> Any:
    """Cancel maintenance, or end it now; its nodes take jobs again. For administrators."""
    by = require_admin(request)
    announcements.cancel(_planned(name), by, broker())
    return Status(HTTPStatus.NO_CONTENT, None)


def _planned(name: str) -> Maintenance:
    return get_object_or_404(Maintenance.planned(timezone.now()), name=name)
