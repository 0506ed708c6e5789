"""How many bytes of gradients are gathered before they are reduced together."""

import os
from collections.abc import Hashable, Sequence

from carme_runtime.errors import CarmeRuntimeError

THRESHOLD = "CARME_FUSION_THRESHOLD_KB"


def threshold(default: int) -> int:
    """In bytes: what CARME_FUSION_THRESHOLD_KB says, which is in KiB, else `default`. 0: each by itself."""
    text = os.environ.get(THRESHOLD)
    if text is None:
        return default
    if not text.isdecimal():
        raise CarmeRuntimeError(
            f"{THRESHOLD}={text} is not a size.",
            "Give a whole number of KiB; 0 reduces each gradient separately.",
        )
    return int(text) << 10


# Within a node a bucket costs a wait of all for all. A wire must have work from the first gradient on, and
# as much as it can do until the last: there buckets are small, and the last ones no larger than what follows
# them, so that little is left to travel when backpropagation ends. The first one is small anywhere.
BUCKET_BYTES, SMALL_BUCKET_BYTES, LEAST_BUCKET_BYTES = 8 << 20, 1 << 20, 1 << 17


def fill(sizes: Sequence[int], kinds: Sequence[Hashable], limit: int, least: int) -> list[list[int]]:
    """Buckets of gradients that are reduced together, by their numbers.

    Args:
        sizes: Bytes, in the order of backpropagation.
        kinds: Only gradients of one kind share a bucket.
        limit: Bytes with which a bucket is full,
        least: and with which one is, if as many or fewer follow it.
    """
    filled: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    left = sum(sizes)
    for number, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        open_.setdefault(kind, []).append(number)
        held[kind] = held.get(kind, 0) + size
        left -= size
        if held[kind] >= min(limit if filled else min(limit, SMALL_BUCKET_BYTES), max(left, least)):
            filled.append(open_.pop(kind))
            del held[kind]
    return [*filled, *open_.values()]
