"""The page of one's own account."""

from allauth.decorators import rate_limit
from allauth.mfa.utils import is_mfa_enabled
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.forms import PasswordChangeForm
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import translation
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from carme_webui.accounts.login import sign_out_of_hub, signed_in
from carme_webui.profile.forms import AppearanceForm
from carme_webui.profile.kinds import Kind, choices_of, choose
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import read_all

__all__ = ["HINTS", "appearance", "dismiss", "mark_read", "notify", "password", "profile"]

SHOWN = 20  # notices on one page
#: Hints for newcomers; each is shown until they dismiss it.
HINTS = frozenset({"welcome"})


@require_safe
def profile(request: HttpRequest) -> HttpResponse:
    """My account, and where to change what can be changed."""
    user = signed_in(request)
    context = {
        "second_factor": is_mfa_enabled(user),
        "page": Paginator(Notice.objects.filter(user=user, on_page=True), SHOWN).get_page(
            request.GET.get("page")
        ),
        "appearance": AppearanceForm(instance=user),
        "kinds": choices_of(user),
        "mails": bool(settings.SITE.mail.server),
    }
    return render(request, "profile/profile.html", context)


@require_POST
def mark_read(request: HttpRequest) -> HttpResponse:
    """I have read all notices."""
    read_all(signed_in(request))
    return redirect("profile")


@require_POST
def dismiss(request: HttpRequest, name: str) -> HttpResponse:
    """Do not show me a hint any more."""
    user = signed_in(request)
    if name not in HINTS:
        raise Http404
    if name not in user.dismissed:
        user.dismissed = [*user.dismissed, name]
        user.save(update_fields=["dismissed"])
    return redirect("dashboard")


@require_POST
def appearance(request: HttpRequest) -> HttpResponse:
    """Choose the language, appearance and time zone of my pages."""
    user = signed_in(request)
    form = AppearanceForm(request.POST, instance=user)
    if form.is_valid():
        user.save(update_fields=["language", "theme", "time_zone"])
        with translation.override(user.language or translation.get_language()):
            messages.success(request, _("Saved."))
    else:
        messages.error(request, _("There is no such choice. Choose from the lists."))
    return redirect("profile")


@sensitive_post_parameters()
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@rate_limit(action="change_password")
def password(request: HttpRequest) -> HttpResponse:
    """Change a password that the portal itself keeps; other logins with the old one end."""
    user = signed_in(request)
    if not user.has_usable_password():
        raise Http404  # the directory's, or the outside provider's
    form = PasswordChangeForm(user, request.POST if request.method == "POST" else None, label_suffix="")
    if not form.is_valid():
        return render(request, "profile/password.html", {"form": form}, status=422 if form.is_bound else 200)
    form.save()
    update_session_auth_hash(request, user)
    sign_out_of_hub(user.username)
    messages.success(request, _("Your password is changed. All other sign-ins with the old one have ended."))
    return redirect("profile")


@require_POST
def notify(request: HttpRequest) -> HttpResponse:
    """Choose which notices I want, and how."""
    user = signed_in(request)
    pages, mails = request.POST.getlist("page"), request.POST.getlist("mail")
    choose(user, {kind: (kind in pages, kind in mails) for kind in Kind})
    messages.success(request, _("Saved."))
    return redirect("profile")
