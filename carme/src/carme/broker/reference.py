"""The documentation of the broker's operations, from their declarations.

    python -m carme.broker.reference docs/developers/interfaces.md

writes it between the two markers in that file.
"""

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from carme.broker.operations import Operation
from carme.broker.protocol import OPERATIONS

BEGIN, END = "<!-- operations -->", "<!-- end of operations -->"


def reference() -> str:
    """One entry for each operation: how clients call it, who may, and what it does."""
    return "\n".join(_entry(kind) for kind in OPERATIONS.values())


def replaced(page: str) -> str:
    """The page with the present operations between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{reference()}\n{END}{tail}"


def _entry(kind: type[Operation[Any]]) -> str:
    """A list item: the call, then who may request it and the help's paragraphs."""
    parameters = [
        f"{parameter.name}: {_name(parameter.annotation)}"
        + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
        for parameter in kind.signature().parameters.values()
    ]
    call = f"- `{kind.method}({', '.join(parameters)}) -> {_name(kind.result_type())}`"
    notes = [kind.rights.text, "Audited." if kind.is_audited else ""]
    rules = " ".join(note for note in notes if note)
    text = re.sub(r"^(\w+:)\n +", r"\1 ", inspect.getdoc(kind) or "", flags=re.MULTILINE)
    lines = [line.strip() for line in (f"*{rules}* {text}" if rules else text).splitlines()]
    return "\n".join([call, "", *(f"    {line}".rstrip() for line in lines)])


def _name(annotation: Any) -> str:
    """A type as a program writes it, without its module."""
    if annotation is None or annotation is type(None):
        return "None"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(_name, get_args(annotation)))
    if arguments := get_args(annotation):
        return f"{annotation.__origin__.__name__}[{', '.join(map(_name, arguments))}]"
    return annotation.__name__


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(replaced(file.read_text("utf-8")), "utf-8")
