"""How `torch.distributed` gets to know the backend, and how it makes a group of it."""

# As in backend.py.
# pyright: reportMissingImports=false

import functools
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from carme_runtime import hangs
from carme_runtime.collectives import Group
from carme_runtime.gaspi import rendezvous
from carme_runtime.gaspi.joining import join
from carme_runtime.torch import choice
from carme_runtime.torch.backend import NAME, ProcessGroupCarme
from carme_runtime.torch.works import milliseconds

__all__ = ["register"]

_JOIN_SECONDS = 600.0
_WAITING_IN = str(Path(dist.__file__).parent) + os.sep
_contexts: list[Any] = []  # the core's, which others may need until this process ends


def register() -> None:
    """Make the backend known to torch. Does nothing when it is known already."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _offer_monitored_barrier()
        choice.apply()


def _offer_monitored_barrier() -> None:
    """torch's function refuses all groups but Gloo's; let it take those of this backend, too."""
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ProcessGroupCarme):
            return original(group, timeout, wait_all_ranks)
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        return chosen.monitored_barrier(timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def _create(options: Any, _: Any) -> ProcessGroupCarme:
    world = dist.group.WORLD  # None while this makes it
    timeout: timedelta = options.timeout
    seconds = hangs.limit()
    alone = not isinstance(world, ProcessGroupCarme)
    if alone:
        # Beside a group of another backend the members join each other, and count themselves.
        ranks = list(range(options.group_size))
        context = _join(options.store, options.group_rank, options.group_size, timeout)
        if world is None:  # those of a run that this process has left
            _contexts.clear()
        _contexts.append(context)
    else:
        ranks, context = list(options.global_ranks_in_group), world.context
    group = Group(context, ranks, milliseconds(timeout))
    if not torch.cuda.is_available():
        process_group = ProcessGroupCarme(context, group, ranks, timeout)
    else:
        from carme_runtime.torch.gpus import GpuProcessGroup

        staging = Group(context, ranks, milliseconds(timeout))
        process_group = GpuProcessGroup(context, group, staging, ranks, timeout, options.store)
    if alone:
        process_group.watch = hangs.watch(process_group, group, seconds, (_WAITING_IN,))
    return process_group


def _join(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    def exchange(entry: rendezvous.Entry) -> list[rendezvous.Entry]:
        store.set(f"rank{rank}", json.dumps(entry))
        return [json.loads(store.get(f"rank{r}")) for r in range(size)]

    key_file = os.environ.get("CARME_KEY_FILE")
    return join(
        rank,
        size,
        exchange,
        rendezvous.read_key(key_file) if key_file else None,
        os.environ.get("CARME_ADDRESS"),
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        min(timeout.total_seconds(), _JOIN_SECONDS),
    )
