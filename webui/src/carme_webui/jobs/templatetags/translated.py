"""Sentences of Carme's other parts, in the page's language."""

import re

from django import template
from django.utils.html import conditional_escape
from django.utils.safestring import mark_safe

from carme import translation
from carme_webui import help_links
from carme_webui.jobs.templatetags.times import moment

__all__ = ["help_link", "register", "translated"]

register = template.Library()


@register.filter
def help_link(sentence: str | None) -> str:
    """The link to the section of the help that says more of a sentence; empty where there is none."""
    return help_links.help_link(sentence or "")


@register.filter
def translated(sentence: str | None) -> str:
    """A sentence of the broker's, such as why a job waits; the language is the one that is active.

    Times in it are by the reader's clock, as all on the page.
    """
    text = translation.translated(sentence or "")
    found = {str(conditional_escape(words)): at for words, at in translation.moments(sentence or "").items()}
    if not found:
        return conditional_escape(text)
    written = "|".join(re.escape(words) for words in sorted(found, key=len, reverse=True))
    shown = re.sub(written, lambda match: str(moment(found[match[0]])), conditional_escape(text))
    return mark_safe(shown)
