"""Amounts on pages, in the units in which people read them."""

from django import template

from carme import wording
from carme_webui.clocks import minutes_words

__all__ = ["duration", "memory", "register"]

register = template.Library()


@register.filter
def memory(mib: int) -> str:
    """An amount of memory in MiB, as `64 GiB`."""
    return wording.memory(mib)


@register.filter
def duration(minutes: int) -> str:
    """A time in minutes, as `1 hour 30 minutes`, in the language that is active."""
    return minutes_words(minutes)
