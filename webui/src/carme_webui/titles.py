"""Titles that users give to their things."""

from django import forms
from django.utils.translation import gettext as _

from carme.errors import InvalidRequest

__all__ = ["TitleField", "tidy"]


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


class TitleField(forms.CharField):
    """A title in a form: its value is in one line with single spaces, and has nothing invisible."""

    def clean(self, value: str) -> str:
        title = super().clean(value)
        try:
            return tidy(title)
        except InvalidRequest as error:
            raise forms.ValidationError(str(error)) from None
