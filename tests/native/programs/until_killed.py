"""Collectives of all kinds until a rank is lost; then ends with code 17 and the error's text.

Arguments: a seed, the milliseconds that a collective may take, and `go-on` if who is left makes a new group.
"""

import sys
import time

import numpy as np

from carme_runtime import gaspi
from patience import HANG

go_on, limit = "go-on" in sys.argv, int(sys.argv[2])
process = gaspi.init(HANG)
rank, size, group = process.rank, process.size, process.group_all
segment = process.segment_create(0, 4 << 20)
random = np.random.default_rng(int(sys.argv[1]))
print("ready", flush=True)
try:
    while True:
        count = int(random.choice([1, 1000, 30_000, 300_000]))
        kind = int(random.integers(0, 7))
        array = segment.array("float32", 0, count) if kind == 0 else np.ones(count, np.float32)
        if kind <= 1:
            group.allreduce(array, timeout=limit)
        elif kind == 2:
            group.broadcast(array, int(random.integers(0, size)), timeout=limit)
        elif kind == 3:
            group.allgather(np.zeros(count * size, np.float32), array, timeout=limit)
        elif kind == 4:
            group.reduce_scatter(
                np.zeros(count, np.float32), np.ones(count * size, np.float32), timeout=limit
            )
        elif kind == 5:
            group.alltoall(np.zeros(count * size), np.zeros(count * size), timeout=limit)
        else:
            group.barrier(timeout=limit)
except (gaspi.PeerLost, gaspi.Timeout) as error:
    print(type(error).__name__, error, flush=True)
if go_on:
    end = time.monotonic() + HANG
    while gaspi.State.CORRUPT not in process.state_vector() and time.monotonic() < end:
        time.sleep(0.01)
    alive = [r for r, state in enumerate(process.state_vector()) if state == gaspi.State.HEALTHY]
    survivors = process.group(alive, timeout=round(1000 * HANG))
    array = np.array([rank], np.int64)
    survivors.allreduce(array, timeout=round(1000 * HANG))
    assert array[0] == sum(alive) and len(alive) == size - 1
    survivors.barrier(timeout=round(1000 * HANG))
    print("went on", flush=True)
sys.stdout.flush()
process.close(wait=False)
sys.exit(17)
