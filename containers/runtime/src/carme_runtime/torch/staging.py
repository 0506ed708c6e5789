"""Sums of GPU tensors through memory that the ranks of a node share and the GPU copies to by itself.

A tensor passes in chunks: while one is reduced in place, the next one comes from the GPU, and the one before
goes back.
"""

# As in backend.py.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch

from carme_runtime.collectives import Group
from carme_runtime.collectives.core import segments
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.logs import log
from carme_runtime.torch import flat

__all__ = ["Chunks", "passes_in_chunks"]

_CHUNK = 8 << 20  # bytes
_SLOTS = 3  # one is reduced while two are copied


def passes_in_chunks(name: str, arguments: tuple[Any, ...]) -> str:
    """The core's name of the reduction, where a call is a sum of tensors that the core takes as they are."""
    if name not in ("allreduce", "allreduce_coalesced"):
        return ""
    tensors, opts = arguments[0], arguments[1] if len(arguments) > 1 else None
    if any(t.layout is not torch.strided or not t.is_cuda for t in tensors):
        return ""
    if any(not t.numel() or t.dtype not in flat.REDUCIBLE for t in tensors):
        return ""
    op, factor = flat.reduction(opts, *tensors)
    as_they_are = factor is None and not any(flat.averages_integers(t, op) for t in tensors)
    return op if as_they_are else ""


class Chunks:
    """Memory through which tensors of one GPU pass: a segment of the core, which its ranks reduce in place.

    Without a free segment, or with a GPU that cannot use it, it is this rank's own: all ranks make the same
    calls of the core then, too.

    Args:
        device: The GPU.
        context: The core's.
    """

    def __init__(self, device: torch.device, context: Any) -> None:
        self._context, self._number = context, _new_segment(context, _SLOTS * _CHUNK)
        memory = None
        if self._number is not None:
            memory = torch.from_numpy(context.segment_array(self._number))[: _SLOTS * _CHUNK]
            code = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            if code:
                log.debug("The GPU cannot use shared memory (error %d); sums pass through a copy.", code)
                memory = None
                self._give_back()
        if memory is None:
            memory = torch.empty(_SLOTS * _CHUNK, dtype=torch.uint8, pin_memory=True)
        self._slots: Sequence[torch.Tensor] = memory.split(_CHUNK)
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: list[torch.cuda.Event | None] = [None] * len(self._slots)

    def close(self) -> None:
        """Let the memory go, when nothing passes any more."""
        self._up.synchronize()
        if self._number is not None:
            _cudart().cudaHostUnregister(self._slots[0].data_ptr())
            self._slots = ()
            self._give_back()

    def _give_back(self) -> None:
        self._context.segment_delete(self._number)
        self._number = None

    def reduce(
        self, tensor: torch.Tensor, op: str, group: Group, form: str, timeout: int, before: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Reduce a tensor in place.

        Args:
            tensor: Contiguous.
            op: The core's name.
            group: All members call this in the same order.
            form: What they compare of it.
            timeout: Milliseconds for each chunk; -1: none.
            before: The tensor is there when this has passed.

        Returns:
            When this has passed, the result is there.
        """
        parts = tensor.view(-1).split(_CHUNK // tensor.element_size())
        self._down.wait_event(before)
        for stream in (self._down, self._up):
            tensor.record_stream(stream)
        fetched = [self._fetch(0, parts[0])]
        for number, part in enumerate(parts):
            if number + 1 < len(parts):
                fetched.append(self._fetch(number + 1, parts[number + 1]))
            fetched[number].synchronize()
            slot = self._slot(number, part)
            group.allreduce(slot, op, form, timeout=timeout)
            with torch.cuda.stream(self._up):
                part.copy_(slot, non_blocking=True)
                self._free[number % _SLOTS] = self._passed(self._up)
        return self._passed(self._up)

    def bring(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.cuda.Event:
        """Copy what `reduce` gave last into a tensor that is not contiguous."""
        tensor.record_stream(self._up)
        with torch.cuda.stream(self._up):
            tensor.copy_(whole)
        return self._passed(self._up)

    def _fetch(self, number: int, part: torch.Tensor) -> torch.cuda.Event:
        free = self._free[number % _SLOTS]
        if free is not None:
            self._down.wait_event(free)
        with torch.cuda.stream(self._down):
            self._slot(number, part).copy_(part, non_blocking=True)
            return self._passed(self._down)

    def _slot(self, number: int, part: torch.Tensor) -> torch.Tensor:
        size = part.numel() * part.element_size()
        return self._slots[number % _SLOTS][:size].view(part.dtype)

    @staticmethod
    def _passed(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


def _cudart() -> Any:
    """CUDA's runtime, which pins memory."""
    return torch.cuda.cudart()


def _new_segment(context: Any, size: int) -> int | None:
    """The number of a segment that nobody had; None: all are in use, or the transport copies anyhow."""
    for number in range(segments(context) - 1, 0, -1):
        try:
            context.segment_alloc(number, size)
        except InvalidCall:
            continue  # somebody has it
        return number
    return None
