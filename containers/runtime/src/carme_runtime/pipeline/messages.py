"""Messages between stages: what they cost, how tensors lie in them, and which mailboxes carry them."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from carme_runtime.collectives import Group, links
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.collectives.mailboxes import Box, Mailboxes
from carme_runtime.graph import Links
from carme_runtime.pipeline import Plan
from carme_runtime.pipeline.pieces import MOST_DIMENSIONS
from carme_runtime.pipeline.simulation import Channel

_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
_ALIGNMENT = 64
_COLUMNS = 3 + MOST_DIMENSIONS  # what it is, type or number, dimensions, sizes
_ABSENT, _NUMBER, _TENSOR = range(3)


class Part(NamedTuple):
    """A tensor of a message.

    Args:
        type: A number by which the receiver knows the type of its elements.
        shape: At most eight dimensions.
        size: In bytes.
        write: Writes its elements, in order, into an array of so many bytes.
    """

    type: int
    shape: Sequence[int]
    size: int
    write: Callable[[Any], object]


class Received(NamedTuple):
    """A tensor in a message that came: see `Part`. `memory` are its bytes, in the message itself."""

    type: int
    shape: list[int]
    memory: Any


def links_of(world_group: Group | None, rank: int, copying_us: Callable[[int], float]) -> Links:
    """What messages cost: by the runtime's file, by its measurement between nodes, or by copying here.

    Args:
        world_group: All ranks, which call this together; None: there is one.
        rank: This one; what rank 0 gets counts.
        copying_us: Microseconds that a message of so many bytes takes within the node.
    """
    file = os.environ.get(links.LINKS, "")
    between = links.read(Path(file)) if file and not links.should_measure() else []
    source = f"from {file}" if between else "measured between nodes"
    between = between or (world_group.measure_links() if world_group else [])
    copies = () if rank else tuple((size, copying_us(size)) for size in _SIZES)
    if between:
        return Links(tuple(between), source, within=copies)
    return Links(copies, "copies in memory") if copies else Links()


def room(sizes: Sequence[float]) -> int:
    """Bytes of a message of tensors of these sizes."""
    return _table_bytes(len(sizes)) + sum(_aligned(int(-(-size // 1))) for size in sizes)


def pack(memory: Any, parts: Sequence[Part | int | None], title: str, remedy: str) -> int:
    """Write a message: a table of what there is, then the tensors' bytes.

    Args:
        memory: Bytes, as an array.
        parts: Tensors, numbers, and None for what there is not.
        title: The message's name.
        remedy: What to do where it has no room.

    Returns:
        Its size.

    Raises:
        InvalidCall: It has no room.
    """
    rows = np.zeros((len(parts), _COLUMNS), np.int64)
    at = _table_bytes(len(parts))
    for row, part in zip(rows, parts, strict=True):
        if isinstance(part, Part):
            dimensions = len(part.shape)
            if at + part.size > len(memory) or dimensions > MOST_DIMENSIONS:
                raise InvalidCall(f"A value of shape {list(part.shape)} has no room in {title}.", remedy)
            row[:3], row[3 : 3 + dimensions] = (_TENSOR, part.type, dimensions), part.shape
            if part.size:
                part.write(memory[at : at + part.size])
            at += _aligned(part.size)
        elif part is not None:
            row[:2] = _NUMBER, part
    _table(memory, len(parts))[:] = rows
    return min(at, len(memory))


def unpack(memory: Any, count: int, size_of: Callable[[int, int, int], int]) -> list[Received | int | None]:
    """The parts of a message.

    Args:
        memory: The message.
        count: How many there are.
        size_of: From a part's place, its type and its number of elements to its bytes.
    """
    parts: list[Received | int | None] = []
    at = _table_bytes(count)
    for place, row in enumerate(_table(memory, count).tolist()):
        if row[0] != _TENSOR:
            parts.append(row[1] if row[0] == _NUMBER else None)
            continue
        shape = row[3 : 3 + row[2]]
        size = size_of(place, row[1], math.prod(shape))
        parts.append(Received(row[1], shape, memory[at : at + size]))
        at += _aligned(size)
    return parts


def boxes_of(planned: Plan, ranks: Sequence[int]) -> dict[Any, Box]:
    """The mailboxes between the ranks of a pipeline, by channel and whether they carry gradients back."""
    boxes: dict[Any, Box] = {}
    for channel, slots in planned.slots.items():
        source, target = (ranks[planned.schedule.holders[piece]] for piece in channel)
        for back in (False, True):
            names = planned.pieces.gradients(channel) if back else planned.pieces.channels[channel]
            sizes = [planned.graph.value_bytes(name, planned.micro_samples) for name in names]
            ends = (target, source) if back else (source, target)
            if names:
                boxes[channel, back] = Box(*ends, slots, room(sizes))
    return boxes


class Post:
    """Carries values and gradients between pieces, some of them on the same rank.

    Args:
        planned: The plan.
        boxes: Those of `boxes_of`; None: all pieces are here.
        pack: Writes values into memory, under a name; the size.
        unpack: Reads the values of these names from it.
    """

    def __init__(
        self,
        planned: Plan,
        boxes: Mailboxes | None,
        pack: Callable[[Any, list[Any], str], int],
        unpack: Callable[[Any, Sequence[str]], list[Any]],
    ) -> None:
        self._boxes, self._pack, self._unpack = boxes, pack, unpack
        self._remote = set(planned.remote(planned.pieces.channels))
        self._local: dict[tuple[Channel, bool, int], list[Any]] = {}

    def send(self, channel: Channel, back: bool, micro: int, parts: list[Any]) -> None:
        """Send a micro-batch's values, or with `back` gradients against the channel's direction."""
        if channel not in self._remote:
            self._local[channel, back, micro] = parts
            return
        assert self._boxes
        name = (channel, back)
        title = f"the message from stage {channel[back]} to stage {channel[not back]}"
        self._boxes.put(name, self._pack(self._boxes.slot(name), parts, title))

    def receive(
        self, channel: Channel, back: bool, micro: int, names: Sequence[str]
    ) -> tuple[list[Any], Callable[[], None]]:
        """What was sent under these names, and what gives the memory of the message up."""
        if channel not in self._remote:
            return self._local.pop((channel, back, micro)), _no_release
        assert self._boxes
        memory, number = self._boxes.take((channel, back))
        return self._unpack(memory, names), partial(self._boxes.give_up, (channel, back), number)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        if self._boxes:
            self._boxes.flush()

    def close(self) -> None:
        """Give up the memory of messages. All ranks of the pipeline call it together."""
        if self._boxes:
            self._boxes.close()
            self._boxes = None


def _table(memory: Any, count: int) -> Any:
    return memory[: _table_bytes(count)].view(np.int64)[: count * _COLUMNS].reshape(count, _COLUMNS)


def _table_bytes(count: int) -> int:
    return _aligned(8 * _COLUMNS * count)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _no_release() -> None:
    pass
