"""Ranks measure their machine while they compute something of their own; each says how often it did.

The second argument says for how many seconds a pass waits on top.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from carme_runtime.scaling.machines import machine_of
from carme_runtime.torch.pipeline_run import Run

left, right = torch.randn(64, 64), torch.randn(64, 64)
calls, pause = 0, float(sys.argv[2])


def compute() -> None:
    global calls
    calls += 1
    left.matmul(right)
    time.sleep(pause)


run = Run()
found = machine_of(run, int(sys.argv[1]), compute)
print(f"calls {calls} host {found.host_ms_per_mib}, {os.environ['RANK']}", flush=True)
dist.destroy_process_group()
