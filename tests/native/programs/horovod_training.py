"""Training with `carme_runtime.horovod` against one process with the same batches; argument 1: the kind."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportMissingImports=false

import sys

import torch
from torch import nn

import carme_runtime.horovod as hvd
from carme_runtime.collectives.errors import InvalidCall

kind = sys.argv[1]
torch.set_num_threads(1)
hvd.init()
rank, size = hvd.rank(), hvd.size()
PASSES = 3 if kind in ("passes", "set passes", "early") else 1
SKIPPED = (1, 3) if kind in ("skip", "amp") else ()  # steps that come to nothing


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        trunk = torch.relu(self.trunk(x))
        return self.left(trunk) if self.calls % 2 else self.right(trunk)


class Rows(nn.Module):
    """Few rows of a table have a part in the loss."""

    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=sparse)

    def forward(self, x):
        return self.table((x[:, :4].abs() * 10).long() % 50)


def build(seed, sparse=False):
    torch.manual_seed(seed)
    if kind == "unused":
        return Branching()
    if kind == "sparse":
        return nn.Sequential(Rows(sparse), nn.Flatten(), nn.Linear(32, 8))
    return nn.Sequential(nn.Linear(32, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 8))


def make(model):
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    if kind == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


alone, model = build(7), build(7 + rank, sparse=True)
alone_optimizer, optimizer = make(alone), make(model)
early_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4) if kind == "scheduler" else None
alone_scheduler = torch.optim.lr_scheduler.StepLR(alone_optimizer, 4) if kind == "scheduler" else None
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
options = {
    "fp16": {"compression": hvd.Compression.fp16},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 4.0},
    "sparse": {"sparse_as_dense": True},
}.get(kind, {})
kind_of_optimizer = type(optimizer)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=1 if kind == "set passes" else PASSES,
    **options,
)
if kind == "set passes":
    optimizer.set_backward_passes_per_step(PASSES)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "amp")
assert isinstance(optimizer, kind_of_optimizer)
if kind != "lbfgs":
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

generator = torch.Generator().manual_seed(1)
for step in range(2 + size if kind == "join" else 6):
    alone_optimizer.zero_grad()
    (model if kind == "amp" else optimizer).zero_grad()
    passes = 2 if kind == "early" and step % 2 else PASSES
    batches = [
        [
            (torch.randn(12, 32, generator=generator), torch.randn(12, 8, generator=generator))
            for _ in range(size)
        ]
        for _ in range(passes)
    ]

    def whole():
        """What all ranks together do, in one process."""
        alone_optimizer.zero_grad()
        total = torch.zeros(())
        for shares in batches:  # noqa: B023
            for number, (x, y) in enumerate(shares):
                if kind == "join" and step > 2 + number:  # noqa: B023
                    continue  # this rank has no more data, and counts as a rank all the same
                total = total + nn.functional.mse_loss(alone(x), y) / (1 if kind == "sum" else size)
                if kind == "unused":
                    alone.calls -= 1
        if kind == "unused":
            alone.calls += 1
        total.backward()
        return total

    if kind == "lbfgs":
        alone_optimizer.step(whole)
        x, y = batches[0][rank]

        def share():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)  # noqa: B023
            loss.backward()
            return hvd.allreduce(loss.detach())

        optimizer.step(share)
        continue
    whole()
    if kind == "clip":
        nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    if step not in SKIPPED:
        alone_optimizer.step()
    if alone_scheduler:
        alone_scheduler.step()
    if kind == "join" and step > 2 + rank:
        continue
    for shares in batches:
        x, y = shares[rank]
        loss = nn.functional.mse_loss(model(x), y)
        if kind == "amp" and step in SKIPPED and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    if kind == "skip":
        optimizer.synchronize()
        if step not in SKIPPED:
            with optimizer.skip_synchronize():
                optimizer.step()
    elif kind == "amp":
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    elif kind == "clip":
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
    if early_scheduler:
        early_scheduler.step()

if kind == "join":
    last = hvd.join()
    assert last == size - 1, last  # which has the most data, and so the model that saw all of it
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
if kind == "mistakes":
    x, y = torch.randn(4, 32), torch.randn(4, 8)
    nn.functional.mse_loss(model(x), y).backward()
    try:
        optimizer.zero_grad()
    except InvalidCall as error:
        assert "zero_grad" in str(error)
    else:
        raise AssertionError("gradients under way can be dropped")
    try:
        nn.functional.mse_loss(model(x), y).backward()
    except InvalidCall as error:
        assert "backward_passes_per_step" in str(error)
    else:
        raise AssertionError("two passes for one step")
    for wrong in (
        {"named_parameters": [("a", model[0].weight)]},
        {"named_parameters": [("a", p) for p in model.parameters()]},
        {"op": hvd.Max},
        {"op": hvd.Adasum},
        {"backward_passes_per_step": 0},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
    ):
        try:
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), **wrong)
        except ValueError:  # Horovod's own
            continue
        raise AssertionError(wrong)
    # As when a cell of a notebook is run again: the second one reduces, and the first one is what it was.
    first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    again = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum) for _ in "ab"]
    assert not hasattr(type(first), "skip_synchronize") and not hasattr(type(again[0]), "skip_synchronize")
    for _ in range(2):
        again[1].zero_grad()
        model(torch.full((1, 32), rank + 1.0)).sum().backward()
        again[1].synchronize()
        bias = model[-1].bias.grad
        assert (bias == size).all(), bias
        with again[1].skip_synchronize():
            again[1].step()
        first.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (hvd.allgather(weights[None]) == weights).all(), "the ranks have drifted apart"
    hvd.shutdown()
    sys.exit()

if kind == "sparse":
    peer = build(3, sparse=True)
    hvd.DistributedOptimizer(torch.optim.SGD(peer.parameters(), lr=1))
    try:
        peer(torch.ones(2, 32)).sum().backward()
    except InvalidCall as error:
        assert "sparse_as_dense=True" in str(error)
    else:
        raise AssertionError("a sparse gradient was taken")

# Adam divides by gradients, down to tiny ones.
rtol, atol = {"fp16": (5e-2, 2e-3), "adam": (1e-3, 1e-4)}.get(kind, (1e-4, 2e-6))
for (name, tested), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(tested, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = hvd.allgather(flat[None])
assert (everyone == flat).all(), "the ranks have drifted apart"
hvd.shutdown()
