"""A barrier that names who did not come.

Arguments: which rank that is; late or lost; a folder in which those that were left alone say so.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401
from carme_runtime.gaspi import PeerLost, Timeout
from patience import HANG

missing, how, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group("carme", timeout=timedelta(seconds=HANG))
rank, size = dist.get_rank(), dist.get_world_size()
for _ in range(3):
    dist.monitored_barrier()
dist.monitored_barrier(wait_all_ranks=True, timeout=timedelta(seconds=HANG))


def wait_for_others():
    end = time.monotonic() + HANG
    while {path.name for path in folder.iterdir()} != {str(r) for r in range(size) if r != missing}:
        assert time.monotonic() < end
        time.sleep(0.02)


if rank == missing and how == "lost":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == missing:
    wait_for_others()
try:
    dist.monitored_barrier(
        timeout=timedelta(seconds=HANG if how == "lost" else 5), wait_all_ranks=how == "lost"
    )
except RuntimeError as error:
    print("ERROR", error, flush=True)
    assert isinstance(error, PeerLost if how == "lost" else Timeout), repr(error)
else:
    # The first member decides; when it comes last, all others have come.
    assert rank == missing == 0
if rank != missing:
    (folder / str(rank)).touch()
if how == "lost":
    wait_for_others()
    os._exit(17)  # without the one that was lost nobody can leave together

dist.monitored_barrier()  # the group is as good as before
dist.all_reduce(tensor := torch.ones(3))
assert (tensor == size).all()
backwards = dist.new_group(list(reversed(range(size))))
dist.monitored_barrier(backwards, timedelta(seconds=HANG))
rank_0 = dist.new_group([0])
dist.monitored_barrier(rank_0)  # torch warns those who are not in it
dist.barrier()
dist.destroy_process_group()
