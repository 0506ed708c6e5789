"""Training in less memory than it needs: tensors that do not fit are blocks of a file, and come back in time.

What needs PyTorch is imported when it is asked for.
"""

import sys

from carme_runtime.out_of_core.plan import Plan

__all__ = ["Plan", "limits_host"]


def limits_host() -> bool:
    """Whether a limit of the host's memory is in force in this process."""
    budget = sys.modules.get("carme_runtime.out_of_core.budget")
    return budget is not None and budget.limits_host()
