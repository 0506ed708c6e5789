"""What a rank begins, in memory that others can read: so that one without data can go along (`join`).

An entry costs a write to the rank's own segment. Only a rank that has joined reads, from one that has not.
"""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import struct
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import backend

_SEGMENT = 0  # of torch's own context: `parallelize` has those above
_ENTRIES = 4096
_HEAD = struct.Struct("qq")  # entries written; 0, or one more than that once the rank has joined
_ENTRY = struct.Struct("qqqq64s")
_RING = _ENTRIES * _ENTRY.size
_POLL_SECONDS = 0.0005


class Entry(NamedTuple):
    """One step: what it is, in numbers, and what ranks compare of its tensors."""

    numbers: tuple[int, int, int, int]
    form: str


class Journal:
    """Made by all ranks together."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        if not isinstance(group, backend.ProcessGroupCarme):
            raise InvalidCall(
                f"torch.distributed runs on the backend {dist.get_backend()}.",
                'Leave its start to hvd.init(), or use init_process_group("carme").',
            )
        self._context, self._group = group.another_group()
        self._read_offset = _HEAD.size + _RING  # room for what is read
        self._context.segment_alloc(_SEGMENT, self._read_offset + _HEAD.size + _ENTRY.size)
        for rank in range(self._group.size):
            if rank != self._group.index:
                self._context.segment_register(_SEGMENT, rank, -1)
        self._memory = memoryview(self._context.segment_array(_SEGMENT))
        self._count = 0
        self._group.barrier()

    def note(self, *entry: int, form: str = "") -> None:
        """Note what this rank begins next. At most four numbers, and as long a form as the core compares."""
        padded = (*entry, 0, 0, 0)[:4]
        at = _HEAD.size + self._count % _ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, *padded, form.encode())
        self._count += 1
        _HEAD.pack_into(self._memory, 0, self._count, 0)

    def follow(self) -> "Follower":
        """This rank begins nothing more by itself."""
        _HEAD.pack_into(self._memory, 0, self._count, self._count + 1)
        return Follower(self)

    def read(self, rank: int, begin: int, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        """Read from the journal of `rank`."""
        if rank == self._group.index:
            return layout.unpack_from(self._memory, begin)
        self._context.read(rank, [(_SEGMENT, at, _SEGMENT, begin, layout.size)], None, 0)
        self._context.wait(0, -1)
        return layout.unpack_from(self._memory, at)


class Follower:
    """The steps of the others that a joined rank has not taken yet."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def next(self) -> Entry | None:
        """The next step, however long it takes; None when all ranks have joined and none is left."""
        journal, read_offset = self._journal, self._journal._read_offset
        while True:
            heads = [journal.read(rank, 0, _HEAD, read_offset) for rank in range(journal._group.size)]
            for rank, (count, joined) in enumerate(heads):
                known = joined - 1 if joined else count
                if known > journal._count:
                    if known - journal._count > _ENTRIES:
                        raise InvalidCall(
                            f"Rank {rank} has begun more than {_ENTRIES} operations without waiting for one.",
                            "Call synchronize more often.",
                        )
                    begin = _HEAD.size + journal._count % _ENTRIES * _ENTRY.size
                    journal._count += 1
                    *numbers, form = journal.read(rank, begin, _ENTRY, read_offset + _HEAD.size)
                    return Entry(tuple(numbers), form.rstrip(b"\0").decode())
            if all(joined for _, joined in heads):
                return None
            time.sleep(_POLL_SECONDS)

    def last(self) -> int:
        """The rank that joined last; all ranks leave together."""
        journal = self._journal
        heads = [journal.read(rank, 0, _HEAD, journal._read_offset)[1] for rank in range(journal._group.size)]
        journal._group.barrier()
        _HEAD.pack_into(journal._memory, 0, journal._count, 0)
        journal._group.barrier()
        return max(range(len(heads)), key=lambda rank: (heads[rank], rank))
