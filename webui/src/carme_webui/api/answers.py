"""The answers of an address, as the API's document says them."""

from http import HTTPStatus
from typing import Any

from carme import api as wire

__all__ = ["ERRORS", "GONE", "REFUSED", "answers"]

#: What any address may say, and why.
ERRORS = {
    HTTPStatus.BAD_REQUEST: "the request is not JSON",
    HTTPStatus.UNAUTHORIZED: "no valid token",
    HTTPStatus.FORBIDDEN: "the token's scopes, or the site, do not allow it",
    HTTPStatus.UNPROCESSABLE_ENTITY: "something of the request is wrong, or cannot be had",
    HTTPStatus.TOO_MANY_REQUESTS: "too many requests; `Retry-After` says for how many seconds to wait",
    HTTPStatus.SERVICE_UNAVAILABLE: "the cluster does not answer",
}
GONE = (HTTPStatus.NOT_FOUND,)
REFUSED = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


def answers(answer: Any, *more: HTTPStatus, status: HTTPStatus = HTTPStatus.OK) -> dict[int, Any]:
    """The usual answer, and what may come instead of it; `more`: refusals besides the usual ones."""
    return {int(status): answer} | {int(code): wire.Problem for code in (*ERRORS, *more)}
