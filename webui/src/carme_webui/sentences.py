"""A column for Carme's own sentences, which each reader gets in their language."""

import json
from typing import Any

from django.db import models

from carme.translation import Message

__all__ = ["SentenceField"]

_KEY = "message"
_BEGIN = f'{{"{_KEY}": '


class SentenceField(models.TextField):  # pyright: ignore[reportMissingTypeArgument]
    """Text that stays a `Message` where it is one: the database has its template and values as JSON.

    Other text, such as what the portal's own catalogue has rendered, is stored as it is. Pages show the value
    by the filter `translated`.
    """

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if not isinstance(value, Message):
            return value
        return json.dumps({_KEY: value.parts()}, ensure_ascii=False, sort_keys=True)

    def from_db_value(self, value: str | None, *_unused: object) -> str | None:
        """The text, or the message, of a row; the English text of what cannot be read as a message."""
        if value is None or not value.startswith(_BEGIN):
            return value
        try:
            parts = json.loads(value)[_KEY]
        except (ValueError, KeyError):
            return value  # text that only begins like it
        if (found := Message.of_parts(parts)) is not None:
            return found
        text = parts.get("text") if isinstance(parts, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return text if isinstance(text, str) else value

    def deconstruct(self) -> tuple[str, str, list[Any], dict[str, Any]]:
        """For migrations it is a text: the column is the same."""
        name, _path, arguments, options = super().deconstruct()
        return name, "django.db.models.TextField", list(arguments), dict(options)
