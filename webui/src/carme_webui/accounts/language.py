"""The language of a user's own choice, before that of the browser."""

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils import translation

from carme_webui.accounts.models import User

__all__ = ["language_of", "use_chosen_language"]


def language_of(user: User) -> str:
    """The language in which this user gets notices while no browser asks."""
    return user.language or settings.LANGUAGE_CODE


def use_chosen_language(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware, after Django's own: who has chosen a language gets that one."""

    def middleware(request: HttpRequest) -> HttpResponse:
        user = request.user
        if isinstance(user, User) and user.language and user.language != translation.get_language():
            with translation.override(user.language):
                response = get_response(request)
                response["Content-Language"] = user.language
                return response
        return get_response(request)

    return middleware
