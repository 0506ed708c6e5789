"""The page of one's own account."""

from allauth.mfa.utils import is_mfa_enabled
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from carme_webui.accounts.login import signed_in

__all__ = ["profile"]


@require_safe
def profile(request: HttpRequest) -> HttpResponse:
    """My account, and where to change what can be changed."""
    user = signed_in(request)
    return render(request, "profile/profile.html", {"second_factor": is_mfa_enabled(user)})
