"""Runs that a process joins and leaves one after the other give back what they took from the system.

Argument: a folder in which the ranks of each run meet.
"""

# pyright: reportMissingImports=false

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401

folder = Path(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def held() -> dict[str, int]:
    """What this process holds of the system now."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # that of this list
            continue
    maps = Path("/proc/self/maps").read_text()
    return {
        "sockets": sum(link.startswith("socket:") for link in links),
        "files": len(links),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": maps.count("carme-"),
    }


before: dict[str, int] = {}
for number in range(8):
    dist.init_process_group("carme", init_method=f"file://{folder}/run-{number}", rank=rank, world_size=size)
    tensor = torch.full((5000,), float(rank + number))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(size)) + size * number).all()
    gc.collect()
    dist.barrier()
    now = held()
    if number == 2:  # what is made once has been made
        before = now
    if number > 2:
        more = {what: (before[what], count) for what, count in now.items() if count > before[what]}
        assert not more, f"after {number + 1} runs there are more than after 3: {more}"
    dist.barrier()
    dist.destroy_process_group()
