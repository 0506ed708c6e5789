"""What a pipeline's stages may take of memory, and what an optimizer takes of it."""

# As in backend.py.
# pyright: reportMissingImports=false

import os

import torch
from torch import nn

from carme_runtime.out_of_core import host_room, pages
from carme_runtime.pipeline import Disk, Plan
from carme_runtime.pipeline.memory import free_memory_of_rank
from carme_runtime.torch.pipeline_run import Run

_TIGHT = 0.5  # of a rank's memory: a stage that needs more of it
_LARGE = 128 << 10  # bytes of tensors that are mapped one by one then


def free_memory(model: nn.Module, run: Run) -> int | None:
    """What each rank has for a stage: of the job's limit, without what the job's processes take already.

    With a limit of memory in force, it is what that leaves for tensors. All ranks call it together.
    """
    tensors = [*model.parameters(), *model.buffers()]
    held = sum(t.numel() * t.element_size() for t in tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda":
        sharing = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())
        return run.least(torch.cuda.mem_get_info(device)[0] // sharing + held)
    pages.trim()
    run.least(0)  # each rank counts what all have taken, when none measures any more
    room = host_room()
    return run.least((free_memory_of_rank(held) if room is None else room.bytes) or 0) or None


def disk_of(run: Run) -> Disk | None:
    """Where what does not fit can go: the spill folder of a limit that is in force on all ranks."""
    room = host_room()
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    # Ranks of one node share its disk. Whole bytes, as ranks compare whole numbers.
    rates = (int(room.read_rate) // ranks, int(room.write_rate) // ranks) if room else (0, 0)
    read_rate, write_rate = run.least(rates[0]), run.least(rates[1])
    return Disk(read_rate, write_rate) if read_rate and write_rate else None


def save_memory(made: Plan, stage: int) -> None:
    """Give back what other stages have, and let a stage that fits tightly take only what it needs.

    The C library keeps freed tensors in a heap, whose holes may take as much again. From now on tensors are
    mappings of their own then, which go back to the kernel when they are freed. That costs time.
    """
    if made.memory and made.stages[stage].memory_bytes > _TIGHT * made.memory:
        pages.map_large_blocks(_LARGE)
    pages.trim()


def state_factor(optimizer: torch.optim.Optimizer) -> float:
    """Bytes that an optimizer keeps for each byte of a parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        return float(any(group.get("momentum") for group in optimizer.param_groups))
    return 2.0
