"""What Carme says outside of the portal, in the page's language."""

from django import template

from carme.translation import translated

__all__ = ["register", "said"]

register = template.Library()


@register.filter
def said(sentence: str | None) -> str:
    """A sentence of the broker's, such as why a job waits; the language is the one that is active."""
    return translated(sentence or "")
