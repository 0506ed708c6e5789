"""Rank 0 ends rank 1; the others see that it is gone, and go on in a group without it."""

import sys
import time

import numpy as np

from carme_runtime import gaspi

process = gaspi.init(30)
rank, size = process.rank, process.size
elsewhere = [int(other) for other in sys.argv[1:]]  # ranks on another node than rank 0
process.barrier()
if rank == 0:
    for other in (size, *elsewhere):
        try:
            process.kill(other)
        except gaspi.InvalidCall as error:
            assert error.message.endswith(".") and error.remedy.endswith("."), error
        else:
            raise AssertionError("a mistake was not refused")
    assert all(process.ping(other) for other in range(size))
    process.kill(1)
elif rank == 1:
    process.passive_receive()  # nobody sends to it
end = time.monotonic() + 30
while process.ping(1) and time.monotonic() < end:
    time.sleep(0.01)
others = [gaspi.State.HEALTHY] * (size - 2)
assert process.state_vector() == [gaspi.State.HEALTHY, gaspi.State.CORRUPT, *others]
alive = [other for other in range(size) if other != 1]
survivors = process.group(alive, timeout=10_000)
array = np.array([rank], np.int64)
survivors.allreduce(array, timeout=10_000)
assert array[0] == sum(alive)
survivors.barrier(timeout=10_000)
process.close(wait=False)
