"""Rank 1 is stopped: calls over GPI-2 that need it to take messages end in time, and it learns that."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from carme_runtime import gaspi

process = gaspi.init(30)
rank = process.rank
pids = np.zeros(process.size, np.int64)
process.group_all.allgather(pids, np.array([os.getpid()]))
spare = process.group(range(process.size))
# What a rank has sent may not have left it yet: who says so has all of it.
if rank == 1:
    for _ in range(process.size - 1):
        process.passive_receive()
else:
    process.passive_send(1, b"go")
values = np.full(4 << 20, rank + 1, np.float32)

if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        process.group_all.allreduce(values, timeout=20_000)
    except gaspi.PeerLost as error:
        assert "Rank 0 gave up: Rank 1 did not come to allreduce" in error.message, error
    else:
        raise AssertionError("rank 0 had given up")
else:
    while ") T " not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    for call in (
        lambda: process.group_all.allreduce(values, timeout=200),
        lambda: process.passive_send(1, bytes(1 << 20), timeout=200),
    ):
        begin = time.monotonic()
        try:
            call()
        except gaspi.Timeout as error:
            assert "Rank 1" in error.message, error
        else:
            raise AssertionError("nobody was there to take it")
        assert time.monotonic() - begin < 60
    assert process.ping(1) and process.state_vector() == [gaspi.State.HEALTHY] * 2
    os.kill(int(pids[1]), signal.SIGCONT)

# What was given up leaves nothing behind that others could take for theirs.
values[:] = rank + 1
spare.allreduce(values, timeout=20_000)
assert (values == 3).all()
if rank == 0:
    process.passive_send(1, b"all", timeout=20_000)
else:
    assert process.passive_receive(timeout=20_000) == (0, b"all")
spare.barrier(timeout=20_000)
process.close(wait=False)
