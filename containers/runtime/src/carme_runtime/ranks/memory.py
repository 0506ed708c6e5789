"""Memory of a process from the NUMA nodes of its cores alone, as `numactl --membind` does it.

Linux keeps the policy per thread, and a process that a thread starts inherits it.
"""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.ranks.cores import numa_nodes

# Of set_mempolicy and get_mempolicy; from the kernel's tables of system calls.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236), "riscv64": (237, 236), "ppc64le": (261, 260)}
_BIND = 2  # MPOL_BIND
_NODES = 1024  # that a kernel can have at most
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_NODES // _WORD)
NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def bound(cores: Iterable[int]) -> Iterator[None]:
    """This thread, and so what it starts, gets memory of the NUMA nodes of `cores`, and no other.

    Where the kernel refuses it and the machine has one NUMA node, that node's memory is all there is.

    Raises:
        CarmeRuntimeError: The kernel refuses it, and the machine has several.
    """
    mask = _Mask()
    for node in numa_nodes(cores):
        mask[node // _WORD] |= 1 << node % _WORD
    before, before_mask = ctypes.c_int(), _Mask()
    try:
        if not any(mask):
            raise OSError(0, "the kernel names no NUMA nodes")
        _call(1, ctypes.byref(before), before_mask, _NODES, None, 0)
        _call(0, _BIND, mask, _NODES + 1)
    except OSError as error:
        if len(list(NODES.glob("node[0-9]*"))) <= 1:
            yield
            return
        raise CarmeRuntimeError(
            f"Memory cannot be bound to NUMA nodes: {error.strerror}.",
            "Leave --pin-memory out, or let the site allow set_mempolicy in its containers.",
        ) from None
    try:
        yield
    finally:
        _call(0, before.value, before_mask, _NODES + 1)


def _call(index: int, *arguments: object) -> None:
    if platform.machine() not in _CALLS:
        raise OSError(0, f"not known how on {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    # A call of unknown arguments would take whole numbers for C's int.
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    if call(ctypes.c_long(_CALLS[platform.machine()][index]), *wide) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
