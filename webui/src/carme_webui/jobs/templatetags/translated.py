"""Sentences of Carme's other parts, in the page's language."""

from django import template

from carme import translation

__all__ = ["register", "translated"]

register = template.Library()


@register.filter
def translated(sentence: str | None) -> str:
    """A sentence of the broker's, such as why a job waits; the language is the one that is active."""
    return translation.translated(sentence or "")
