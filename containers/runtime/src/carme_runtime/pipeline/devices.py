"""What the ranks of a pipeline have, where they are not alike: speed, memory, and who is near.

Ranks that differ little count as equal. A busy machine would otherwise have equal ranks get unequal stages.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ALIKE_SPEED, _ALIKE_MEMORY = 1.5, 1.1
_WINDOWS, _WINDOW_SECONDS = 7, 0.04


@dataclass(frozen=True)
class Device:
    """What one rank has.

    Args:
        slowness: How many times as long it takes for the same work as the rank that measured the model.
        memory: Bytes for its stage; 0: no limit is known.
        nodes: Where it is, as a number; of a stage: by replica. Empty: all ranks are equally near.
    """

    slowness: float = 1.0
    memory: int = 0
    nodes: tuple[int, ...] = ()


def reference_ms(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """How long a piece of work takes here, in milliseconds: in the middle one of several short windows.

    Args:
        work: Takes about a millisecond, and is over when it returns.
        clock: Seconds. By default those of the processor: others that are given it in between do not count,
            as they may be gone in the next moment.
    """
    work()
    windows = []
    for _ in range(_WINDOWS):
        began, count = clock(), 0
        while (took := clock() - began) < _WINDOW_SECONDS or not count:
            work()
            count += 1
        windows.append(1000 * took / count)
    return statistics.median(windows)


def devices_of_ranks(
    times: Sequence[float], memories: Sequence[int], nodes: Sequence[int] = ()
) -> tuple[Device, ...]:
    """The devices of all ranks; empty where they are alike.

    Args:
        times: By rank: how long the same work takes. Rank 0 has measured the model.
        memories: By rank: bytes for its stage; 0 on all: no limit is known.
        nodes: By rank: the number of its node. Empty: it does not matter.
    """
    slowness, least = [float(f"{took / times[0]:.3g}") for took in times], min(memories)
    if max(times) <= _ALIKE_SPEED * min(times):
        slowness = [1.0] * len(times)
    if max(memories) <= _ALIKE_MEMORY * least:
        memories = [least] * len(memories)
    some_near = 1 < len(set(nodes)) < len(nodes)
    places = [(node,) for node in nodes] if some_near else [()] * len(times)
    found = tuple(Device(*each) for each in zip(slowness, memories, places, strict=True))
    return found if len(set(found)) > 1 else ()


def devices_of_stages(devices: Sequence[Device], stages: int) -> tuple[Device, ...]:
    """By stage what there is for it in every replica: replicas wait for the slowest of them.

    Args:
        devices: By rank; stages follow each other, and so do replicas. Empty: they are alike.
        stages: Ranks of one pipeline.
    """
    found = []
    for stage in range(stages if devices else 0):
        own = devices[stage::stages]
        nodes = tuple(node for each in own for node in each.nodes)
        found.append(Device(max(each.slowness for each in own), min(each.memory for each in own), nodes))
    return tuple(found)
