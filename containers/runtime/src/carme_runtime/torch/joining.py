"""How a script that names no process group joins the other ranks, and how they compare their models."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout

from carme_runtime import strategies
from carme_runtime.addresses import port_in_use
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import backend

__all__ = ["check_alike", "join_run"]

_JOIN = timedelta(seconds=600)


def join_run() -> None:
    """Join the ranks that the environment names, if there are any and this process has not done it.

    Raises:
        CarmeRuntimeError: Another process uses the port where they meet.
    """
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        try:
            dist.init_process_group(backend.NAME, timeout=_JOIN)
        except dist.DistNetworkError as error:
            reported = port_in_use(error, os.environ)
            if reported is None:
                raise
            if strategies.plans_only():
                strategies.refuse_plan(reported, int(os.environ.get("RANK", "0")))
            raise reported from None
        cast(backend.ProcessGroupCarme, dist.group.WORLD).set_timeout(default_pg_timeout)


def check_alike(parameters: Sequence[nn.Parameter], flag: bool) -> list[bool]:
    """Raise InvalidCall where ranks have different parameters; all ranks call it together.

    Returns:
        The flags of all ranks.
    """
    # Gradients are added up in the order in which their elements lie.
    shapes = [
        (tuple(p.shape), str(p.dtype), *([] if p.is_contiguous() else [p.stride()])) for p in parameters
    ]
    entries: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(entries, (shapes, flag))
    by_rank = [entry for entry, _ in entries]
    for rank, reported in enumerate(by_rank):
        if reported != by_rank[0]:
            differing = next(
                (i for i, (a, b) in enumerate(zip(by_rank[0], reported, strict=False)) if a != b),
                min(len(reported), len(by_rank[0])),
            )
            raise InvalidCall(
                f"The models of rank 0 and rank {rank} differ from parameter number {differing} on: "
                f"{by_rank[0][differing : differing + 1]} and {reported[differing : differing + 1]}.",
                "Build the same model on all ranks.",
            )
    return [flag for _, flag in entries]
