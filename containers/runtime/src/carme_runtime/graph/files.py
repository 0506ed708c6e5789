"""Graphs as JSON files."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from carme_runtime import strict_json
from carme_runtime.graph.model import VERSION, Graph, GraphError

_FORMAT = "carme graph"


def to_json(graph: Graph) -> str:
    """A graph as text."""
    content = {"format": _FORMAT, "version": VERSION, **dataclasses.asdict(graph)}
    return strict_json.dumps(content, indent=1) + "\n"


def from_json(text: str, where: str = "The text") -> Graph:
    """The graph in a text. Raises GraphError; `where` names the text in its sentences."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise GraphError(f"{where} is not JSON ({error}).", "Trace the model again.") from None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise GraphError(f"{where} holds no graph.", "Name a file that carme_runtime.graph.save wrote.")
    version = content.pop("version", None)
    if version != VERSION:
        raise GraphError(
            f"{where} holds a graph of version {version}. This carme_runtime reads version {VERSION}.",
            "Trace the model again, or install the carme_runtime that wrote it.",
        )
    try:
        return typed(Graph, content)
    except (TypeError, ValueError, KeyError) as error:
        raise GraphError(f"{where} holds a damaged graph ({error}).", "Trace the model again.") from None


def save(graph: Graph, file: Path | str) -> None:
    """Write a graph to a file."""
    Path(file).write_text(to_json(graph))


def load(file: Path | str) -> Graph:
    """Read a graph from a file. Raises GraphError."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise GraphError(f"{file} cannot be read ({error}).", "Name a file with a graph.") from None
    return from_json(text, str(file))


def typed(kind: Any, content: Any) -> Any:
    """What JSON gave, as the type that a field of a dataclass has. Raises TypeError, ValueError, KeyError."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(content, dict):
            raise TypeError(f"{content!r} is not of type {getattr(kind, '__name__', kind)}")
        types = typing.get_type_hints(kind)
        unknown = set(content) - set(types)
        if unknown:
            raise KeyError(f"{sorted(unknown)[0]} is unknown")
        return kind(**{name: typed(types[name], part) for name, part in content.items()})  # pyright: ignore
    if typing.get_origin(kind) is tuple:
        if not isinstance(content, list):
            raise TypeError(f"{content!r} is not a list")
        parts = typing.get_args(kind)
        if parts[-1] is Ellipsis:
            return tuple(typed(parts[0], part) for part in content)
        return tuple(typed(part, each) for part, each in zip(parts, content, strict=True))
    if kind is float and type(content) is int:
        return float(content)
    if type(content) is not kind:
        raise TypeError(f"{content!r} is not of type {kind.__name__}")
    return content
