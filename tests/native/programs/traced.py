"""A rank that does a known number of each thing that traces show.

With `killed` rank 1 is killed in the middle, with `full` rank 0 has no room on its disk, with `many` both
do too much.

Rank 0 has sent three messages, rank 1 four, each has put twice with notifications and done seven
allreduces.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy

from carme_runtime import gaspi, profile
from carme_runtime.traces.kinds import Kind
from carme_runtime.traces.recordings import read


def collectives(file: Path) -> int:
    """How many a recording holds so far."""
    return sum(event.kind == Kind.COLLECTIVE for event in read(file).events())


with gaspi.init() as process:
    me, second = process.rank, 1 - process.rank
    everyone = process.group_all
    memory = process.segment_create(3, 4096)
    numbers = numpy.ones(1000, numpy.float32)
    plan = everyone.plan_allreduce(numbers)
    for _ in range(3):
        everyone.allreduce(numbers)
    for _ in range(2):
        plan.run()
    pending = [everyone.allreduce(numbers, asynchronous=True) for _ in range(2)]
    for each in pending:
        assert each
        each.wait()
    everyone.broadcast(numbers, 1)
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "killed":
        folder = Path(os.environ[profile.TRACE])
        while not all(collectives(file) >= 8 for file in folder.glob("*")):
            time.sleep(0.05)
        everyone.barrier()
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "full" and me == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if how in ("full", "many") and profile.recorder:
        for _ in range(20_000):
            profile.recorder.add(profile.PHASE, "forward", time.perf_counter())
    sent = [everyone.send(numpy.full(100 + n, n, numpy.uint8), second, tag=5) for n in range(3 + me)]
    for n in range(3 + second):
        got = numpy.zeros(100 + n, numpy.uint8)
        everyone.receive(got, second, tag=5).wait()
        assert got[0] == n
    for each in sent:
        each.wait()
    for n in range(2):
        process.write_notify(3, 0, second, 3, 1024, 512, notification=n)
        process.wait(0)
        assert process.notify_waitsome(3, n) == n
        assert process.notify_reset(3, n) == 1
    process.read(3, 0, second, 3, 2048, 64)
    process.wait(0)
    process.fetch_add(second, 3, 0, 1)
    if profile.recorder:
        began = time.perf_counter()
        profile.recorder.add(profile.PHASE, "forward", began)
        profile.recorder.add(profile.PIPELINE, "forward pass", began, extra=7, of=me)
        profile.recorder.add(profile.FIRING, "render", began - 0.002)
        profile.recorder.add(profile.FIRING, "shade", began - 0.001)
        profile.recorder.add(profile.TRANSFER, "spill", began, 4096)
