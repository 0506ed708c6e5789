"""Amounts on pages, in the units in which people read them."""

from django import template

from carme_webui.clocks import minutes_words
from carme_webui.sizes import memory_words, size_words

__all__ = ["duration", "memory", "register", "size"]

register = template.Library()


@register.filter
def memory(mib: int) -> str:
    """An amount of memory in MiB, as `64 GiB`."""
    return memory_words(mib)


@register.filter
def size(count: int) -> str:
    """A number of bytes, as `976.6 MiB`."""
    return size_words(count)


@register.filter
def duration(minutes: int) -> str:
    """A time in minutes, as `1 hour 30 minutes`, in the language that is active."""
    return minutes_words(minutes)
