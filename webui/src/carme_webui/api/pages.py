"""The page on which a user makes and revokes API tokens."""

import logging
from datetime import timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.api.models import FOR_ADMINS, LONGEST, SCOPES, Token
from carme_webui.titles import TitleField

__all__ = ["revoke", "tokens"]

logger = logging.getLogger(__name__)

AT_MOST = 50  # tokens of one user


class TokenForm(forms.Form):
    """What a new token is for."""

    label = TitleField(label=_("Purpose"), max_length=80)
    days = forms.IntegerField(
        label=_("Days until it expires"), min_value=1, max_value=LONGEST.days, initial=90
    )
    scopes = forms.MultipleChoiceField(
        label=_("Besides reading, it may"),
        widget=forms.CheckboxSelectMultiple,
        required=False,
    )

    def __init__(self, data: Any = None, *, user: User) -> None:
        super().__init__(data, label_suffix="")
        scopes = self.fields["scopes"]
        assert isinstance(scopes, forms.MultipleChoiceField)
        scopes.choices = [(key, words) for key, words in SCOPES.items() if user.is_staff or key != FOR_ADMINS]
        self.fields["days"].help_text = _("At most %s.") % LONGEST.days
        self.fields["label"].widget.attrs["autocomplete"] = "off"


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def tokens(request: HttpRequest) -> HttpResponse:
    """My tokens, and a new one: its secret is in this answer and nowhere else."""
    user = signed_in(request)
    form, secret = TokenForm(user=user), ""
    if request.method == "POST":
        form = TokenForm(request.POST, user=user)
        if form.is_valid() and Token.objects.filter(owner=user).count() >= AT_MOST:
            form.add_error(None, gettext("You have %s tokens already. Revoke one first.") % AT_MOST)
        if form.is_valid():
            expires = timezone.now() + timedelta(days=form.cleaned_data["days"])
            chosen = form.cleaned_data
            token, secret = Token.make(user, chosen["label"], chosen["scopes"], expires)
            logger.info("%s made the token %s... with the scopes %s", user, token.start, token.scopes)
            form = TokenForm(user=user)
    context = {
        "form": form,
        "secret": secret,
        "tokens": Token.objects.filter(owner=user),
        "address": f"{settings.SITE.site.url}/api/v1/",
    }
    return render(request, "api/tokens.html", context, status=422 if form.is_bound else 200)


@require_POST
def revoke(request: HttpRequest, number: int) -> HttpResponse:
    """Make one of my tokens useless at once."""
    user = signed_in(request)
    for token in Token.objects.filter(owner=user, pk=min(number, 2**63 - 1)):
        token.delete()
        logger.info("%s revoked the token %s...", user, token.start)
        messages.success(request, gettext("The token “%s” is revoked.") % token.label)
    return redirect("tokens")
