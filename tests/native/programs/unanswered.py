"""Rank 1 is stopped and killed before it has answered a read of rank 0, which goes on with rank 2."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from carme_runtime import gaspi

process = gaspi.init(30)
rank = process.rank
segment = process.segment_create(0, 4096)
pids = np.zeros(process.size, np.int64)
process.group_all.allgather(pids, np.array([os.getpid()]))
# What a rank has sent may not have left it yet: who says so has all of it.
if rank == 1:
    for _ in range(process.size - 1):
        process.passive_receive()
else:
    process.passive_send(1, b"go")

if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
elif rank == 0:
    while ") T " not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    process.read(0, 0, 1, 0, 0, 64)
    os.kill(int(pids[1]), signal.SIGKILL)
    try:
        process.wait(timeout=60_000)
    except gaspi.PeerLost as error:
        assert "Rank 1 was lost during waiting for queue 0" in error.message, error
    # Else the simulated library, which has one host's memory before it, has read that of a rank as it ended.
    segment.array()[:64] = 7
    process.write(0, 0, 2, 0, 0, 64)
    begin = time.monotonic()
    try:
        process.wait()
    except gaspi.PeerLost as error:
        assert "Rank 1 was lost during waiting for queue 0" in error.message, error
    assert time.monotonic() - begin < 60
    process.write_notify(0, 0, 2, 0, 64, 64, notification=3, queue=1)
    process.wait(1, timeout=60_000)
else:
    process.notify_waitsome(0, 3, timeout=60_000)
    assert (segment.array()[64:128] == 7).all()
process.close(wait=False)
