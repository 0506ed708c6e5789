"""The page of one's own account."""

from allauth.mfa.utils import is_mfa_enabled
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import translation
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from carme_webui.accounts.login import signed_in
from carme_webui.profile.forms import LookForm
from carme_webui.profile.kinds import Kind, choices_of, choose
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import read_all

__all__ = ["look", "notify", "profile", "read"]

SHOWN = 20


@require_safe
def profile(request: HttpRequest) -> HttpResponse:
    """My account, and where to change what can be changed."""
    user = signed_in(request)
    context = {
        "second_factor": is_mfa_enabled(user),
        "notices": Notice.objects.filter(user=user, on_page=True)[:SHOWN],
        "look": LookForm(instance=user),
        "kinds": choices_of(user),
        "mails": bool(settings.SITE.mail.server),
    }
    return render(request, "profile/profile.html", context)


@require_POST
def read(request: HttpRequest) -> HttpResponse:
    """I have read all that the portal told me."""
    read_all(signed_in(request))
    return redirect("profile")


@require_POST
def look(request: HttpRequest) -> HttpResponse:
    """Choose the language and the look of my pages."""
    user = signed_in(request)
    form = LookForm(request.POST, instance=user)
    if form.is_valid():
        user.save(update_fields=["language", "theme"])
        with translation.override(user.language or translation.get_language()):
            messages.success(request, _("Saved."))
    else:
        messages.error(request, _("There is no such choice. Choose from the lists."))
    return redirect("profile")


@require_POST
def notify(request: HttpRequest) -> HttpResponse:
    """Choose what I want to be told, and how."""
    user = signed_in(request)
    pages, mails = request.POST.getlist("page"), request.POST.getlist("mail")
    choose(user, {kind: (kind in pages, kind in mails) for kind in Kind})
    messages.success(request, _("Saved."))
    return redirect("profile")
