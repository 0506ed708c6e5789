"""A button beside a term of Slurm's that says what it means."""

from django import template
from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from carme_webui.terms import TERMS

__all__ = ["register", "term"]

register = template.Library()


@register.simple_tag
def term(name: str) -> SafeString | str:
    """The button and its text; empty for what needs no explanation."""
    if name not in TERMS:
        return ""
    title, meaning = TERMS[name]
    return render_to_string("parts/term.html", {"name": name, "title": title, "meaning": meaning})
