"""Rank 1, on another node, is stopped: every call that needs it ends in time, and goes on when it goes on."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from carme_runtime import gaspi

process = gaspi.init(30)
rank = process.rank
segment = process.segment_create(0, 1 << 20)
words = segment.array("uint64")
pids = np.zeros(process.size, np.int64)
process.group_all.allgather(pids, np.array([os.getpid()]))
process.segment_alloc(1, 64)
process.barrier()


def expires(call, limit):
    """The call takes `limit` milliseconds, and then says what did not come."""
    begin = time.monotonic()
    try:
        call(limit)
    except gaspi.Timeout as error:
        assert error.message.endswith(".") and error.remedy.endswith("."), error
    else:
        raise AssertionError("nobody was there to answer")
    took = time.monotonic() - begin
    assert limit / 1000 - 0.01 <= took < limit / 1000 + 60, took


if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    while ") T " not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    words[:8] = 7
    process.write(0, 0, 1, 0, 64, 64)
    sent = 0

    def send_until_all_is_full(limit):
        """Systems keep some messages for a rank that takes none."""
        global sent
        while sent < 256:
            process.passive_send(1, bytes(1 << 20), timeout=limit)
            sent += 1

    for limit in (gaspi.TEST, 200):
        expires(lambda limit: process.wait(0, timeout=limit), limit)
        expires(lambda limit: process.fetch_add(1, 0, 0, 1, timeout=limit), limit)
        expires(lambda limit: process.compare_swap(1, 0, 8, 0, 5, timeout=limit), limit)
        expires(lambda limit: process.segment_register(1, 1, timeout=limit), limit)
    begin = time.monotonic()
    try:
        send_until_all_is_full(200)
    except gaspi.Timeout as error:
        assert "Rank 1 took no message in time." in str(error)
    else:
        raise AssertionError("a rank that is stopped took 256 MiB")
    assert time.monotonic() - begin < 60
    assert process.ping(1) and process.state_vector() == [gaspi.State.HEALTHY] * 2
    os.kill(int(pids[1]), signal.SIGCONT)
    # Called again they go on.
    process.wait(0, timeout=20_000)
    assert process.fetch_add(1, 0, 16, 3, timeout=20_000) == 0
    assert process.compare_swap(1, 0, 24, 0, 9, timeout=20_000) == 0
    process.segment_register(1, 1, timeout=20_000)
    process.passive_send(1, b"all", timeout=20_000)
if rank == 1:
    got = 0
    while (message := process.passive_receive(timeout=20_000)) != (0, b"all"):
        assert message == (0, bytes(1 << 20))
        got += 1
    assert got
    assert (words[8:16] == 7).all() and words[2] == 3 and words[3] == 9
    # What was requested in vain was done when this rank went on.
    assert words[0] == 2 and words[1] == 5
    assert process.segment_size(1, 0) == 64
process.barrier(timeout=20_000)
process.close()
