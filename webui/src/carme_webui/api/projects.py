"""Projects and invitations, for programs: what their pages do, by the same rules."""

from http import HTTPStatus
from typing import Annotated, Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from ninja import Router, Status
from ninja.params.functions import Path
from pydantic import Field

from carme import api as wire
from carme.projects import NAME_PATTERN
from carme_webui.accounts.models import User
from carme_webui.api import schemas
from carme_webui.api.access import administrates, asker, require, require_admin
from carme_webui.api.answers import REFUSED, answers
from carme_webui.api.schemas import Body, Words
from carme_webui.cluster import broker
from carme_webui.notifier import notifier
from carme_webui.projects import services
from carme_webui.projects.models import Invitation, Membership, Project
from carme_webui.titles import tidy

__all__ = ["invitations", "router"]

router = Router(tags=["projects"])
invitations = Router(tags=["projects"])

ProjectName = Path(..., pattern=rf"^{NAME_PATTERN}$")
UserName = Path(..., pattern=r"^[A-Za-z0-9_.-]{1,150}$")
Count = Annotated[int, Field(ge=0, le=services.MOST)]


class NewProject(Body):
    """A project, and the user who invites the others."""

    name: Words
    title: Words = Field(min_length=1, max_length=80)
    manager: Words


class Limits(Body):
    """What a project may use; what is left out stays, null is no limit, no partitions are all of them."""

    title: Words | None = Field(default=None, min_length=1, max_length=80)
    partitions: list[Words] | None = None
    gpu_types: dict[Words, Count] | None = None
    gpus: Count | None = None
    nodes: Count | None = None
    jobs: Count | None = None
    minutes: Annotated[int, Field(ge=1, le=services.MOST)] | None = None
    gpu_hours: Count | None = None


class State(Body):
    """A project that is closed takes no jobs; its members and numbers stay."""

    closed: bool


class Invited(Body):
    """Who is invited to join."""

    user: Words


class Role(Body):
    """Whether a member is a manager."""

    manager: bool


class Reply(Body):
    """Whether I join."""

    accept: bool


def _projects(request: HttpRequest) -> "QuerySet[Project]":
    """Those that may be seen: mine, and all where the token shows what administrators see."""
    rows = Project.objects.prefetch_related("memberships", "bookings", "invitations__user")
    return rows if administrates(request) else rows.filter(memberships__user=asker(request))


def _shown(request: HttpRequest, name: str) -> wire.ProjectOut:
    """A project as it is now."""
    return schemas.project_out(get_object_or_404(_projects(request), name=name), asker(request))


@router.get("", response=answers(list[wire.ProjectOut]))
def list_projects(request: HttpRequest) -> Any:
    """The projects that I am in and that are open."""
    user = asker(request)
    rows = Project.of(user).prefetch_related("memberships", "bookings", "invitations__user").order_by("name")
    return [schemas.project_out(row, user) for row in rows]


@router.post("", response=answers(wire.ProjectOut, *REFUSED, status=HTTPStatus.CREATED))
def create_project(request: HttpRequest, requested: NewProject) -> Any:
    """Make a project with its first manager; for administrators."""
    by = require_admin(request)
    project = services.create(
        by, requested.name, tidy(requested.title), services.manager_of(requested.manager), broker()
    )
    return Status(HTTPStatus.CREATED, _shown(request, project.name))


@router.get("/{name}", response=answers(wire.ProjectOut, *REFUSED))
def show_project(request: HttpRequest, name: str = ProjectName) -> Any:
    """One of my projects; for administrators any."""
    return _shown(request, name)


@router.patch("/{name}", response=answers(wire.ProjectOut, *REFUSED))
def limit_project(request: HttpRequest, requested: Limits, name: str = ProjectName) -> Any:
    """Change what a project may use; for administrators."""
    by = require_admin(request)
    found = get_object_or_404(_projects(request), name=name)
    values = requested.model_dump(exclude_unset=True)
    for key, none in (("title", found.title), ("partitions", []), ("gpu_types", {})):
        if key in values and values[key] is None:
            values[key] = none
    if "title" in values:
        values["title"] = tidy(values["title"])
    services.require_known(found, values, broker().cluster())
    services.limit(by, found, values, broker())
    return _shown(request, name)


