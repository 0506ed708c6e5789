"""Distributed runs inside a job: node agents that form the job fabric, and the launcher `carme-run`.

Needs the Python standard library alone, so that it installs into any container.
"""

import os
from typing import TYPE_CHECKING

from carme_runtime.errors import CarmeRuntimeError

if TYPE_CHECKING:
    from carme_runtime.out_of_core.budget import Budget

__all__ = ["CarmeRuntimeError", "__version__", "memory"]
__version__ = "0.1.0"


def memory(limit: int | str, spill: str | os.PathLike[str] | None = None, device: str = "cpu") -> "Budget":
    """Train in less memory than a model needs; for `with`. Needs PyTorch.

    Args:
        limit: What this process may take in all, such as "2GiB"; of a GPU, what PyTorch's tensors may.
        spill: A folder on a disk, for what does not fit into the host's memory. Nothing stays in it.
        device: Whose memory is limited. `cuda`, or `cuda:1`: a GPU's, and what does not fit waits in the
            host's, which must have the room.

    Returns:
        What takes on your model and optimizer (`adopt`), and says what a step costs (`plan`).

    Raises:
        CarmeRuntimeError: The limit is not a size of memory, or there is no such device.
    """
    if str(device) != "cpu":
        if spill is not None:
            raise CarmeRuntimeError(
                "What does not fit into a GPU waits in the memory of the host, and a spill folder was given.",
                "Leave spill out, or leave device out to limit the memory of the host.",
            )
        from carme_runtime.out_of_core.gpu import GpuBudget

        return GpuBudget(limit, device)
    if spill is None:
        raise CarmeRuntimeError(
            "There is no folder for what does not fit into memory.", "Give spill=, a folder on a local disk."
        )
    from carme_runtime.out_of_core.budget import Budget

    return Budget(limit, spill)
