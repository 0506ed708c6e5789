"""Who takes part, and where."""

# As in torch/backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import os
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.gaspi import launchers
from carme_runtime.gaspi.joining import node_name, own_address
from carme_runtime.horovod.journal import Journal
from carme_runtime.torch import backend

_TIMEOUT = timedelta(minutes=10)  # to join


@dataclass
class World:
    """The run as this rank knows it."""

    rank: int
    size: int
    local_ranks: list[int]  # by rank
    local_size: int
    local_sizes: list[int]  # by rank
    journal: Journal | None  # None where there is one rank
    started: bool  # whether `init` joined torch's process group, and `shutdown` leaves it
    # By number, as long as somebody uses them: ranks count alike.
    optimizers: "weakref.WeakValueDictionary[int, Any]" = field(default_factory=weakref.WeakValueDictionary)
    optimizers_created: int = 0
    process_sets: dict[int, Any] = field(default_factory=dict)
    process_sets_created: int = 0
    names: dict[Any, Any] = field(default_factory=dict)  # of operations under way, see `handles.Name`


_world: World | None = None


def init() -> None:
    """Join the run that carme-run, torchrun or the like describes in the environment; again: nothing."""
    global _world
    if _world is not None:
        return
    started = not dist.is_initialized()
    launchers.complete()
    if started and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend.NAME, timeout=_TIMEOUT)
    elif started:
        dist.init_process_group(backend.NAME, store=dist.HashStore(), rank=0, world_size=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    local = os.environ.get("LOCAL_RANK")
    reported: list[Any] = [None] * size
    dist.all_gather_object(reported, (_node(), None if local is None else int(local)))
    nodes = [node for node, _ in reported]
    local_ranks = [
        nodes[:index].count(node) if local_rank is None else local_rank
        for index, (node, local_rank) in enumerate(reported)
    ]
    local_sizes = [nodes.count(node) for node in nodes]
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_sizes[rank]))
    journal = Journal() if size > 1 else None
    _world = World(rank, size, local_ranks, local_size, local_sizes, journal, started)


def _node() -> str:
    address = os.environ.get("CARME_ADDRESS") or own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    return node_name(address)


def shutdown() -> None:
    """Leave the run."""
    global _world
    if _world is not None and _world.started and dist.is_initialized():
        dist.destroy_process_group()
    _world = None


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _world is not None


def world() -> World:
    """Raises InvalidCall before `init`."""
    if _world is None:
        raise InvalidCall("The run was not joined yet.", "Call hvd.init() first.")
    return _world


def rank() -> int:
    """The number of this rank."""
    return world().rank


def size() -> int:
    """How many ranks there are."""
    return world().size


def local_rank() -> int:
    """The number of this rank on its node."""
    return world().local_ranks[rank()]


def local_size() -> int:
    """How many ranks this node has."""
    return world().local_size


def cross_rank() -> int:
    """The number of this rank's node, among nodes that have a rank of this local number."""
    return world().local_ranks[: rank()].count(local_rank())


def cross_size() -> int:
    """How many nodes have a rank of this local number."""
    return world().local_ranks.count(local_rank())


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of ranks."""
    return len(set(world().local_sizes)) == 1


# What Horovod was built with, and runs on. Here the runtime's own core is in the place of all that.


def mpi_built() -> bool:
    """False: the core does without MPI."""
    return False


def mpi_enabled() -> bool:
    """False, as `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """False: this is not a program of MPI, unless it starts MPI by itself."""
    return False


def gloo_built() -> bool:
    """False: the core does without Gloo."""
    return False


def gloo_enabled() -> bool:
    """False, as `gloo_built`."""
    return False


def nccl_built() -> int:
    """The version of the NCCL that tensors on GPUs may go through, as 22703 for 2.27.3; 0 without any."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    from torch.cuda import nccl

    major, minor, patch = nccl.version()[:3]
    return 10000 * major + 100 * minor + patch


def cuda_built() -> bool:
    """Whether PyTorch knows NVIDIA's GPUs."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether PyTorch knows AMD's GPUs."""
    return torch.version.hip is not None


def ccl_built() -> bool:
    """False: there is no oneCCL."""
    return False


def ddl_built() -> bool:
    """False: there is no DDL."""
    return False
