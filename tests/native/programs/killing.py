"""Rank 0 ends rank 1; the others see that it is gone, and go on in a group without it.

Arguments: `stopped` where rank 1 was stopped before, and `elsewhere` where it is on another node.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from carme_runtime import gaspi

stopped, elsewhere = "stopped" in sys.argv, "elsewhere" in sys.argv
process = gaspi.init(30)
rank, size = process.rank, process.size
pids = np.zeros(size, np.int64)
process.group_all.allgather(pids, np.array([os.getpid()]))
# What a rank has sent may not have left it yet: who says so has all of it.
if rank == 1:
    for _ in range(size - 1):
        process.passive_receive()
else:
    process.passive_send(1, b"go")
# Nobody waits for an answer of rank 1 when it ends.
if rank == 0:
    for _ in range(size - 2):
        process.passive_receive()
elif rank != 1:
    process.passive_send(0, b"done")
if rank == 0:
    for peer in (size, rank):
        try:
            process.kill(peer)
        except gaspi.InvalidCall as error:
            assert error.message.endswith(".") and error.remedy.endswith("."), error
        else:
            raise AssertionError("a mistake was not refused")
    assert all(process.ping(peer) for peer in range(size))
    if stopped:
        while ") T " not in Path(f"/proc/{pids[1]}/stat").read_text():
            time.sleep(0.01)
    if stopped and elsewhere:
        begin = time.monotonic()
        try:
            process.kill(1, timeout=300)
        except gaspi.Timeout as error:
            assert "Rank 1 did not end in time." in str(error)
            assert 0.25 < time.monotonic() - begin < 5
        else:
            raise AssertionError("a rank that was stopped has ended")
        assert process.ping(1)
        os.kill(int(pids[1]), signal.SIGCONT)
    process.kill(1, timeout=20_000)
    assert not process.ping(1)
    process.kill(1)  # it has ended: no action is needed
elif rank == 1 and stopped:
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    process.passive_receive()  # nobody sends to it
end = time.monotonic() + 30
while process.ping(1) and time.monotonic() < end:
    time.sleep(0.01)
rest = [gaspi.State.HEALTHY] * (size - 2)
assert process.state_vector() == [gaspi.State.HEALTHY, gaspi.State.CORRUPT, *rest]
alive = [peer for peer in range(size) if peer != 1]
survivors = process.group(alive, timeout=10_000)
array = np.array([rank], np.int64)
survivors.allreduce(array, timeout=10_000)
assert array[0] == sum(alive)
survivors.barrier(timeout=10_000)
process.close(wait=False)
