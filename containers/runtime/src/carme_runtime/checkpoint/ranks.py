"""The ranks that write a checkpoint together: those of `torch.distributed`, or of Keras on TensorFlow."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; `exchange` gives what all of them have, by rank."""

    rank: int
    size: int
    exchange: Callable[[Any], list[Any]]


def joined() -> Ranks:
    """The run that this process is part of, which may be one rank."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        dist = torch.distributed
        size = dist.get_world_size()

        def exchange(content: Any) -> list[Any]:
            told = [content] * size
            if size > 1:
                dist.all_gather_object(told, content)
            return told

        return Ranks(dist.get_rank(), size, exchange)
    keras = sys.modules.get("carme_runtime.keras.world")
    if keras is not None:
        world = keras.world()
        return Ranks(world.rank, world.size, world.exchange)
    return Ranks(0, 1, lambda content: [content])
