"""Training in less memory than it needs: tensors that do not fit are blocks of a file, and come back in time.

What needs PyTorch is imported when it is requested.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carme_runtime.out_of_core.plan import Plan

__all__ = ["HostRoom", "Plan", "host_room", "leave_recomputation", "limits_host", "seconds_waited"]


@dataclass(frozen=True)
class HostRoom:
    """What a limit of the host's memory leaves for tensors, and how fast others move.

    Args:
        bytes: In memory at a time.
        read_rate: Bytes in a second that come back from the disk.
        write_rate: Bytes in a second that leave for it.
    """

    bytes: int
    read_rate: float
    write_rate: float


def limits_host() -> bool:
    """Whether a limit of the host's memory is in force in this process."""
    budget = sys.modules.get("carme_runtime.out_of_core.budget")
    return budget is not None and budget.limits_host()


def leave_recomputation() -> None:
    """Let a pipeline's stages choose what is computed again, and not `carme-run --recompute` any more."""
    if budget := sys.modules.get("carme_runtime.out_of_core.budget"):
        budget.leave_recomputation()


def host_room() -> HostRoom | None:
    """See `HostRoom`; None where no limit of the host's memory is in force in this process."""
    budget = sys.modules.get("carme_runtime.out_of_core.budget")
    return HostRoom(*budget.room_of_host()) if budget is not None and budget.limits_host() else None


def seconds_waited() -> float:
    """How long this process has waited for what a limit of the host's memory moved; 0 where none is."""
    budget = sys.modules.get("carme_runtime.out_of_core.budget")
    return budget.seconds_waited() if budget is not None and budget.limits_host() else 0.0


def __getattr__(name: str) -> Any:
    """`Plan`, imported when it is used: nets, whose processes each start anew, need the sizes alone."""
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from carme_runtime.out_of_core.plan import Plan

    return Plan