@router.put("/{name}/state", response=answers(wire.ProjectOut, *REFUSED))
def close_project(request: HttpRequest, requested: State, name: str = ProjectName) -> Any:
    """Close a project, or open it again; for administrators."""
    by = require_admin(request)
    found = get_object_or_404(_projects(request), name=name)
    (services.close if requested.closed else services.reopen)(by, found, broker())
    return _shown(request, name)


@router.post("/{name}/invitations", response=answers(wire.ProjectOut, *REFUSED, status=HTTPStatus.CREATED))
def invite_user(request: HttpRequest, requested: Invited, name: str = ProjectName) -> Any:
    """Ask somebody to join; for managers of the project."""
    by = require(request, "projects")
    services.invite(by, get_object_or_404(_projects(request), name=name), requested.user.strip())
    return Status(HTTPStatus.CREATED, _shown(request, name))


@router.delete("/{name}/invitations/{user}", response=answers(wire.ProjectOut, *REFUSED))
def withdraw_invitation(request: HttpRequest, name: str = ProjectName, user: str = UserName) -> Any:
    """Take an invitation back; for managers of the project."""
    by, found = require(request, "projects"), get_object_or_404(_projects(request), name=name)
    row = get_object_or_404(Invitation.objects.select_related("project"), project=found, user__username=user)
    services.withdraw(by, row)
    return _shown(request, name)


@router.patch("/{name}/members/{user}", response=answers(wire.ProjectOut, *REFUSED))
def change_role(request: HttpRequest, requested: Role, name: str = ProjectName, user: str = UserName) -> Any:
    """Make a member a manager, or a manager a member; for managers of the project."""
    by = require(request, "projects")
    services.set_manager(by, _member(request, name, user), requested.manager)
    return _shown(request, name)


@router.delete("/{name}/members/{user}", response=answers(None, *REFUSED, status=HTTPStatus.NO_CONTENT))
def remove_member(request: HttpRequest, name: str = ProjectName, user: str = UserName) -> Any:
    """Take somebody out, as a manager of the project, or leave it. Jobs that run go on until they end."""
    by = require(request, "projects")
    services.remove(by, _member(request, name, user), broker())
    return Status(HTTPStatus.NO_CONTENT, None)


def _member(request: HttpRequest, name: str, user: str) -> Membership:
    found = get_object_or_404(_projects(request), name=name)
    return get_object_or_404(Membership.objects.select_related("project"), project=found, user__username=user)


# --- invitations -----------------------------------------------------------------------------------------


@invitations.get("", response=answers(list[wire.InvitationOut]))
def list_invitations(request: HttpRequest) -> Any:
    """Projects that I am invited to join."""
    return [_invitation(row) for row in _invitations_of(asker(request))]


@invitations.post("/{number}", response=answers(wire.InvitationOut, *REFUSED))
def answer_invitation(request: HttpRequest, requested: Reply, number: int = Path(..., ge=1, lt=2**63)) -> Any:
    """Join a project that asks me, or do not."""
    user = require(request, "projects")
    row = get_object_or_404(_invitations_of(user), pk=number)
    reported = _invitation(row)
    services.answer(user, row, requested.accept, broker())
    notifier.notify([user.username])
    return reported


def _invitations_of(user: User) -> "QuerySet[Invitation]":
    return Invitation.objects.filter(user=user).select_related("project", "by")


def _invitation(row: Invitation) -> wire.InvitationOut:
    return wire.InvitationOut(
        number=row.pk,
        project=row.project.name,
        title=row.project.title,
        by=row.by.username if row.by else "",
        created=row.created,
    )
