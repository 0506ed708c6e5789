"""The ranks that write a checkpoint together: those of `torch.distributed`, or of Keras on TensorFlow."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.gaspi import launchers


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; `exchange` gives what all of them have, by rank.

    `carrier` gives a group of all of them, for broadcasts in the background, and the milliseconds after which
    one is given up; all ranks call it together. None: another library than the core joins them.
    """

    rank: int
    size: int
    exchange: Callable[[Any], list[Any]]
    carrier: Callable[[], tuple[Group, int] | None] = lambda: None


def joined() -> Ranks:
    """The run that this process is part of, which may be one rank.

    Raises:
        InvalidCall: There are several ranks, and this one has not joined the others.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        dist = torch.distributed
        size = dist.get_world_size()

        def exchange(content: Any) -> list[Any]:
            reported = [content] * size
            if size > 1:
                dist.all_gather_object(reported, content)
            return reported

        return Ranks(dist.get_rank(), size, exchange, _carrier_of_torch)
    keras = sys.modules.get("carme_runtime.keras.world")
    if keras is not None:
        world = keras.world()
        return Ranks(world.rank, world.size, world.exchange, world.lane)
    size = (launchers.translated(os.environ) | os.environ).get("WORLD_SIZE", "1")
    # Ranks of Horovod itself cannot join: what one of them saves is its own.
    if int(size) > 1 and "horovod" not in sys.modules:
        # Each would take the folder for its own, and write whole checkpoints into it beside the others.
        raise InvalidCall(
            f"Checkpoints were requested before this rank had joined the {size} ranks of its run.",
            "Make them after parallelize, pipeline, init_process_group or init() of carme_runtime.horovod.",
        )
    return Ranks(0, 1, lambda content: [content])


def _carrier_of_torch() -> tuple[Group, int] | None:
    from carme_runtime.torch.core_group import core_group

    group = core_group()
    return (group.lane(), group.limit) if group else None
