"""The pages of news and maintenance, for all to read and for administrators to write."""

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme.errors import CarmeError
from carme_webui.accounts.login import signed_in
from carme_webui.administration.views import for_admins
from carme_webui.announcements import services
from carme_webui.announcements.forms import MaintenanceForm, NewsForm
from carme_webui.announcements.models import Maintenance, News
from carme_webui.clocks import site_zone
from carme_webui.cluster import broker
from carme_webui.help_links import explained
from carme_webui.pages import report_freed

__all__ = ["cancel", "delete_news", "edit_maintenance", "edit_news", "maintenance", "news"]

PER_PAGE = 20


@require_safe
def news(request: HttpRequest) -> HttpResponse:
    """All news, the latest first."""
    page = Paginator(News.objects.select_related("by"), PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "announcements/news.html", {"page": page})


@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def edit_news(request: HttpRequest, number: int | None = None) -> HttpResponse:
    """Write an announcement, or change one."""
    row = get_object_or_404(News, pk=number) if number else News(by=signed_in(request))
    form = NewsForm(request.POST if request.method == "POST" else None, instance=row)
    if form.is_valid():
        services.publish(form.save(commit=False))
        return redirect("announcements")
    context = {"form": form, "row": row}
    return render(request, "announcements/edit_news.html", context, status=422 if form.errors else 200)


@require_POST
@for_admins
def delete_news(request: HttpRequest, number: int) -> HttpResponse:
    """Take news away."""
    services.delete(get_object_or_404(News, pk=number))
    return redirect("announcements")


@require_safe
def maintenance(request: HttpRequest) -> HttpResponse:
    """What is planned; administrators see whom it concerns."""
    rows = list(Maintenance.planned(timezone.now()))
    shown = [(row, services.bookings_within(row) if signed_in(request).is_staff else []) for row in rows]
    context = {"planned": shown, "zone": site_zone()}
    return render(request, "announcements/maintenance.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@for_admins
def edit_maintenance(request: HttpRequest, number: int | None = None) -> HttpResponse:
    """Plan a maintenance, or change it."""
    planned = Maintenance.planned(timezone.now())
    row = get_object_or_404(planned, pk=number) if number else Maintenance()
    before = Maintenance.objects.get(pk=row.pk) if row.pk else None
    form = MaintenanceForm(request.POST if request.method == "POST" else None, instance=row)
    if form.is_valid():
        try:
            services.plan(row, signed_in(request), form.node_names, broker(), before)
        except CarmeError as error:
            field = {"node_names": "nodes", "end": "end_time"}.get(error.field or "", error.field)
            form.add_error(field if field in form.fields else None, explained(error))
        else:
            messages.success(request, _("Planned: %s. Affected users get a notification.") % row.span)
            return redirect("maintenance")
    context = {"form": form, "row": row, "zone": site_zone()}
    return render(request, "announcements/edit_maintenance.html", context, status=422 if form.errors else 200)


@require_POST
@for_admins
def cancel(request: HttpRequest, number: int) -> HttpResponse:
    """Cancel maintenance, or end it now."""
    row = get_object_or_404(Maintenance.planned(timezone.now()), pk=number)
    freed = services.cancel(row, signed_in(request), broker())
    report_freed(request, freed, _("Cancelled."), _("Its nodes take jobs again."))
    return redirect("maintenance")
