"""Which backend scripts get from `init_process_group`, where the one who starts them says so.

Libraries above PyTorch choose among the backends that they know, and scripts name one. With
CARME_TORCH_BACKEND, which `carme-run --torch-backend` sets, both stay as they are.
"""

# As in backend.py.
# pyright: reportMissingImports=false

import functools
import os
import re
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.logs import log
from carme_runtime.transports import TORCH_BACKEND

_REPLACED = ("gloo", "nccl", "mpi", "ucc")


def apply() -> None:
    """Let `init_process_group` use the backend of CARME_TORCH_BACKEND, if there is one."""
    chosen = os.environ.get(TORCH_BACKEND)
    if not chosen:
        return
    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *arguments: Any, **keywords: Any) -> None:
        if chosen not in dist.Backend.backend_list:
            raise InvalidCall(
                f"{TORCH_BACKEND}={chosen} is not a backend of torch.distributed.",
                f"Choose from {', '.join(dist.Backend.backend_list)}.",
            )
        if _is_replaced(backend):
            log.info(
                "init_process_group gets the backend %s instead of %s.", chosen, backend or "its own choice"
            )
            backend = chosen
        return original(backend, *arguments, **keywords)

    for module in (dist, distributed_c10d, device_mesh):
        if getattr(module, "init_process_group", None) is original:
            setattr(module, "init_process_group", init_process_group)  # noqa: B010  (not in the stubs of all)


def _is_replaced(backend: str | None) -> bool:
    """Whether it is one that carries data between ranks, or one for each device: `cpu:gloo,cuda:nccl`."""
    return backend is None or any(name in _REPLACED for name in re.split("[:,]", backend.lower()))
