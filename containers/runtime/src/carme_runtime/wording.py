"""Sentences of notebooks' magics in the session's language, by the catalogue of `carme` where it is there."""

import os

__all__ = ["translate"]


def translate(template: str, /, **values: object) -> str:
    """A sentence in the language that `CARME_LANGUAGE` names; English where it is not known.

    `carme/catalogue.py` collects the templates, so each is written out where this is called.

    Args:
        template: The English sentence, as `str.format` reads it.
        values: What fills its places.
    """
    language = os.environ.get("CARME_LANGUAGE", "")
    if language:
        try:
            from carme.translation import (  # pyright: ignore[reportMissingImports]
                message,
                translated,
            )
        except ImportError:
            pass  # the runtime works without it
        else:
            return translated(message(template, **values), language)
    return template.format(**values)
