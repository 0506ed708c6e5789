"""A checkpoint that rank 0 alone reads, and that all ranks take piece by piece: none has all bytes at once.

For ranks whose memory is limited. Elsewhere a checkpoint travels while training begins: see `streamed`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from carme_runtime.checkpoint import files
from carme_runtime.checkpoint.stream import Filling, Layout, pack, unpack
from carme_runtime.collectives import Group

__all__ = ["Relay"]

_STRUCTURE, _END = -1, -2  # what comes next, where it is not a piece of the bytes from there on


class Relay:
    """Reads checkpoints on rank 0 for all ranks, which make it and call it together.

    Args:
        rank: This one.
        carrier: A group of all ranks, and its milliseconds.
        receiver: Makes what takes the bytes on this rank.
    """

    def __init__(
        self, rank: int, carrier: tuple[Group, int], receiver: Callable[[bytes, Layout], Filling]
    ) -> None:
        self._rank, self._receiver = rank, receiver
        self._group, self._limit = carrier
        self._into: Filling | None = None

    def read(self, checkpoint: Path) -> Filling | None:
        """Read it, or take what rank 0 reads; None: rank 0 could not, and says why.

        Raises:
            Damaged: On rank 0, what is on the disk is not what was written.
        """
        if self._rank:
            return self._take()
        try:
            return files.read(checkpoint, self._begun)._into
        finally:
            self._send(_END, np.empty(0, np.uint8))

    def put(self, begin: int, piece: np.ndarray) -> None:
        """Rank 0 has read these bytes."""
        assert self._into
        self._send(begin, piece)
        self._into.put(begin, piece)

    def _begun(self, packed: bytes, layout: Layout) -> "Relay":
        structure = pack({"structure": packed, "tensors": layout.tensors, "size": layout.size})
        self._send(_STRUCTURE, np.frombuffer(structure, np.uint8).copy())
        self._into = self._receiver(packed, layout)
        return self

    def _send(self, kind: int, content: np.ndarray) -> None:
        self._group.broadcast(np.array([kind, len(content)], np.int64), 0, timeout=self._limit)
        if len(content):
            self._group.broadcast(content, 0, timeout=self._limit)

    def _take(self) -> Filling | None:
        into, failure = None, None
        while True:
            head = np.zeros(2, np.int64)
            self._group.broadcast(head, 0, timeout=self._limit)
            kind, size = map(int, head)
            if kind == _END:
                if failure:
                    raise failure
                return into
            content = np.empty(size, np.uint8)
            self._group.broadcast(content, 0, timeout=self._limit)
            try:
                if kind == _STRUCTURE:
                    index: dict[str, Any] = unpack(content.tobytes())
                    into = self._receiver(index["structure"], Layout(index["tensors"], index["size"]))
                elif into and not failure:
                    into.put(kind, content)
            except Exception as reason:  # only after all that rank 0 sends has come
                failure = reason
