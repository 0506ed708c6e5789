"""The pages of images."""

from contextlib import suppress
from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from carme.errors import CarmeError
from carme_webui.accounts.login import signed_in
from carme_webui.cluster import broker, entry_points, images
from carme_webui.help_links import explained
from carme_webui.images import services
from carme_webui.images.forms import BuildForm, ShareForm
from carme_webui.images.models import ImageState, OwnImage
from carme_webui.jobs.log import tail
from carme_webui.jobs.models import Job
from carme_webui.notifier import notifier
from carme_webui.projects.models import Project

__all__ = ["build", "delete", "image", "image_list", "image_live", "share", "site_image"]


@require_safe
def image_list(request: HttpRequest) -> HttpResponse:
    """The site's images, mine, and those that my projects share."""
    user = signed_in(request)
    version = notifier.version(user.username)
    own = list(OwnImage.visible(user))
    site = []
    for name in images().names():
        with suppress(CarmeError):  # one that cannot be read cannot be used
            found = images().get(name)
            site.append((found, entry_points(found)))
    context = {
        "site": site,
        "own_images": [row for row in own if row.owner == user],
        "shared": [row for row in own if row.owner != user],
        "version": version,
    }
    return render(request, "images/list.html", context)


@require_safe
def site_image(request: HttpRequest, image: str) -> HttpResponse:
    """One of the site's images: what it opens and which packages it has."""
    try:
        found = images().get(image)
    except CarmeError:
        raise Http404 from None
    return render(request, "images/site.html", {"image": found, "apps": entry_points(found)})


@require_http_methods(["GET", "HEAD", "POST"])
def build(request: HttpRequest) -> HttpResponse:
    """The form, and the job that comes of it."""
    user = signed_in(request)
    projects = list(Project.of(user))
    if request.method != "POST":
        initial: dict[str, Any] = {}
        with suppress(Http404):
            earlier = _visible(request, request.GET.get("from", ""))
            if earlier.owner == user:
                initial = {name: getattr(earlier, name) for name in ("title", "kind", "base", "text")}
        form = BuildForm(catalogue=images(), projects=projects, initial=initial)
        return render(request, "images/build.html", {"form": form})
    form = BuildForm(request.POST, catalogue=images(), projects=projects)
    if form.is_valid():
        try:
            image = services.build(user, form.proposed, images(), broker())
        except CarmeError as error:
            form.add_error(error.field if error.field in form.fields else None, explained(error))
        else:
            messages.success(request, _("Job %s builds the image.") % image.job_id)
            return redirect(image)
    return render(request, "images/build.html", {"form": form}, status=422)


@require_safe
def image(request: HttpRequest, reference: str) -> HttpResponse:
    """One of the images that I may see; of my own also how its build goes."""
    return render(request, "images/image.html", _context(request, reference))


@require_safe
def image_live(request: HttpRequest, reference: str) -> HttpResponse:
    """The part of that page that changes."""
    return render(request, "images/image_live.html", _context(request, reference, log=False))


@require_http_methods(["GET", "HEAD", "POST"])
def delete(request: HttpRequest, reference: str) -> HttpResponse:
    """Ask whether to delete an image of mine, and delete it."""
    found = _visible(request, reference)
    if found.owner != signed_in(request):
        raise Http404
    if request.method != "POST":
        return render(request, "images/delete.html", {"image": found})
    try:
        services.delete(found, broker())
    except CarmeError as error:
        messages.error(request, explained(error))
        return redirect(found)
    messages.success(request, _("The image %s is deleted.") % found.name)
    return redirect("images")


@require_http_methods(["GET", "HEAD", "POST"])
def share(request: HttpRequest, reference: str) -> HttpResponse:
    """Let a project's members use an image of mine, or nobody else any more."""
    user = signed_in(request)
    found = _visible(request, reference)
    if found.owner != user:
        raise Http404
    shared = {"project": found.project.name if found.project else ""}
    data = request.POST if request.method == "POST" else None
    form = ShareForm(data, projects=list(Project.of(user)), initial=shared)
    if form.is_valid():
        try:
            services.share(found, form.proposed, broker())
        except CarmeError as error:
            form.add_error(error.field if error.field in form.fields else None, explained(error))
        else:
            if found.project:
                messages.success(request, _("The members of %s can use it now.") % found.project.title)
            else:
                messages.success(request, _("Nobody but you can use it now."))
            return redirect(found)
    context = {"form": form, "image": found}
    return render(request, "images/share.html", context, status=422 if form.errors else 200)


def _context(request: HttpRequest, reference: str, log: bool = True) -> dict[str, Any]:
    user = signed_in(request)
    version = notifier.version(user.username)  # first: what comes meanwhile is an update
    found = _visible(request, reference)
    context: dict[str, Any] = {"image": found, "own": found.owner == user, "version": version}
    if not context["own"]:
        return context
    try:
        services.settle(found, broker())
        if log and found.job_id is not None:
            # The mirror may not know yet of a job that was submitted a moment ago.
            if not (job := Job.objects.filter(id=found.job_id, user=user.username).first()):
                Job.store([broker().job(found.job_id, user=user.username)])
                job = Job.objects.get(id=found.job_id)
            context |= {"job": job, "log": tail(job, broker())}
    except CarmeError as error:
        context["banner"] = explained(error)
    context["building"] = found.state == ImageState.BUILDING
    return context


def _visible(request: HttpRequest, reference: str) -> OwnImage:
    found = OwnImage.named(signed_in(request), reference)
    if found is None:
        raise Http404
    return found
