"""A training run that loses rank 1 once, in the middle; carme-run starts the others anew."""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import os
import signal
from typing import Any

import torch

import carme_runtime.horovod as hvd
from carme_runtime.checkpoint import files

read: Any = files.read


def counted(*arguments: Any) -> Any:
    """Says which rank reads a checkpoint."""
    print(f"READ by {hvd.rank()}", flush=True)
    return read(*arguments)


files.read = counted
EPOCHS, LOST_AT = 8, 5
torch.set_num_threads(1)
hvd.init()
start = int(os.environ["CARME_RESTARTS"])
torch.manual_seed(hvd.rank())  # `run` gives all ranks rank 0's weights
data = torch.arange(24.0)[:, None]
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5))
sampler = hvd.elastic.ElasticSampler(data, seed=3)
seen: list[str] = []


@hvd.elastic.run
def train(state):
    print(f"BEGAN start {start} epoch {state.epoch} of {hvd.size()}, loss {state.loss:.6f}", flush=True)
    for epoch in range(state.epoch, EPOCHS):
        for number, indices in enumerate(torch.tensor(list(sampler)).split(4)):
            optimizer.zero_grad()
            x = data[indices]
            loss = (model(x) - 2 * x - 1).square().mean()
            loss.backward()
            optimizer.step()
            sampler.record_batch(number, 4)
            state.loss = float(hvd.allreduce(loss.detach()))
        if start == 0 and hvd.rank() == 1 and epoch == LOST_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        sampler.set_epoch(epoch + 1)
        state.epoch = epoch + 1
        state.commit()


class Committed(hvd.elastic.TorchState):
    commit_seconds = 0.0


state: Any = Committed(model=model, optimizer=optimizer, sampler=sampler, epoch=0, loss=float("inf"))
state.register_reset_callbacks([lambda: seen.append("reset")])
train(state)
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
assert (weights == weights[0]).all()
left = sorted(hvd.allgather(torch.tensor(sampler.indices)).tolist())
assert left == list(range(24)), left
print(f"ENDED with {hvd.size()} ranks, callbacks {seen}, loss {state.loss:.6f}")
hvd.shutdown()
