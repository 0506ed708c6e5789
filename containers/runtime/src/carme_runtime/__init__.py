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


def memory(limit: int | str, spill: str | os.PathLike[str]) -> "Budget":
    """Train in less memory than a model needs; for `with`. Needs PyTorch.

    Args:
        limit: What this process may take in all, such as "2GiB".
        spill: A folder on a disk, for what does not fit. Nothing stays in it.

    Returns:
        What takes on your model and optimizer (`adopt`), and says what a step costs (`plan`).

    Raises:
        CarmeRuntimeError: The limit is not a size of memory.
    """
    from carme_runtime.out_of_core.budget import Budget

    return Budget(limit, spill)
