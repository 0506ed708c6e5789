"""The options of `parallelize`, and of `pipeline` as well."""

# As in backend.py.
# pyright: reportMissingImports=false

from dataclasses import dataclass

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.collectives.group import wire_type
from carme_runtime.starts import STREAMED, check_start

__all__ = ["Options"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """The arguments of `parallelize` besides model and optimizer, which explains them.

    Raises:
        InvalidCall: One that cannot be, or two that exclude each other.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    bucket_mb: float | None = None
    overlap_step: bool = False
    broadcast_buffers: bool = True
    wire: str = ""
    batch_dim: int = 0
    shard_optimizer: bool = False
    start: str = ""

    def __post_init__(self) -> None:
        if self.accumulate < 1 or (self.bucket_mb is not None and self.bucket_mb <= 0):
            raise InvalidCall(
                f"parallelize got accumulate={self.accumulate} and bucket_mb={self.bucket_mb}.",
                "Give at least 1 and more than 0.",
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InvalidCall(f"parallelize got clip_norm={self.clip_norm}.", "Give more than 0.")
        if self.batch_dim < 0:
            raise InvalidCall(f"parallelize got batch_dim={self.batch_dim}.", "Count dimensions from 0.")
        if self.overlap_step and self.clip_norm is not None:
            raise InvalidCall(
                "overlap_step and clip_norm exclude each other: the norm is known when all gradients are.",
                "Give one of the two.",
            )
        wire_type(self.wire)
        check_start(self.start)
        if self.shard_optimizer and self.wire:
            raise InvalidCall(
                "wire and shard_optimizer exclude each other: divided gradients travel as they are.",
                "Give one of the two.",
            )

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes with which a bucket is full; None: what CARME_FUSION_THRESHOLD_KB or the network says."""
        return None if self.bucket_mb is None else int(self.bucket_mb * _MIB)

    @property
    def streamed(self) -> bool:
        """Whether rank 0's parameters travel while the model is used."""
        return self.start == STREAMED
