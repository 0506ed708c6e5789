"""Where in a configuration file something stands."""

from typing import get_args, get_origin

from pydantic import BaseModel


def table_of(
    settings: type[BaseModel], place: tuple[int | str, ...]
) -> tuple[str, type[BaseModel], list[str]]:
    """The table of a configuration file that a place lies in.

    Args:
        settings: The model of the whole file.
        place: Keys and indices, as errors of pydantic have them.

    Returns:
        The name of the innermost table, its model, and the rest of the place.
    """
    names: list[str] = []
    model = settings
    rest = [str(part) for part in place]
    while rest and rest[0] in model.model_fields:
        kind = model.model_fields[rest[0]].annotation
        depth = 1
        if get_origin(kind) is dict and len(rest) > 1:
            kind, depth = get_args(kind)[1], 2  # [partitions.NAME]
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            break
        names += rest[:depth]
        model, rest = kind, rest[depth:]
    return ".".join(names), model, rest
