"""Buffers of a model, such as running means, which all ranks get from rank 0."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import torch
import torch.distributed as dist
from torch import nn

from carme_runtime.collectives.errors import InvalidCall, Mismatch

__all__ = ["Buffers"]

_BROADCAST_BYTES = 250 << 20


class Buffers:
    """The buffers of the modules that a model has now, as DistributedDataParallel gives them.

    A buffer that is the tensor it was is written in place, as its module does it. PyTorch counts no change of
    `data`: the backward pass of an earlier forward pass, still to come, may need the buffer. Where a module
    has put another tensor in its place, that one may be a script's own, or autograd may have saved it: a copy
    of it comes in its place.
    """

    def __init__(self, model: nn.Module) -> None:
        # Walking through the modules takes longer than reading what they have.
        self._tables = [module._buffers for module in model.modules()]
        self._last = {
            (number, name): buffer
            for number, table in enumerate(self._tables)
            for name, buffer in table.items()
            if buffer is not None
        }

    def give(self) -> None:
        """Let all ranks have rank 0's.

        Raises:
            InvalidCall: They have other sizes there.
        """
        buffers = [tensor.data for tensor in self._writable()]
        if not buffers:
            return
        try:  # few messages, however many there are
            dist._broadcast_coalesced(dist.group.WORLD, buffers, _BROADCAST_BYTES, 0)  # pyright: ignore
        except Mismatch as error:
            raise InvalidCall(
                f"Buffers of the model have other sizes than those of rank 0: {error}",
                "If they hold samples of a batch, give parallelize broadcast_buffers=False.",
            ) from error

    def _writable(self) -> list[torch.Tensor]:
        """All buffers, each once; those that modules have replaced are copies now."""
        last, self._last = self._last, {}
        found: dict[int, torch.Tensor] = {}  # by the id of what the module has
        for number, table in enumerate(self._tables):
            if not table:
                continue
            for name, buffer in list(table.items()):
                if buffer is None:
                    continue
                writable = found.get(id(buffer))
                if writable is None:
                    is_same = last.get((number, name)) is buffer
                    writable = found[id(buffer)] = buffer if is_same else buffer.clone()
                if writable is not buffer:
                    table[name] = writable
                # What has a history would hold it until the next pass.
                if writable.is_leaf:
                    self._last[number, name] = writable
        return list(found.values())
