"""Prometheus' API for people: Grafana and scripts ask here, each for the series that its user may see.

`/metrics/mine/` is everybody's, `/metrics/account/NAME/` that of the managers of the project whose account it
is, and of its coordinators in Slurm, `/metrics/all/` that of administrators. Only
questions that can be held to a scope are passed on.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.core.cache import cache
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from carme.errors import CarmeError, Denied, InvalidRequest
from carme.projects import account_of
from carme.reports.prometheus import Prometheus
from carme_webui.accounts.login import signed_in
from carme_webui.accounts.models import User
from carme_webui.cluster import broker
from carme_webui.metrics.scope import Scope
from carme_webui.metrics.sparks import has_metrics, sparks
from carme_webui.projects.models import Membership

__all__ = ["my_sparks", "of_account", "of_all", "of_mine"]

#: Seconds for which it is remembered which accounts somebody leads.
REMEMBERED = 60
MOST_SELECTORS = 20
_TIMES = ("start", "end", "time", "step", "timeout", "limit", "lookback_delta")


@require_safe
def my_sparks(request: HttpRequest) -> JsonResponse:
    """What the dashboard's small charts show: my jobs by number, or why they cannot be seen."""
    answer: dict[str, Any] = {"jobs": {}, "failure": ""}
    if has_metrics():
        try:
            answer["jobs"] = sparks(signed_in(request))
        except CarmeError as error:
            answer["failure"] = str(error)
    return JsonResponse(answer)


@require_safe
def of_mine(request: HttpRequest, question: str) -> HttpResponse:
    """About one's own jobs."""
    return _answer(request, question, Scope.of_user(signed_in(request).username))


@require_safe
def of_account(request: HttpRequest, account: str, question: str) -> HttpResponse:
    """About the jobs of an account that one leads."""
    user = signed_in(request)
    try:
        allowed = user.is_superuser or _manages(user, account) or account in _coordinated_by(user)
    except CarmeError as error:
        return _failed(error, HTTPStatus.BAD_GATEWAY)
    return _answer(request, question, Scope.of_account(account) if allowed else None)


@require_safe
def of_all(request: HttpRequest, question: str) -> HttpResponse:
    """About everything."""
    return _answer(request, question, Scope() if signed_in(request).is_superuser else None)


def _manages(user: User, account: str) -> bool:
    """Whether it is the account of a project that this user manages."""
    rows = Membership.objects.filter(user=user, manager=True, project__closed=None)
    return account in {account_of(name) for name in rows.values_list("project__name", flat=True)}


def _coordinated_by(user: User) -> list[str]:
    key = f"coordinated-accounts-{user.pk}"
    known = cache.get(key)
    if known is None:
        known = broker().coordinated_accounts(user=user.username)
        cache.set(key, known, REMEMBERED)
    return known


def _answer(request: HttpRequest, question: str, scope: Scope | None) -> HttpResponse:
    site = settings.SITE.monitoring
    if not site.prometheus:
        raise Http404
    try:
        if scope is None:
            raise Denied(
                _("You may not see these series."),
                _("The series of your own jobs are at /metrics/mine/."),
            )
        if question == "status/buildinfo":  # Grafana asks for it before anything else
            return JsonResponse({"status": "success", "data": {"version": "2.53.0"}})
        held = _restricted(question)
        parameters = [(name, request.GET[name]) for name in _TIMES if name in request.GET]
        parameters += held(request, scope)
        answer = Prometheus(site.prometheus, site.portal_certificates).ask(f"/api/v1/{question}", parameters)
    except Denied as error:
        return _failed(error, HTTPStatus.FORBIDDEN)
    except InvalidRequest as error:
        return _failed(error, HTTPStatus.BAD_REQUEST)
    except CarmeError as error:
        return _failed(error, HTTPStatus.BAD_GATEWAY)
    return JsonResponse(answer)


def _restricted(question: str) -> Callable[[HttpRequest, Scope], list[tuple[str, str]]]:
    """How a question is held to a scope."""
    name, _slash, rest = question.partition("/")
    if question in ("query", "query_range"):
        return _query
    label, _slash, values = rest.partition("/")
    of_label = name == "label" and values == "values" and label.isascii() and label.isidentifier()
    if question in ("series", "labels") or of_label:
        return _selectors
    raise InvalidRequest(
        _("This query does not exist."),
        _("Use query, query_range, series, labels or label/NAME/values."),
    )


def _query(request: HttpRequest, scope: Scope) -> list[tuple[str, str]]:
    return [("query", scope.query(request.GET.get("query", "")))]


def _selectors(request: HttpRequest, scope: Scope) -> list[tuple[str, str]]:
    given = request.GET.getlist("match[]") or [""]
    return [("match[]", scope.selector(each)) for each in given[:MOST_SELECTORS]]


def _failed(error: CarmeError, status: HTTPStatus) -> HttpResponse:
    """As Prometheus says it, so that its clients show the sentence."""
    reported: dict[str, Any] = {"status": "error", "errorType": error.code, "error": str(error)}
    return JsonResponse(reported, status=status)
