"""Programs as bodies of transitions. No shell sees them."""

import shlex
import string
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import PurePath
from typing import IO, Any

from carme_runtime.petri.errors import PetriError
from carme_runtime.petri.memory import Range
from carme_runtime.petri.model import Flow

#: What a program may print as its result.
MOST_OUTPUT = 16 << 20


class CommandError(RuntimeError):
    """A program that did not end well."""


class Command:
    """A command with fields, split into words before its fields are filled.

    Raises:
        PetriError: It has no words, or a field that no input has.
    """

    def __init__(self, template: str | Sequence[str], flow: Flow, gives: str | Sequence[str]) -> None:
        try:
            self.words = (
                shlex.split(template) if isinstance(template, str) else [str(word) for word in template]
            )
        except ValueError as error:
            raise PetriError(
                f"The command {template!r} cannot be split: {error}.", "Close its quotes."
            ) from None
        if not self.words:
            raise PetriError("A transition has an empty command.", "Name a program.")
        self.names = [arc.place.name for arc in flow.arguments]
        self.types = [arc.place.type for arc in flow.outputs]
        self.gives = [gives] * len(self.types) if isinstance(gives, str) else list(gives)
        self.name = PurePath(self.words[0]).name
        if len(self.gives) != len(self.types) or any(arc.weight > 1 for arc in flow.outputs):
            raise PetriError(
                f"Command {self.name} has {len(self.types)} outputs, and gives= is for {len(self.gives)}.",
                "Give one text for each output place, of weight 1.",
            )
        for text in self.words:
            self._check(text, {*self.names, "attempt"})
        for text, kind in zip(self.gives, self.types, strict=True):
            self._check(text, {*self.names, "attempt", "stdout"})
            if kind is Range and (not text.startswith("{") or text[1:-1] not in self.names):
                raise PetriError(
                    f"Command {self.name} gives '{text}' to a place of ranges.",
                    "Name the input whose range goes there: gives='{input}'.",
                )

    def __call__(self, *tokens: Any, attempt: int) -> Any:
        """Run it, and make the outputs' tokens of what it printed."""
        values: dict[str, Any] = {"attempt": attempt, **dict(zip(self.names, tokens, strict=True))}
        for token in tokens:
            for each in token if isinstance(token, list) else [token]:
                if isinstance(each, Range):  # its file stays where the program finds it
                    each.hold()
        words = [filled for word in self.words for filled in _fill(word, values)]
        values["stdout"] = _run(words).rstrip("\n")
        outputs = [self._token(text, kind, values) for text, kind in zip(self.gives, self.types, strict=True)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _token(self, text: str, kind: type, values: dict[str, Any]) -> Any:
        if kind is Range:
            return values[text[1:-1]]
        filled = " ".join(_fill(text, values))
        if kind is bytes:
            return filled.encode()
        return filled if kind is object else kind(filled)

    def _check(self, text: str, known: set[str]) -> None:
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            raise PetriError(
                f"'{text}' of command {self.name} is wrong: {error}.", "Write {{ for a brace."
            ) from None
        for field in fields:
            if field not in known:
                raise PetriError(
                    f"Command {self.name} has a field {{{field}}}, and no input place of that name.",
                    f"There are {', '.join(sorted(known))}; write {{{{ for a brace.",
                )


def _fill(word: str, values: dict[str, Any]) -> list[str]:
    """A word with its fields filled; a field alone whose place gives several tokens becomes several words."""
    if word.startswith("{") and word.endswith("}") and isinstance(values.get(word[1:-1]), list):
        return [str(value) for value in values[word[1:-1]]]
    return [word.format_map(values)]


def _run(words: list[str]) -> str:
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except (OSError, ValueError) as error:
        raise CommandError(f"{words[0]} cannot be started: {getattr(error, 'strerror', error)}") from None
    assert process.stdout and process.stderr
    last: deque[bytes] = deque(maxlen=5)
    errors = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
    errors.start()
    with process.stdout, process.stderr:
        out = process.stdout.read(MOST_OUTPUT + 1)
        if len(out) > MOST_OUTPUT:
            process.kill()
        code = process.wait()
        errors.join()
    if len(out) > MOST_OUTPUT:
        raise CommandError(
            f"{words[0]} printed more than {MOST_OUTPUT >> 20} MiB as its result; write it to a file"
        )
    if code:
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        message = b"".join(last).decode(errors="replace").strip()
        raise CommandError(f"{words[0]} {ended}" + (f": {message}" if message else ""))
    return out.decode(errors="replace")


def _pass_on(stream: IO[bytes], last: "deque[bytes]") -> None:
    """Errors go where the worker's do, and their end into the message."""
    for line in iter(lambda: stream.readline(4096), b""):
        last.append(line)
        sys.stderr.buffer.write(line)
    sys.stderr.flush()
