"""What is mine alone, for programs: presets of sessions, and the portal's notices to me."""

from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest
from django.urls import reverse
from django.utils import timezone
from ninja import Query, Router, Status
from ninja.params.functions import Path
from pydantic import Field

from carme import api as wire
from carme.jobs import SessionOptions
from carme_webui.api.access import asker, require
from carme_webui.api.answers import GONE, answers
from carme_webui.api.schemas import Body, Paging, Words, page_of
from carme_webui.bookings.models import Booking
from carme_webui.cluster import broker
from carme_webui.images.catalogue import images_of
from carme_webui.profile.kinds import Kind, choices_of, choose
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import read_all
from carme_webui.projects.models import Project, access_for
from carme_webui.sessions import actions
from carme_webui.sessions.models import Preset

__all__ = ["notices", "presets"]

KindName = Path(...)
Number = Path(..., ge=1, lt=2**63)


# --- presets ---------------------------------------------------------------------------------------------

presets = Router(tags=["presets"])


class PresetIn(Body):
    """What to remember, and under which name; one of the same name is replaced."""

    name: Words = Field(min_length=1, max_length=80)
    options: SessionOptions


def _preset(row: Preset) -> wire.PresetOut:
    return wire.PresetOut(
        number=row.pk,
        name=row.name,
        options=SessionOptions.model_validate(row.options),
        link=f"{settings.SITE.site.url}{reverse('dashboard')}?{row.query}",
    )


@presets.get("", response=answers(list[wire.PresetOut]))
def list_presets(request: HttpRequest) -> Any:
    """Options of sessions that I start often."""
    return [_preset(row) for row in Preset.objects.filter(owner=asker(request))]


@presets.post("", response=answers(wire.PresetOut, status=HTTPStatus.CREATED))
def save_preset(request: HttpRequest, requested: PresetIn) -> Any:
    """Remember options of a session, which must be possible now; a booking is not remembered."""
    user = require(request, "sessions")
    options = SessionOptions.read(requested.options.model_dump())
    usable = Booking.usable(user, timezone.now())
    projects = list(Project.of(user))
    actions.check_options(
        options, broker().cluster(), images_of(user), settings.SITE, usable, projects, access_for(user)
    )
    return Status(HTTPStatus.CREATED, _preset(actions.save_preset(user, requested.name, options)))


@presets.delete("/{number}", response=answers(None, *GONE, status=HTTPStatus.NO_CONTENT))
def delete_preset(request: HttpRequest, number: int = Number) -> Any:
    """Forget one."""
    if not Preset.objects.filter(owner=require(request, "sessions"), pk=number).delete()[0]:
        raise Http404
    return Status(HTTPStatus.NO_CONTENT, None)


# --- notices ---------------------------------------------------------------------------------------------

notices = Router(tags=["notices"])


class NoticeSearch(Paging):
    """Which notices."""

    unread: bool | None = Field(default=None, description="those that wait to be read, or those that do not")


class NoticeChoice(Body):
    """Whether I want such notices on pages, and by mail."""

    page: bool
    mail: bool


@notices.get("", response=answers(wire.Page[wire.NoticeOut]))
def list_notices(request: HttpRequest, search: Query[NoticeSearch]) -> Any:
    """The portal's notices to me, the latest first."""
    rows = Notice.objects.filter(user=asker(request), on_page=True)
    if search.unread is not None:
        rows = rows.filter(read__isnull=search.unread)
    return page_of(rows, search, _notice)


def _notice(row: Notice) -> wire.NoticeOut:
    same = {name: getattr(row, name) for name in ("kind", "text", "created", "read")}
    link = f"{settings.SITE.site.url}{row.link}" if row.link else ""
    return wire.NoticeOut(number=row.pk, link=link, **same)


@notices.post("/read", response=answers(None, status=HTTPStatus.NO_CONTENT))
def read_notices(request: HttpRequest) -> Any:
    """I have read all of it."""
    read_all(require(request, "profile"))
    return Status(HTTPStatus.NO_CONTENT, None)


@notices.get("/kinds", response=answers(list[wire.NoticeKind]))
def list_notice_kinds(request: HttpRequest) -> Any:
    """The kinds of notices, and how I want to get them."""
    return [
        wire.NoticeKind(kind=kind, title=str(about.title), page=page, mail=mail, fixed=about.fixed)
        for kind, about, page, mail in choices_of(asker(request))
    ]


@notices.put("/kinds/{kind}", response=answers(wire.NoticeKind, *GONE))
def choose_notices(request: HttpRequest, requested: NoticeChoice, kind: Kind = KindName) -> Any:
    """Choose whether I get such notices; what is fixed is on pages always."""
    user = require(request, "profile")
    known = {kind: (page, mail) for kind, _about, page, mail in choices_of(user)}
    if kind not in known:
        raise Http404
    choose(user, known | {kind: (requested.page, requested.mail)})
    return next(each for each in list_notice_kinds(request) if each.kind == kind)
