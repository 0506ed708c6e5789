"""A thousand models, one after the other in one process, as a search for good settings trains them.

Argument: the API, `parallelize` or `horovod`. The memory of the process must not grow.
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false
# pyright: reportPossiblyUnboundVariable=false

import re
import sys
from pathlib import Path

import torch
from torch import nn

import carme_runtime.horovod as hvd
import carme_runtime.torch as carme

face = sys.argv[1]
ROUNDS, WIDTH = 1000, 160
torch.set_num_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()


def resident() -> int:
    """MiB of memory that this process uses, without what it shares."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) // 1024


def segments() -> int:
    """Segments of all ranks that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:carme-segment")


before = 0
for number in range(ROUNDS):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if face == "parallelize":
        carme.parallelize(model, optimizer)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    (model(torch.full((1, WIDTH), float(rank))) * 1e-3).sum().backward()
    optimizer.step()
    if number == ROUNDS // 3:
        before = resident()
assert resident() < before + 24, f"{before} MiB after a third, {resident()} MiB at the end"
assert segments() < 40 * size, segments()
everyone = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert (everyone == everyone[0]).all(), "the ranks have drifted apart"
hvd.shutdown()
