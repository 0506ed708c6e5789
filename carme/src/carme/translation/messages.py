"""A sentence as its template and values: English as a text, in the reader's language where it is shown."""

from __future__ import annotations

import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from gettext import GNUTranslations
    from typing import Any

__all__ = [
    "Message",
    "Value",
    "joined",
    "message",
    "moment",
    "moments",
    "noop",
    "plural",
    "row_of",
    "until_of",
]

#: What a template is filled with: JSON knows it, so that it survives a socket and a database.
Value = str | int | float | bool | None

_DEPTH = 32  # messages that are values of messages
_MOMENT = "{moment}"  # has no translation
#: Of moments; a time in others may have no time of day in the reader's zone.
_YEARS = range(1970, 3000)


class Message(str):
    """A text that knows what it was made of; `str` methods see the English one.

    Attributes:
        template: The gettext msgid, with named places: `There is no dataset {name!r}.`
        plural: The msgid for counts other than one, which `values["count"]` chooses; None for most.
        values: What fills the places, by name. Messages among them are rendered with the whole.
    """

    __slots__ = ("plural", "template", "values")
    template: str
    plural: str | None
    values: Mapping[str, Value]

    def __new__(
        cls, text: str, template: str, values: Mapping[str, Value], plural: str | None = None
    ) -> Message:
        """`message` and `plural` make one; `text` is the English sentence."""
        message = super().__new__(cls, text)
        message.template, message.plural, message.values = template, plural, values
        return message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str.__str__(self), self.template, dict(self.values), self.plural)

    def __str__(self) -> str:
        """Itself: the text of a ValueError keeps the template."""
        return self

    def in_language(self, code: str) -> str:
        """The sentence in a language like `de`; English where that has no catalogue or no such template."""
        catalogue = _catalogue(code[:2].lower())
        return (
            str.__str__(self) if catalogue is None or not self.template else _rendered(self, catalogue, code)
        )

    def parts(self) -> dict[str, Any]:
        """Its JSON form; `text` is for readers that do not know the template."""
        values = {
            name: value.parts() if isinstance(value, Message) else value
            for name, value in self.values.items()
        }
        found: dict[str, Any] = {"text": str.__str__(self), "template": self.template, "values": values}
        return found | ({"plural": self.plural} if self.plural is not None else {})

    @classmethod
    def of_parts(cls, parts: Any, depth: int = _DEPTH) -> Message | None:
        """The message of a JSON form; None where it is none.

        The form may come from anybody: only templates of our own catalogues are ever filled in.
        """
        if not (isinstance(parts, dict) and depth):
            return None
        form: dict[str, Any] = dict(parts)  # pyright: ignore[reportUnknownArgumentType]
        text, template, values, many = (form.get(name) for name in ("text", "template", "values", "plural"))
        if not (isinstance(text, str) and isinstance(template, str) and isinstance(values, dict)):
            return None
        if not template:
            return None  # catalogues have their header there
        found: dict[str, Value] = {}
        known: dict[str, Any] = dict(values)  # pyright: ignore[reportUnknownArgumentType]
        for name, value in known.items():
            read = cls.of_parts(value, depth - 1) if isinstance(value, dict) else value
            if not (isinstance(read, str | int | float) or (read is None and value is None)):
                return None
            found[name] = read
        return cls(text, template, found, many if isinstance(many, str) else None)


