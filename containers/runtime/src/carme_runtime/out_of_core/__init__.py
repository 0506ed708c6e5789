"""Training in less memory than it needs: tensors that do not fit are blocks of a file, and come back in time.

What needs PyTorch is imported when it is asked for.
"""

from carme_runtime.out_of_core.plan import Plan

__all__ = ["Plan"]
