"""Ranks that save without a pause are killed at any moment; each time the newest checkpoint is whole."""

# pyright: reportMissingImports=false, reportOptionalSubscript=false

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from free_ports import free_port

import carme_runtime.torch  # noqa: F401
from carme_runtime.checkpoint import Checkpoints

folder, seed, attempts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(seed)
torch.set_num_threads(1)


def state(step):
    return {"weights": torch.full((500_000,), float(step)), "more": [torch.tensor(step), {"step": step}]}


def train(rank, size, port, reports):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    dist.init_process_group("carme")
    checkpoints = Checkpoints(folder, keep=2)
    loaded = checkpoints.load()
    step = loaded[0] if loaded else 0
    os.write(reports, b"0\n")
    while True:
        step += 1
        checkpoints.save(step, **state(step)).wait()
        if rank == 0:
            os.write(reports, f"{step}\n".encode())


before, advanced, awaited = 0, 0, 0
for attempt in range(attempts):
    size = choose.randint(1, 3)
    port = free_port()
    listen, send_end = os.pipe()
    ranks = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.close(listen)
            try:
                train(rank, size, port, send_end)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        ranks.append(pid)
    os.close(send_end)
    reported = b""
    steps = choose.randint(0, 2)  # however long they take
    while reported.count(b"\n") < size + steps:  # all have begun, and reported as many
        part = os.read(listen, 65536)
        assert part, "the ranks ended by themselves"
        reported += part
    time.sleep(choose.uniform(0, 0.15))
    choose.shuffle(ranks)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        time.sleep(choose.choice((0, 0.01)))
    for pid in ranks:
        os.waitpid(pid, 0)
    while part := os.read(listen, 65536):
        reported += part
    os.close(listen)
    committed = max(before, *map(int, reported.split()))
    loaded = Checkpoints(folder, keep=2).load()
    step, found = loaded or (0, state(0))
    # Committed, and perhaps not yet reported.
    assert step in (committed, committed + 1), (seed, attempt, committed, step)
    expected = state(step)
    assert torch.equal(found["weights"], expected["weights"]), (seed, attempt)
    assert found["more"] == expected["more"]
    advanced += step > before
    awaited += steps > 0
    before = step
assert advanced >= awaited, (advanced, awaited, attempts)
Checkpoints(folder, keep=2).save(before + 1, **state(before + 1)).wait()
left = list(Path(folder).glob(".*"))
assert not left, left
print("KILLED", attempts, "STEPS", before)
