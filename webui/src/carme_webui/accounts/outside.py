"""Signing in at an outside provider (OpenID Connect), with Authlib's client.

The flow is https://openid.net/specs/openid-connect-core-1_0.html#CodeFlowAuth with PKCE (RFC 7636): Authlib
checks state, nonce, and the ID token's signature, issuer, audience and times. A second factor of the account
is requested afterwards, as with a password.
"""

import logging
import pwd
from typing import Any

import requests
from allauth.account.internal.flows.login import perform_login, record_authentication
from allauth.account.models import Login
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.django_client import OAuth
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET
from joserfc.errors import JoseError

from carme.accounts import is_account_name
from carme.errors import CarmeError, Denied
from carme_webui.accounts.directory import enrol_soon, unix_name
from carme_webui.accounts.models import User

__all__ = ["account_of", "begin", "end"]

logger = logging.getLogger(__name__)

SECONDS = 10  # until a provider that does not answer is given up
_NEXT = "outside-next"


def _provider() -> Any:
    """The client, made anew for each sign-in: the provider's keys and addresses may have changed."""
    site = settings.SITE.oidc
    return OAuth().register(
        "outside",
        overwrite=True,
        client_id=site.client_id,
        client_secret=settings.SITE.secret("oidc-provider-secret"),
        server_metadata_url=f"{site.issuer.rstrip('/')}/.well-known/openid-configuration",
        client_kwargs={
            "scope": site.scope,
            "code_challenge_method": "S256",
            "default_timeout": SECONDS,
        },
    )


@never_cache
@require_GET
@login_not_required
def begin(request: HttpRequest) -> HttpResponse:
    """Lead the browser to the provider."""
    if not settings.SITE.oidc.issuer:
        return redirect("account_login")
    wanted = request.GET.get("next", "")
    safe = url_has_allowed_host_and_scheme(wanted, {request.get_host()}, require_https=request.is_secure())
    request.session[_NEXT] = wanted if safe else ""
    try:
        back = f"{settings.SITE.site.url}{reverse('outside-end')}"
        return _provider().authorize_redirect(request, back)
    except (AuthlibBaseError, requests.RequestException, CarmeError, RuntimeError, ValueError) as error:
        return _refused(request, _away(), error)


@never_cache
@require_GET
@login_not_required
def end(request: HttpRequest) -> HttpResponse:
    """The browser comes back: see who it is, and sign in."""
    site = settings.SITE.oidc
    if not site.issuer:
        return redirect("account_login")
    claims_options = {
        "iss": {"essential": True, "value": site.issuer},
        "aud": {"essential": True, "value": site.client_id},
        "sub": {"essential": True},
    }
    try:
        token = _provider().authorize_access_token(request, claims_options=claims_options)
        user = account_of(token.get("userinfo") or {})
    except Denied as error:
        return _refused(request, str(error), error)
    except requests.RequestException as error:
        return _refused(request, _away(), error)
    except (AuthlibBaseError, JoseError, CarmeError, RuntimeError, ValueError, KeyError, TypeError) as error:
        message = _(
            "The provider's answer was not accepted. Try once more; if that fails, tell an administrator."
        )
        return _refused(request, message, error)
    record_authentication(request, user, method="outside")
    return perform_login(request, Login(user=user, redirect_url=request.session.pop(_NEXT, "") or None))


def account_of(claims: Any) -> User:
    """The account of the portal, which has the name of a Unix account.

    Args:
        claims: Those of the checked ID token.

    Raises:
        Denied: There is none, or it signs in otherwise.
    """
    name = claims.get(settings.SITE.oidc.claim)
    remedy = _("Ask an administrator of this site.")
    if not isinstance(name, str) or not is_account_name(name):
        raise Denied(_("The provider did not say which account of this site is yours."), remedy)
    name = unix_name(name)
    user = User.objects.filter(username=name).first()
    if user is not None and not user.is_active:
        raise Denied(_("This account is closed."), remedy)
    if user is not None and user.has_usable_password():
        # Anyone who has the name at the provider need not be the person who has it here.
        raise Denied(_("The account %s signs in with its password.") % name, remedy)
    if user is None:
        try:
            known = pwd.getpwnam(name).pw_uid >= settings.SITE.broker.minimum_uid
        except KeyError:
            known = False
        if not known:
            raise Denied(_("There is no account %s on this site.") % name, remedy)
        user = User(username=name)
        user.set_unusable_password()
        user.save()
    enrol_soon(user)
    return user


def _away() -> str:
    return _("The provider does not answer, so nobody can sign in there. Try again in a moment.")


def _refused(request: HttpRequest, text: str, error: Exception) -> HttpResponse:
    logger.warning("Nobody is signed in by the outside provider: %s: %s", type(error).__name__, error)
    messages.error(request, text)
    return redirect("account_login")
