"""How this process keeps the memory that training frees and needs again in every step."""

# As in backend.py.
# pyright: reportMissingImports=false

import ctypes
import os
from collections.abc import Iterable

from torch import nn

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGEST_THRESHOLD = 32 << 20  # bytes; glibc takes no larger one
_LONGEST_TOP = 2**31 - 1  # bytes


def keep_freed_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Let malloc keep freed memory instead of giving it back to the kernel.

    A gradient goes into its bucket as soon as it is made, and is freed. By itself glibc then shrinks the
    heap, and the next gradient's pages come from the kernel again: a quarter of the time of a step with a
    small convolutional network. Blocks above 32 MiB can only be kept if none are mapped one by one, so that
    is done where a parameter on the host is that large. The user's own settings of malloc in the environment
    have precedence; other C libraries and other allocators are left as they are.
    """
    largest = max((p.numel() * p.element_size() for p in parameters if p.device.type == "cpu"), default=0)
    if not largest or any(name.startswith("MALLOC_") for name in os.environ):
        return
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, _LONGEST_TOP)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    if largest >= _LARGEST_THRESHOLD:
        mallopt(_M_MMAP_MAX, 0)
