"""Errors and explanations on pages, with a link to the section of the help that says more."""

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from carme.errors import CarmeError
from carme.help import help_path

__all__ = ["explained", "help_link"]


def help_link(text: str) -> SafeString:
    """A link, after a space, to what `carme.help` names for a message; empty where that names nothing."""
    return _link(help_path(text))


def explained(error: CarmeError) -> SafeString:
    """An error for a page: its sentences in the reader's language, and the link."""
    return format_html("{}{}", str(error), _link(error.help))


def _link(path: str) -> SafeString:
    return format_html(' <a href="{}">{}</a>', path, _("More in the help")) if path else SafeString()
