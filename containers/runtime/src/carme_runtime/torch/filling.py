"""Which parameters' gradients lie together in a bucket, and in which memory."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from dataclasses import dataclass

import torch
from torch import nn

from carme_runtime import fusion
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch.buckets import EXTRA, Bucket, elements, padded
from carme_runtime.torch.core_group import CoreGroup
from carme_runtime.torch.device_group import DeviceGroup
from carme_runtime.torch.flat import REDUCIBLE
from carme_runtime.torch.sharding import ShardBucket, shard_elements

__all__ = ["Filling", "check_divisible", "limits"]


@dataclass(frozen=True)
class Filling:
    """How buckets are made.

    Args:
        group: The core's; None: another backend reduces.
        ranks: How many there are.
        wire: How gradients travel between nodes.
        shard: Whether each rank gets its part of a bucket only.
        inline: Whether buckets are reduced when they are waited for, instead of in the background.
    """

    group: CoreGroup | None
    ranks: int
    wire: str
    shard: bool
    inline: bool

    def buckets(self, parameters: list[nn.Parameter], limit: int, least: int) -> list[Bucket]:
        """Buckets in the order of backpropagation, which is about the reverse of that of the parameters.

        Args:
            parameters: In the model's order.
            limit: Bytes with which a bucket is full,
            least: and with which one is, if as many or fewer follow it.
        """
        order = parameters[::-1]
        kinds = [(parameter.device, parameter.dtype) for parameter in order]
        numbers = fusion.fill([_bytes(p) for p in order], kinds, limit, least)
        filled = [[order[number] for number in bucket] for bucket in numbers]
        shared = [_can_share(self.group, bucket[0]) for bucket in filled]
        sizes = [
            padded(self._elements(bucket) * bucket[0].element_size()) if share else 0
            for bucket, share in zip(filled, shared, strict=True)
        ]
        memory = self.group.shared_bytes(sum(sizes)) if self.group and any(shared) else torch.empty(0)
        parts = memory.split(sizes)
        return [
            self._in_core(self.group, bucket, part) if share and self.group else self._elsewhere(bucket)
            for bucket, share, part in zip(filled, shared, parts, strict=True)
        ]

    def _elements(self, parameters: list[nn.Parameter]) -> int:
        return shard_elements(parameters, self.ranks)[1] if self.shard else elements(parameters)

    def _in_core(self, group: CoreGroup, parameters: list[nn.Parameter], part: torch.Tensor) -> Bucket:
        """A bucket in memory that the ranks of a node share."""
        count = self._elements(parameters)
        flat = part.view(parameters[0].dtype)[:count]
        if self.shard:
            return ShardBucket(parameters, flat, group.lane(), group.limit, self.inline)
        plan = group.plan(flat, count - len(parameters) - EXTRA, self.wire)
        return Bucket(parameters, flat, plan, self.inline)

    def _elsewhere(self, parameters: list[nn.Parameter]) -> Bucket:
        """A bucket that the core cannot reduce in place: on a GPU, say."""
        first = parameters[0]
        flat = torch.zeros(self._elements(parameters), dtype=first.dtype, device=first.device)
        if self.shard and self.group:
            return ShardBucket(parameters, flat, DeviceGroup(self.group.lane()), self.group.limit, False)
        return Bucket(parameters, flat, None, False)


def check_divisible(model: nn.Module, group: CoreGroup | None) -> None:
    """Raise InvalidCall for a parameter that no rank can get a part of."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not _can_divide(group, parameter):
            on_known = parameter.device.type in ("cpu", "cuda")
            where = f"has {parameter.dtype}" if on_known else f"is on {parameter.device}"
            if group is None:
                where = "would be reduced by another backend than carme"
            raise InvalidCall(
                f"The optimizer cannot be divided among the ranks: {name} {where}.",
                "Divide models of floating-point numbers on the host or on NVIDIA GPUs, over the backend "
                "carme, or leave shard_optimizer out.",
            )


def _can_divide(group: CoreGroup | None, parameter: nn.Parameter) -> bool:
    on_gpu = group is not None and parameter.is_cuda and parameter.dtype in REDUCIBLE
    return on_gpu or _can_share(group, parameter)


def _can_share(group: CoreGroup | None, parameter: nn.Parameter) -> bool:
    return group is not None and parameter.device.type == "cpu" and parameter.dtype in REDUCIBLE


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def limits(bucket_bytes: int | None, near: bool) -> tuple[int, int]:
    """Bytes with which a bucket is full, and with which one of the last ones is.

    Args:
        bucket_bytes: As it was requested.
        near: Whether all ranks are on one node.
    """
    if bucket_bytes is None:
        bucket_bytes = fusion.threshold(fusion.BUCKET_BYTES if near else fusion.SMALL_BUCKET_BYTES)
    return bucket_bytes, bucket_bytes if near else fusion.LEAST_BUCKET_BYTES
