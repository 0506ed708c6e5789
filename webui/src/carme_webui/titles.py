"""Titles that users give to their things."""

from django.utils.translation import gettext as _

from carme.errors import InvalidRequest

__all__ = ["tidy"]


def tidy(title: str) -> str:
    """The title in one line with single spaces. Raises InvalidRequest when it has anything invisible."""
    title = " ".join(title.split())
    if not title.isprintable():
        raise InvalidRequest(
            _("The title has a character that cannot be seen."),
            _("Use letters, digits, signs and spaces."),
            field="title",
        )
    return title
