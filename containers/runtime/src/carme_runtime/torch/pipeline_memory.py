"""What a pipeline's ranks have: memory and speed; and what an optimizer takes of memory."""

# As in backend.py.
# pyright: reportMissingImports=false

import functools
import gc
import os
import time
from collections.abc import Sequence

import torch
from torch import nn

from carme_runtime.out_of_core import host_room, pages
from carme_runtime.pipeline import Device, Disk, Plan
from carme_runtime.pipeline.devices import devices_of_ranks, reference_ms
from carme_runtime.pipeline.memory import free_memory_of_rank
from carme_runtime.torch.pipeline_run import Run

_TIGHT = 0.5  # of a rank's memory: a stage that needs more of it
_LARGE = 128 << 10  # bytes of tensors that are mapped one by one then
_REFERENCE_ROWS = {"cpu": 256, "cuda": 2048}  # of the matrices with which devices are compared


def free_memory(model: nn.Module, run: Run) -> list[int]:
    """What each rank has for a stage: of the job's limit, without what the job's processes take already.

    With a limit of memory in force, it is what that leaves for tensors. All ranks call it together.

    Returns:
        Bytes by rank; 0 on all where one does not know.
    """
    tensors, held = [*model.parameters(), *model.buffers()], _bytes_of(model)
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda":
        sharing = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())
        return run.gathered(torch.cuda.mem_get_info(device)[0] // sharing + held)
    pages.trim()
    run.minimum(0)  # each rank counts what all have taken, when none measures any more
    room = host_room()
    free = run.gathered((free_memory_of_rank(held) if room is None else room.bytes) or 0)
    return free if all(free) else [0] * len(free)


def spare_memory(model: nn.Module, run: Run) -> int:
    """Bytes that every rank may take besides the whole model, which it has. All ranks call it together.

    Returns:
        0 where one does not know.
    """
    return max(min(free_memory(model, run)) - _bytes_of(model), 0)


def _bytes_of(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def devices_of(run: Run, memories: Sequence[int], device: torch.device) -> tuple[Device, ...]:
    """What each rank has, by the same work on all; empty where they are alike. All ranks call it together.

    Args:
        run: The ranks.
        memories: Bytes for a stage, by rank.
        device: That of the model here.
    """
    if run.size == 1:
        return ()
    run.minimum(0)  # ranks that share cores work at the same time, as they will in training
    nanoseconds = run.gathered(max(int(1e6 * _reference_ms(device)), 1))
    return devices_of_ranks(nanoseconds, memories, [run.context.node_of(rank) for rank in range(run.size)])


@functools.cache
def _reference_ms(device: torch.device) -> float:
    """Measured once in a process."""
    rows = _REFERENCE_ROWS[device.type]
    matrix = torch.full((rows, rows), 1 / rows, device=device)

    def work() -> None:
        torch.relu(matrix @ matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        return reference_ms(work, time.thread_time if device.type == "cpu" else time.perf_counter)


def disk_of(run: Run) -> Disk | None:
    """Where what does not fit can go: the spill folder of a limit that is in force on all ranks."""
    room = host_room()
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    # Ranks of one node share its disk. Whole bytes, as ranks compare whole numbers.
    rates = (int(room.read_rate) // ranks, int(room.write_rate) // ranks) if room else (0, 0)
    read_rate, write_rate = run.minimum(rates[0]), run.minimum(rates[1])
    return Disk(read_rate, write_rate) if read_rate and write_rate else None


def save_memory(planned: Plan, stage: int, model: nn.Module) -> None:
    """Give back what other stages have, and let a stage that fits tightly take only what it needs.

    Traced and measured models lie in cycles of references, and hold the weights of all stages until those are
    collected. The C library keeps freed tensors in a heap, whose holes may take as much again. From now on
    tensors are mappings of their own then, which go back to the kernel when they are freed. That costs time.
    """
    gc.collect()
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return
    if planned.memory and planned.stages[stage].memory_bytes > _TIGHT * planned.memory_of(stage):
        pages.map_large_blocks(_LARGE)
    pages.trim()


def state_factor(optimizer: torch.optim.Optimizer) -> float:
    """Bytes that an optimizer keeps for each byte of a parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        return float(any(group.get("momentum") for group in optimizer.param_groups))
    return 2.0 + any(group.get("amsgrad", False) for group in optimizer.param_groups)
