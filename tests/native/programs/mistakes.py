"""Ranks that do not agree get an error that says so."""

import sys
import time

import numpy as np

from carme_runtime import gaspi
from patience import HANG

LONG = round(1000 * HANG)  # milliseconds: who disagrees hears of it, and waits for nothing
kind = sys.argv[1]
process = gaspi.init(HANG)
group, odd = process.group_all, process.rank == 1
# The mistake of a rank ends the group for all, also for those whose `init` has not returned yet.
if odd:
    for _ in range(process.size - 1):
        process.passive_receive(LONG)
else:
    process.passive_send(1, b"begun", LONG)
try:
    if kind == "size":
        group.allreduce(np.zeros(1000 if odd else 2000, np.float32), label="weights", timeout=LONG)
    elif kind == "type":
        group.allreduce(np.zeros(1000, np.int32 if odd else np.float32), timeout=LONG)
    elif kind == "order":
        array = np.zeros(50_000, np.float32)
        group.broadcast(array, 0, timeout=LONG) if odd else group.allreduce(array, timeout=LONG)
    elif kind == "wire":
        group.allreduce(np.zeros(50_000, np.float32), timeout=LONG, wire="int8" if odd else "bf16")
    elif kind == "alltoall":
        counts = [5] * process.size
        wrong = [6 if odd else 5] * process.size
        group.alltoall(np.zeros(sum(counts)), np.zeros(sum(wrong)), counts, wrong, timeout=LONG)
    elif kind == "late":
        if odd:
            time.sleep(1)
        else:
            group.allreduce(np.zeros(9, np.float32), timeout=200)
except gaspi.GaspiError as error:
    print(type(error).__name__, error)
else:
    print("no error")
process.close(wait=False)
