"""How many bytes of gradients are gathered before they are reduced together."""

import os

from carme_runtime.errors import CarmeRuntimeError

THRESHOLD = "CARME_FUSION_THRESHOLD_KB"


def threshold(default: int) -> int:
    """In bytes: what CARME_FUSION_THRESHOLD_KB says, which is in KiB, else `default`. 0: each by itself."""
    text = os.environ.get(THRESHOLD)
    if text is None:
        return default
    if not text.isdecimal():
        raise CarmeRuntimeError(
            f"{THRESHOLD}={text} is no size.",
            "Give a whole number of KiB; 0 reduces every gradient by itself.",
        )
    return int(text) << 10
