"""Amounts on pages, in the units in which people read them."""

from django import template

from carme import wording

__all__ = ["memory", "register"]

register = template.Library()


@register.filter
def memory(mib: int) -> str:
    """An amount of memory in MiB, as `64 GiB`."""
    return wording.memory(mib)
