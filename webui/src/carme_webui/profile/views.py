"""The page of one's own account."""

from allauth.mfa.utils import is_mfa_enabled
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from carme_webui.accounts.login import signed_in
from carme_webui.profile.models import Notice
from carme_webui.profile.notices import read_all

__all__ = ["profile", "read"]

SHOWN = 20


@require_safe
def profile(request: HttpRequest) -> HttpResponse:
    """My account, and where to change what can be changed."""
    user = signed_in(request)
    context = {
        "second_factor": is_mfa_enabled(user),
        "notices": Notice.objects.filter(user=user)[:SHOWN],
    }
    return render(request, "profile/profile.html", context)


@require_POST
def read(request: HttpRequest) -> HttpResponse:
    """I have read all that the portal told me."""
    read_all(signed_in(request))
    return redirect("profile")
