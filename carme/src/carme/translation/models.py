"""Messages in pydantic models, and what of them travels: English for every reader, templates for ours."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    SerializerFunctionWrapHandler,
    WrapValidator,
    computed_field,
    model_serializer,
    model_validator,
)

from carme.translation.messages import Message

__all__ = ["Sentence", "WithMessages"]


def _keep_message(value: Any, check: Callable[[Any], str]) -> str:
    checked = check(value)  # its length, for one
    return value if isinstance(value, Message) else checked


#: A field that keeps the template and the values of a message; any other text is right as well.
Sentence = Annotated[str, WrapValidator(_keep_message)]


class WithMessages(BaseModel):
    """A model whose fields of type `Sentence` keep their templates when it travels as JSON.

    The fields hold the English texts, as they do for a reader of an earlier version; `messages` has the parts
    of those that are messages, and is left out where there are none: a reader of an earlier version that
    refuses unknown fields reads the rest.
    """

    @computed_field(repr=False)
    @property
    def messages(self) -> dict[str, dict[str, Any]]:
        """The templates and values of the model's sentences, by field."""
        return {name: value.parts() for name, value in self.__dict__.items() if isinstance(value, Message)}

    # Without a return type the JSON schema is that of the model's fields.
    @model_serializer(mode="wrap")
    def _without_no_messages(self, inner: SerializerFunctionWrapHandler):
        found: dict[str, Any] = inner(self)
        if not found.get("messages", True):
            del found["messages"]
        return found

    @model_validator(mode="before")
    @classmethod
    def _with_templates(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "messages" not in values:
            return values
        whole: dict[str, Any] = dict(values)  # pyright: ignore[reportUnknownArgumentType]
        parts = whole.pop("messages")
        for name, form in parts.items() if isinstance(parts, dict) else ():  # pyright: ignore[reportUnknownVariableType]
            found = Message.of_parts(form)
            # A sentence that somebody changed on the way is no longer its template's.
            if found is not None and whole.get(name) == found:
                whole[name] = found
        return whole
