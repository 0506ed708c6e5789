"""Rank 1 does not come to a collective in time; argument 1: what it does instead."""

# pyright: reportMissingImports=false

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import carme_runtime.torch  # noqa: F401

how = sys.argv[1]


def busy_elsewhere():
    end = time.monotonic() + 6
    while time.monotonic() < end:
        pass


def wait_for_the_others():
    dist.all_reduce(torch.ones(3))


dist.init_process_group("carme")
rank = dist.get_rank()
print("pid", os.getpid(), flush=True)
if how == "never":
    end = time.monotonic() + 4
    while True:  # together for longer than the limit, and no call for as long
        more = torch.tensor(float(time.monotonic() < end))
        dist.all_reduce(more, dist.ReduceOp.MIN)
        if not more:
            break
    dist.barrier()
    dist.destroy_process_group()
    sys.exit()
if rank == 1 and how == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
elif rank == 1:
    busy_elsewhere()
wait_for_the_others()
dist.destroy_process_group()