def message(template: str, /, **values: object) -> Message:
    """A sentence that can be shown in any language that has its template.

    `tests/unit/carme/test_translation.py` finds templates here that lack their German, so the template is
    written out where this is called.

    Args:
        template: The English sentence, as `str.format` reads it.
        values: What fills its places. Other than text and numbers become text now.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    return Message(template.format(**plain) if plain else template, template, plain)


def plural(singular: str, plural: str, /, count: int, **values: object) -> Message:
    """Like `message`, for what is worded by a `count`, which both templates may name."""
    plain = {"count": count} | {name: _plain(value) for name, value in values.items()}
    return Message((singular if count == 1 else plural).format(**plain), singular, plain, plural)


def moment(text: str, when: datetime) -> Message:
    """A time as part of a sentence; pages show it by the reader's clock, which they find by `moments`.

    Args:
        text: How it is written where nobody knows the reader's clock, with its zone.
        when: The time itself, with a zone.
    """
    return Message(text, _MOMENT, {"moment": text, "at": when.isoformat()})


def moments(text: str) -> dict[str, datetime]:
    """The times in a sentence: what is written there, and when that is. Empty for other texts.

    Those without words, and those of absurd years, are left out.
    """
    if not isinstance(text, Message):
        return {}
    if text.template != _MOMENT:
        return {words: at for value in text.values.values() for words, at in moments(_text_of(value)).items()}
    from datetime import datetime

    try:
        at = datetime.fromisoformat(str(text.values.get("at")))
    except ValueError:
        return {}
    words = str.__str__(text)
    return {words: at} if at.tzinfo and at.year in _YEARS and words.strip() else {}


def until_of(text: str) -> datetime | None:
    """The last of the times in a sentence at which something ends, its values named `until`; None: no such.

    Other times in it, as when something begins, do not count.
    """
    return max(_ends(text), default=None)


def _ends(text: str) -> Iterable[datetime]:
    for name, value in text.values.items() if isinstance(text, Message) else ():
        yield from moments(_text_of(value)).values() if name == "until" else _ends(_text_of(value))


def _text_of(value: Value) -> str:
    return value if isinstance(value, str) else ""


def noop(template: str) -> str:
    """Marks a template in a table; `message` fills it in later."""
    return template


#: A half, by which a catalogue shows its language's decimal mark between the digits.
_HALF = noop("0.5")
_BETWEEN = {" ": noop("{first} {second}"), ", ": noop("{first}, {second}")}


def joined(parts: Iterable[str], between: str = " ") -> str:
    """Texts in a row, each in the reader's language; the empty ones are left out.

    Args:
        parts: The texts.
        between: A space, or a comma and a space.
    """
    return _joined([part for part in parts if part], between)


def row_of(text: str) -> tuple[list[str], str] | None:
    """The two halves of what `joined` made and what stands between them; None for other texts."""
    for between, template in _BETWEEN.items():
        if isinstance(text, Message) and text.template == template:
            return [_text_of(text.values.get(name)) for name in ("first", "second")], between
    return None


def _joined(parts: list[str], between: str) -> str:
    if not any(isinstance(part, Message) for part in parts):
        return between.join(parts)
    if len(parts) == 1:
        return parts[0]
    # By halves: of thousands of parts none lies deeper than a reader of the form goes.
    half = len(parts) // 2
    first, second = _joined(parts[:half], between), _joined(parts[half:], between)
    return message(_BETWEEN[between], first=first, second=second)


def _plain(value: object) -> Value:
    if isinstance(value, Message) or value is None or type(value) in (str, int, float, bool):
        return value  # pyright: ignore[reportReturnType]
    return int(value) if isinstance(value, int) else str(value)


class _Decimal(float):
    """A number that templates write with a language's decimal mark."""

    __slots__ = ("mark",)
    mark: str

    def __new__(cls, value: float, mark: str) -> _Decimal:
        quoted = super().__new__(cls, value)
        quoted.mark = mark
        return quoted

    def __format__(self, spec: str) -> str:
        return super().__format__(spec).replace(".", self.mark)


def _in_language(value: Value, catalogue: GNUTranslations, code: str) -> Value:
    """What fills a place, as a language writes it."""
    if isinstance(value, Message):
        return value.in_language(code)
    return _Decimal(value, catalogue.gettext(_HALF)[1:-1]) if isinstance(value, float) else value


def _rendered(found: Message, catalogue: GNUTranslations, code: str) -> str:
    try:
        values = {name: _in_language(value, catalogue, code) for name, value in found.values.items()}
        if found.plural is None:
            template = catalogue.gettext(found.template)
        else:
            count = found.values["count"]
            template = catalogue.ngettext(
                found.template, found.plural, count if isinstance(count, int) else 0
            )
        return template.format(**values) if values else template
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError):
        return str.__str__(found)  # of another version, which had another template or other values


@functools.cache
def _catalogue(code: str) -> GNUTranslations | None:
    """A language's compiled catalogue, which raises LookupError for what it lacks; None: there is none."""
    if not code.isalpha():
        return None
    # Programs that must start at once import the errors, and few of them need another language.
    import gettext
    from pathlib import Path

    class Missing(gettext.NullTranslations):
        def gettext(self, message: str) -> str:
            raise LookupError(message)

        def ngettext(self, msgid1: str, msgid2: str, n: int) -> str:
            raise LookupError(msgid1)

    try:
        found = gettext.translation("carme", Path(__file__).with_name("locale"), [code])
    except OSError:
        return None
    found.add_fallback(Missing())
    return found if isinstance(found, gettext.GNUTranslations) else None
