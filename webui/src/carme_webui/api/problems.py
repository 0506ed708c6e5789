"""What the API says when it refuses: problem details (RFC 9457) with the sentences of the pages."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.translation import gettext as _

from carme.api import Problem
from carme.errors import BrokerUnavailable, CarmeError, Denied, InvalidRequest, NotFound, SlurmError
from carme.files.client import FileError
from carme_webui.files.services import status_of

__all__ = ["CONTENT_TYPE", "PATH", "as_problems", "of_error", "problem"]

PATH = "/api/"
CONTENT_TYPE = "application/problem+json"


def problem(
    status: HTTPStatus,
    detail: str,
    code: str = "",
    field: str | None = None,
    help: str | None = None,
    **headers: str,
) -> HttpResponse:
    """An answer that says what was wrong and what to do."""
    text = Problem(
        title=status.phrase,
        status=status,
        detail=detail,
        code=code or _code(status),
        field=field,
        help=help,
    )
    answer = JsonResponse(text.model_dump(), status=status, content_type=CONTENT_TYPE)
    for name, value in headers.items():
        answer[name.replace("_", "-")] = value
    return answer


def _code(status: HTTPStatus) -> str:
    return status.name.lower().replace("_", "-")


_STATUS = {
    InvalidRequest: HTTPStatus.UNPROCESSABLE_ENTITY,
    Denied: HTTPStatus.FORBIDDEN,
    NotFound: HTTPStatus.NOT_FOUND,
    BrokerUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}


def of_error(error: CarmeError) -> HttpResponse:
    """The same sentence that a page shows."""
    if isinstance(error, FileError):
        return problem(status_of(error), str(error), error.code, error.field, error.help or None)
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), None)
    if status is None:
        # Slurm refuses the request, or is away; other failures are not the client's fault.
        away = not isinstance(error, SlurmError) or error.code == "slurm-away"
        status = HTTPStatus.SERVICE_UNAVAILABLE if away else HTTPStatus.CONFLICT
    return problem(status, str(error), error.code, error.field, error.help or None)


def as_problems(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware by which whatever refuses below /api/, Django included, answers with a problem."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        if not request.path.startswith(PATH):
            return response
        response["Cache-Control"] = "no-store"
        if response.status_code < HTTPStatus.BAD_REQUEST or response["Content-Type"] == CONTENT_TYPE:
            return response
        status = HTTPStatus(response.status_code)
        names = [name for name in ("Allow", "Content-Range") if response.has_header(name)]
        saved: dict[str, Any] = {name: response[name] for name in names}
        return problem(status, _sentences().get(status, status.description or status.phrase), **saved)

    return middleware


def _sentences() -> dict[HTTPStatus, str]:
    return {
        HTTPStatus.BAD_REQUEST: _("The request could not be understood. Send what the API's document says."),
        HTTPStatus.NOT_FOUND: _("This does not exist, or it is not yours. Check the address."),
        HTTPStatus.METHOD_NOT_ALLOWED: _(
            "This address does not take this method. See the header 'Allow' for those that it takes."
        ),
        HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: _(
            "The file has no such part. 'Content-Range' says how long it is."
        ),
        HTTPStatus.INTERNAL_SERVER_ERROR: _(
            "The portal failed to answer. Try again. If it fails again, tell an "
            "administrator when it happened."
        ),
    }
