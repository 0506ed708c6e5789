"""Signing in: local accounts by user name, no sign-up."""

import logging
import time
from typing import Any
from urllib.parse import urlsplit

from allauth.account import views
from allauth.account.adapter import DefaultAccountAdapter
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.middleware import LoginRequiredMiddleware
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from carme_webui.accounts import tasks
from carme_webui.accounts.models import User
from carme_webui.celery import run_soon
from carme_webui.sessions.hub import Hub, HubError

__all__ = ["AccountAdapter", "LoginRequired", "sign_out", "sign_out_of_hub", "signed_in"]

logger = logging.getLogger(__name__)

#: Seconds that a page waits for the hub.
PATIENCE = 3.0


def signed_in(request: HttpRequest) -> User:
    """Who is signed in, in a view that needs a login."""
    assert isinstance(request.user, User)
    return request.user


def sign_out(request: HttpRequest) -> HttpResponse:
    """Sign out of the portal, and of JupyterHub and its servers, whose cookies are of the same origin.

    The browser drops them itself (Clear-Site-Data, https://www.w3.org/TR/clear-site-data/), so that signing
    out works while the hub is away; the hub is notified, so that they count nothing elsewhere either.
    """
    user = request.user.get_username() if request.user.is_authenticated else ""
    response = views.logout(request)
    if request.method == "POST" and not request.user.is_authenticated:
        response["Clear-Site-Data"] = '"cookies"'
        if user:
            sign_out_of_hub(user)
    return response


def sign_out_of_hub(user: str) -> None:
    """Notify the hub that what it knows of this user's logins counts no more.

    The page waits for the hub, as a session that is not ended must not depend on other services; a hub that
    does not answer is notified by the worker when it does.
    """
    # Anyone who signs in again while the hub is being notified is not meant.
    before = time.time()
    try:
        Hub(settings.SITE).sign_out(user, before=before, seconds=PATIENCE)
    except HubError as error:
        logger.warning("The hub was not notified that %s signed out; it is tried again: %s", user, error)
        run_soon(tasks.sign_out_of_hub, user, before)


class AccountAdapter(DefaultAccountAdapter):
    """Accounts are made by administrators (`carme-portal add-user`)."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def add_message(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing: the page after signing in or out shows that it worked."""


class LoginRequired(LoginRequiredMiddleware):
    """Every page needs a login unless its view says otherwise.

    The live part of an open page cannot show a login form: it has the browser load the page again,
    and that leads to the form.

    A form that comes after its login has expired is not carried out. The login says so and leads back to
    the page with the form: many addresses that take forms show nothing by themselves.
    """

    def handle_no_permission(self, request: HttpRequest, view_func: Any) -> Any:
        if request.headers.get("HX-Request") == "true":
            return HttpResponse(status=401, headers={"HX-Refresh": "true"})
        if request.method in ("GET", "HEAD"):
            return super().handle_no_permission(request, view_func)
        messages.warning(
            request, _("Your login has expired, so this was not done. Sign in, then send the form again.")
        )
        login, field = self.get_login_url(view_func), self.get_redirect_field_name(view_func)
        return redirect_to_login(_page_of_form(request), login, field)


def _page_of_form(request: HttpRequest) -> str:
    """The address within the portal of the page that a form was sent from; the dashboard's if unknown."""
    page = urlsplit(request.headers.get("Referer", ""))
    if page.netloc != request.get_host() or not page.path.startswith("/"):
        return "/"
    return f"{page.path}?{page.query}" if page.query else page.path
