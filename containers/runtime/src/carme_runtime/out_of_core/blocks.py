"""Blocks of memory that can leave for the disk and come back to the same addresses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class State(Enum):
    PRESENT = "in memory"
    LEAVING = "in memory, and being written, or waiting for that"
    ABSENT = "on the disk alone"
    ARRIVING = "being read, or waiting for that"


class Owner(Protocol):
    """What the memory belongs to, which is not kept alive by its block."""

    def expired(self) -> bool:
        """Whether it is gone, and its memory with it."""
        ...

    def hold(self) -> object | None:
        """Something that keeps it alive as long as it exists; None when it is gone."""
        ...

    def forget(self) -> None:
        """It is not queried again."""
        ...


@dataclass(eq=False, slots=True)
class Block:
    """The whole pages of one storage.

    Attributes:
        owner: Of the memory.
        address: Where it begins.
        size: Bytes.
        label: Its number in recorded steps.
        key: What identifies its owner.
        state: Where its content is.
        version: Grows with each change.
        saved: The version that the disk has.
        offset: Its part of the spill file; None when it has none yet.
        pins: It stays in memory while there are any.
        last_use: The number of the operation that used it last.
        next_use: The number of the operation that uses it next, by the recorded step; see `Steps`.
        gone: The number of the operation after which it is gone, by the recorded step.
        step_pins: Those of `pins` that the step's end takes away.
        place: Which of its operation's results it is.
        made_in: The number of the step that made it.
        is_forgotten: Its owner is gone, and must not be queried again.
    """

    owner: Owner
    address: int
    size: int
    label: int
    key: int = 0
    state: State = State.PRESENT
    version: int = 0
    saved: int = -1
    offset: int | None = None
    pins: int = 0
    last_use: int = 0
    next_use: float = math.inf
    gone: float = math.inf
    step_pins: int = 0
    place: int = 0
    made_in: int = -1
    is_forgotten: bool = False

    @property
    def dirty(self) -> bool:
        """Whether the disk does not have what is in memory."""
        return self.saved != self.version


class Rates(Protocol):
    """How fast blocks leave and come back."""

    @property
    def write_rate(self) -> float:
        """Bytes that leave in a second."""
        ...

    @property
    def read_rate(self) -> float:
        """Bytes that come back in a second."""
        ...


class Moved(Protocol):
    """What has moved until now."""

    file: Any  # `Rates` as they were at the beginning
    read: int
    written: int
    busy_seconds: float


def measured_rates(store: Moved) -> tuple[float, float]:
    """Bytes in a second that the disk, or the link, gives and takes.

    What it did with several transfers at a time says more than how fast it was at the beginning.
    """
    file, busy = store.file, store.busy_seconds
    expected = store.read / file.read_rate + store.written / file.write_rate
    # The first transfer may have ended, and not be counted yet.
    faster = expected / busy if busy and expected else 1.0
    return file.read_rate * faster, file.write_rate * faster


def leaves_first(
    candidates: Sequence[Block], distance: Callable[[Block], float], needed: int, rates: Rates
) -> Block | None:
    """The block that leaves: the one whose next use is farthest; of several, one that the disk has.

    One that nothing uses again before it is gone would be written for nothing, but for its room until then:
    of several such the one that is gone last leaves. Blocks that the disk has, whose next use comes after
    that, and that take no longer to be read again than it takes to be written, take its place if they give
    all the room that is needed. Changed ones do not: only a plan of the step shows whether those leave later
    anyway.

    Args:
        candidates: Blocks in memory that may leave.
        distance: How far a block's next use is.
        needed: Bytes that have to become free, by as many calls as that takes.
        rates: Of the disk, or the link.

    Returns:
        None where there is no candidate.
    """
    first = max(candidates, key=lambda block: (distance(block), not block.dirty, block.gone), default=None)
    if first is None or not first.dirty or distance(first) < math.inf or first.gone == math.inf:
        return first
    clean = [
        block
        for block in candidates
        if not block.dirty
        and block.size * rates.write_rate <= first.size * rates.read_rate
        and first.gone < block.next_use
    ]
    if sum(block.size for block in clean) < needed:
        return first
    return max(clean, key=distance, default=first)


@dataclass(eq=False, slots=True)
class Transfer:
    """A block on its way; several threads move it, piece by piece."""

    block: Block
    is_write: bool
    version: int
    handed_out: int = 0  # bytes that threads have taken on
    moving: int = 0  # pieces that threads are moving
    hold: object | None = None  # the block's owner; the trainer's thread alone takes it and lets it go
    started: bool = False
    error: OSError | None = None
