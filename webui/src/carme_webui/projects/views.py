"""The pages of projects."""

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count, F, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.bookings import BookingState
from carme.errors import CarmeError, Denied, InvalidRequest
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.cluster import broker
from carme_webui.help_links import explained
from carme_webui.pages import wanted_words
from carme_webui.projects import services
from carme_webui.projects.forms import LimitsForm, NewProjectForm
from carme_webui.projects.models import Invitation, Membership, Project
from carme_webui.projects.rules import refused_words
from carme_webui.projects.use import use_by_month

__all__ = ["answer", "limits", "member", "new", "project", "project_list", "state", "use", "withdraw"]

PER_PAGE = 50


@require_safe
def project_list(request: HttpRequest) -> HttpResponse:
    """My projects, and my invitations; admins see all projects."""
    user = signed_in(request)
    # Those that are closed come last.
    rows = Project.objects.annotate(size=Count("memberships")).order_by(
        F("closed").asc(nulls_first=True), "name"
    )
    if not user.is_staff:
        rows = rows.filter(pk__in=Membership.objects.filter(user=user).values("project"))
    if wanted := wanted_words(request, "q", 80):
        rows = rows.filter(Q(name__icontains=wanted) | Q(title__icontains=wanted))
    context = {
        "page": Paginator(rows, PER_PAGE).get_page(request.GET.get("page")),
        "invitations": Invitation.objects.filter(user=user).select_related("project", "by"),
        "wanted": wanted,
    }
    return render(request, "projects/list.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """Make a project."""
    user = _admin(request)
    form = NewProjectForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        try:
            project = services.create(user, values["name"], values["title"], values["manager"], broker())
        except CarmeError as error:
            _add_error(form, error)
        else:
            return redirect("project-limits", project.name)
    return render(request, "projects/new.html", {"form": form}, status=422 if form.errors else 200)


@require_http_methods(["GET", "HEAD", "POST"])
def project(request: HttpRequest, name: str) -> HttpResponse:
    """One of my projects; a manager invites here."""
    user, found = signed_in(request), _visible(request, name)
    failure = ""
    invited = request.POST.get("user", "").strip()
    if request.method == "POST":
        try:
            services.invite(user, found, invited)
        except Denied as error:
            raise Http404 from error
        except InvalidRequest as error:
            failure = explained(error)
        else:
            messages.success(request, _("%s is invited and sees the invitation under Projects.") % invited)
            return redirect(found)
    members = list(found.memberships.all())
    context = {
        "project": found,
        "members": members,
        "own": next((each for each in members if each.user == user), None),
        "manager": user.is_staff or any(each.user == user and each.manager for each in members),
        "invitations": found.invitations.select_related("user", "by"),
        "bookings": found.bookings.exclude(state=BookingState.ENDED).select_related("owner"),
        "refused": refused_words(found),
        "failure": failure,
        "invited": invited,
    }
    return render(request, "projects/project.html", context, status=422 if failure else 200)


@require_safe
def use(request: HttpRequest, name: str) -> HttpResponse:
    """The part of a project's page that shows what its jobs used, by member and month."""
    user, found = signed_in(request), _visible(request, name)
    names_all = services.is_manager(user, found)
    context = {"stack": use_by_month(found, user, names_all), "names_all": names_all}
    return render(request, "projects/use.html", context)


@require_POST
def member(request: HttpRequest, name: str, user: str) -> HttpResponse:
    """Take a member out, or change the role."""
    by, found = signed_in(request), _visible(request, name)
    row = get_object_or_404(Membership.objects.select_related("project"), project=found, user__username=user)
    requested = request.POST.get("do", "")

    def do() -> None:
        if requested == "remove":
            services.remove(by, row, broker())
            messages.success(
                request,
                _("%(user)s is no longer a member of %(project)s.") % {"user": user, "project": found.title},
            )
        elif requested in ("manager", "member"):
            services.set_manager(by, row, requested == "manager")

    _try(request, do)
    if row.user == by and requested == "remove" and not by.is_staff:
        return redirect("projects")
    return redirect(found)


@require_POST
def withdraw(request: HttpRequest, name: str, user: str) -> HttpResponse:
    """Take an invitation back."""
    by, found = signed_in(request), _visible(request, name)
    row = get_object_or_404(Invitation.objects.select_related("project"), project=found, user__username=user)
    _try(request, lambda: services.withdraw(by, row))
    return redirect(found)


@require_POST
def answer(request: HttpRequest, number: int) -> HttpResponse:
    """Say yes or no to an invitation of mine."""
    user = signed_in(request)
    row = get_object_or_404(Invitation.objects.select_related("project", "by"), pk=number, user=user)
    yes = request.POST.get("answer") == "yes"
    if _try(request, lambda: services.answer(user, row, yes, broker())) and yes:
        return redirect(row.project)
    return redirect("projects")


@require_http_methods(["GET", "HEAD", "POST"])
def limits(request: HttpRequest, name: str) -> HttpResponse:
    """What a project may use; admins change it here."""
    user, found = _admin(request), _visible(request, name)
    try:
        cluster = broker().cluster()
    except CarmeError:
        cluster = None
    form = LimitsForm(request.POST if request.method == "POST" else None, project=found, cluster=cluster)
    if request.method == "POST" and form.is_valid():
        try:
            services.limit(user, found, form.values, broker())
        except CarmeError as error:
            _add_error(form, error)
        else:
            messages.success(request, _("The limits are changed."))
            return redirect(found)
    context = {"form": form, "project": found}
    return render(request, "projects/limits.html", context, status=422 if form.errors else 200)


@require_POST
def state(request: HttpRequest, name: str) -> HttpResponse:
    """Close a project or open it again."""
    user, found = _admin(request), _visible(request, name)
    act = services.close if request.POST.get("do") == "close" else services.reopen
    _try(request, lambda: act(user, found, broker()))
    return redirect(found)


def _visible(request: HttpRequest, name: str) -> Project:
    """A project that the visitor may see."""
    user = signed_in(request)
    rows = Project.objects.all() if user.is_staff else Project.objects.filter(memberships__user=user)
    return get_object_or_404(rows, name=name)


def _admin(request: HttpRequest) -> User:
    """Who is signed in, if that is an admin; nobody else sees that there is such a page."""
    user = signed_in(request)
    if not user.is_staff:
        raise Http404
    return user


def _try(request: HttpRequest, act: Callable[[], Any]) -> bool:
    """Do it; the next page shows a refusal."""
    try:
        act()
    except CarmeError as error:
        messages.error(request, explained(error))
        return False
    return True


def _add_error(form: Any, error: CarmeError) -> None:
    """Say an error beside the field that it is about."""
    form.add_error(error.field if error.field in form.fields else None, explained(error))
