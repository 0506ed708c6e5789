"""Rank 1 has no memory for what a collective needs: the others, who would wait, get an error while it lives.

Argument: which collective.
"""

import resource
import sys
from pathlib import Path

import numpy as np

from carme_runtime import gaspi

LITTLE = 8 << 20
process = gaspi.init(60)
rank, everyone = process.rank, process.group_all
block = np.ones(4 << 20, np.float32)
whole = np.ones(len(block) * process.size, np.float32)

most = resource.getrlimit(resource.RLIMIT_AS)
if rank == 1:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LITTLE, most[1]))
try:
    if sys.argv[1] == "allreduce":
        everyone.allreduce(whole)
    else:
        everyone.reduce_scatter(block, whole)
except (MemoryError, gaspi.PeerLost) as error:
    print(type(error).__name__, error, flush=True)
else:
    raise AssertionError("rank 1 found memory")
finally:
    resource.setrlimit(resource.RLIMIT_AS, most)

rest = [peer for peer in range(process.size) if peer != 1]
if rank == 1:  # it stays until they have reported that they know, and so do they
    for failed in [everyone.receive(bytearray(1), peer, 0) for peer in rest]:
        assert failed.wait(60_000), "the others wait"
    for answer in [everyone.send(bytearray(1), peer, 0) for peer in rest]:
        answer.wait()
else:
    everyone.send(bytearray(1), 1, 0).wait()
    assert everyone.receive(bytearray(1), 1, 0).wait(60_000)
process.close(wait=False)
