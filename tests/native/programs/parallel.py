"""Training by `parallelize` against one process that trains on the whole batches.

Argument 1: the kind, or several with a plus between.
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false

import copy
import io
import sys

import torch
from torch import nn

import carme_runtime.torch as carme

kinds = set(sys.argv[1].split("+"))
torch.set_num_threads(1)


class Branching(nn.Module):
    """One branch has no part in the loss in every other pass, or step."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        trunk = torch.relu(self.trunk(x))
        # With three passes to a step: the left one alone, the right one alone, both, ...
        turn = self.calls // 4 if "accumulate" in kinds else self.calls + 1
        return self.right(trunk) if turn % 2 else self.left(trunk)


def build():
    torch.manual_seed(7)
    if "unused" in kinds:
        return Branching()
    model = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 8))
    return model.to(torch.bfloat16) if "bf16" in kinds else model


def make(model):
    if "overlap" in kinds:
        # Adam's usual eps is 1e-8. A gradient as small as that, summed in another order, then makes a step of
        # another length: one process differs from itself by 8e-6 when it takes this batch in three parts.
        return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


alone = build()
alone_optimizer = make(alone)
model = build()
if "different" in kinds:
    import os

    model = nn.Linear(4, 4 + int(os.environ["RANK"]))
optimizer = make(model)
offered = {
    "accumulate": {"accumulate": 3},
    "clip": {"clip_norm": 0.01},
    "overlap": {"overlap_step": True},
    "wire_bf16": {"wire": "bf16"},
    "wire_int8": {"wire": "int8"},
    "sequence": {"batch_dim": 1},
    "shard": {"shard_optimizer": True},
}
options = {name: value for kind in kinds for name, value in offered.get(kind, {}).items()}
model, optimizer = carme.parallelize(model, optimizer, bucket_mb=0.1, **options)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
alone_scheduler = torch.optim.lr_scheduler.StepLR(alone_optimizer, 4)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
micro = options.get("accumulate", 1)
if "eval" in kinds:  # as one does to keep the statistics of a batch normalization
    model.eval()

# What a wire of fewer bits may do to a parameter. A rank's value v, of what it weighs and what it lost
# before, arrives as v - e. With two nodes each value is rounded once: bfloat16 has 8 significant bits, so |e|
# <= u |v| with u = 2^-8; int8 has 127 steps to the largest v of a block, so |e| <= u max |v| with u = 1/254.
# As v is a gradient g and an e before, max |e| <= u / (1 - u) max |g|. The next step adds what this one lost:
# gradients differ by e[s-1] - e[s]. SGD with momentum m makes of a difference in step s one of C[s] = sum
# over t >= s of lr[t] m^(t-s) at the end, so parameters differ by at most the sum of |e[s]| |C[s] - C[s+1]|.
# The C fall, with the rates of learning that we have, so that this is max |e| C[0]. How a parameter's
# difference changes later gradients is of second order.
UNITS = {"wire_bf16": 2**-8, "wire_int8": 1 / 254}
unit = next((UNITS[kind] for kind in UNITS if kind in kinds), 0.0)
largest = 0.0  # of all elements of a weighted gradient of one rank
reach = 0.0  # C[0]


def note_gradients(x, y, length):
    """What each rank is going to send, of these samples."""
    global largest
    for peer in range(size):
        own = slice(peer * length, (peer + 1) * length)
        share = len(x[own]) / len(x)
        if share:
            loss = nn.functional.mse_loss(alone(x[own]), y[own]) * share * size
            gradients = torch.autograd.grad(loss, list(alone.parameters()))
            largest = max(largest, *(float(g.abs().max()) for g in gradients))


def fail_in_backward(_, __, output):
    def fail(_):
        raise RuntimeError("this pass fails")

    if step == 3 and (rank == 1 or "everywhere" in kinds):
        output.register_hook(fail)


if "failing" in kinds:
    list(model.children())[1].register_forward_hook(fail_in_backward)

generator = torch.Generator().manual_seed(1)
dtype = torch.bfloat16 if "bf16" in kinds else torch.float32
for step in range(8):
    for each in (optimizer, alone_optimizer):
        each.zero_grad(set_to_none="zeros" not in kinds)
    # The data may end, or the last steps of an epoch be short.
    passes = micro - step % micro if "incomplete" in kinds else micro
    for _ in range(passes):
        # The last batches are short, and the last rank's share of them is shorter, down to nothing.
        length = (5 - step // 2) if "uneven" in kinds else 12
        x = torch.randn(length * size, 32, generator=generator).to(dtype)
        y = torch.randn(length * size, 8, generator=generator).to(dtype)
        if "uneven" in kinds and step == 7:
            x, y = x[:1], y[:1]
        begin, end = min(rank * length, len(x)), min((rank + 1) * length, len(x))
        share = slice(begin, end)
        if unit:
            note_gradients(x, y, length)
        if "eval" in kinds and rank == 0 and step % 2:
            model(x[:3])  # which nobody trains with
        if "sequence" in kinds:
            loss = nn.functional.mse_loss(model(x[share][None]), y[share][None])
        else:
            loss = nn.functional.mse_loss(model(x[share]), y[share])
        try:
            loss.backward()
        except RuntimeError as error:
            assert "this pass fails" in str(error), error
        if "failing" in kinds and step == 3:
            continue
        (nn.functional.mse_loss(alone(x), y) / micro).backward()
    if "failing" in kinds and step == 3:
        continue  # nobody makes this step
    if "clip" in kinds:
        nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    if "copies" in kinds and step == 3:
        twin = copy.deepcopy(model)
        twin(torch.randn(4, 32))  # has no part in the run
        torch.save(model, io.BytesIO())
        torch.distributed.barrier()
    reach += alone_optimizer.param_groups[0]["lr"] * 0.9**step
    optimizer.step()
    scheduler.step()
    alone_optimizer.step()
    alone_scheduler.step()

model.state_dict()  # waits for what travels after a step
# On the wire gradients of at most 0.02 are rounded to a 127th of it, and learned with a rate of 0.05.
bounds = {"bf16": (5e-2, 2e-2), "wire_bf16": (1e-4, 2e-5), "wire_int8": (1e-4, 1e-4)}
rtol, atol = next((bounds[kind] for kind in bounds if kind in kinds), (1e-4, 1e-6))
if unit and "uneven" in kinds:  # what a rank sends is weighted, and so is larger
    rtol, atol = 1e-5, 1e-6 + unit / (1 - unit) * largest * reach
for (name, tested), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(tested, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).to(torch.float64)
everyone = [torch.empty_like(flat) for _ in range(size)]
torch.distributed.all_gather(everyone, flat)
assert all(torch.equal(peer, flat) for peer in everyone), "the ranks have drifted apart"
torch.distributed.destroy_process_group()
