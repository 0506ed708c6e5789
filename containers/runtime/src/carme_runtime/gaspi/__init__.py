"""One-sided communication in GASPI's model and terms: ranks, segments, notifications, queues, groups.

    from carme_runtime import gaspi

    with gaspi.init() as process:
        segment = process.segment_create(0, 4096)
        if process.rank == 0:
            segment.array("float32")[:4] = 1
            process.write_notify(0, 0, 1, 0, 0, 16, notification=0)
            process.wait()
        elif process.rank == 1:
            process.notify_waitsome(0)
            process.notify_reset(0, 0)

Ranks on one node share memory; ranks on other nodes are reached over TCP, authenticated by the job's key.
With `init(transport="gpi2")`, or CARME_TRANSPORT=gpi2, GPI-2 carries the data where a site has installed it.
Every call that depends on another rank takes `timeout` in milliseconds: BLOCK waits for ever, TEST does not
wait; when the time is over it raises `Timeout`, and the same call can be made again.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carme_runtime.collectives.errors import (
        CoreMissing,
        GaspiError,
        InvalidCall,
        Mismatch,
        OutOfResources,
        PeerLost,
        Timeout,
        WrongKey,
    )
    from carme_runtime.gaspi.process import BLOCK, TEST, Process, Segment, State, init

__all__ = [
    "BLOCK",
    "TEST",
    "CoreMissing",
    "GaspiError",
    "InvalidCall",
    "Mismatch",
    "OutOfResources",
    "PeerLost",
    "Process",
    "Segment",
    "State",
    "Timeout",
    "WrongKey",
    "init",
]

_OF_PROCESS = {"BLOCK", "TEST", "Process", "Segment", "State", "init"}


def __getattr__(name: str) -> Any:
    """What programs use, imported when it is: the launcher needs other parts of this package, and no core."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = "gaspi.process" if name in _OF_PROCESS else "collectives.errors"
    return getattr(importlib.import_module(f"carme_runtime.{part}"), name)
