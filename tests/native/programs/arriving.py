"""Gradients that still travel when `backward` returns, used between it and the optimizer's step.

Every rank compares with one process that trains on the whole batches. Every way of use is a step.
"""

# pyright: reportOptionalMemberAccess=false, reportMissingImports=false, reportIndexIssue=false

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import carme_runtime.torch as carme
from carme_runtime.torch.stepping import Arriving

torch.set_num_threads(1)
torch.manual_seed(3)
alone = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4))
model = copy.deepcopy(alone)
# The last layer has an optimizer of its own, which `parallelize` does not know.
own = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(alone[4].parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
peer = torch.optim.AdamW(model[4].parameters())
hooks: list[str] = []
optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
model, optimizer = carme.parallelize(model, optimizer, bucket_mb=0.1, overlap_step=True)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
assert len({*torch.distributed.get_process_group_ranks(None)}) == 2

generator = torch.Generator().manual_seed(1)
samples: list[tuple[torch.Tensor, torch.Tensor]] = []


def batch(model: nn.Module) -> torch.Tensor:
    """The loss of this step's samples: of all where one process trains, and of this rank's share."""
    x, y = samples[-1]
    if model is not alone:
        x, y = x[rank::size], y[rank::size]
    return nn.functional.mse_loss(model(x), y)


def travels(model: nn.Module) -> None:
    """Nothing was waited for by what was done so far, which these tests are about."""
    if model is not alone:
        assert all(type(p.grad) is Arriving for p in model.parameters())


def plain(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    its.step()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def clips(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    clip_grad_norm_(model.parameters(), 0.05, foreach=model is alone or None)
    its.step()


def reads(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    gradient = model[0].weight.grad
    norms.append(float(gradient.norm()))
    norms.append(float(gradient.numpy().sum()))
    its.step()


def changes(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    model[2].weight.grad *= 0.5
    model[2].bias.grad.data.clamp_(-0.01, 0.01)
    model[0].bias.grad = torch.ones(400)
    its.step()


def adds(model: nn.Module, its: torch.optim.Optimizer) -> None:
    loss = batch(model)
    loss.backward(retain_graph=True)
    travels(model)
    (loss * 2).backward()
    its.step()


def forgets(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    its.zero_grad()
    batch(model).backward()
    its.step()


def zeroes(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    its.zero_grad(set_to_none=False)
    batch(model).backward()
    its.step()


def encloses(model: nn.Module, its: torch.optim.Optimizer) -> None:
    def closure() -> float:
        its.zero_grad()
        loss = batch(model)
        loss.backward()
        return loss.item()

    assert its.step(closure) > 0


def two(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    (own[1] if model is alone else peer).step()
    its.step()


def copies(model: nn.Module, its: torch.optim.Optimizer) -> None:
    batch(model).backward()
    travels(model)
    if model is not alone:
        # As it was pickled when what makes copies had another name.
        earlier = pickle.dumps(its, 0).replace(b"\nwithout_state\n", b"\n_made\n")
        assert b"\n_made\n" in earlier
        for same in (copy.deepcopy(its), pickle.loads(pickle.dumps(its)), pickle.loads(earlier)):
            assert type(same) is torch.optim.SGD
            same.step()  # of other parameters
        torch.save(model[0].weight.grad, io.BytesIO())
    its.step()


def watched(model: nn.Module, its: torch.optim.Optimizer) -> None:
    samples[-1] = samples[-1][0][:15], samples[-1][1][:15]  # another global batch than the one expected
    if model is not alone and rank == 0:
        time.sleep(0.3)  # the other one waits here and there at once
    batch(model).backward()
    travels(model)
    gradients = [p.grad for p in model.parameters()]

    def read() -> None:
        found.append(sum(float(gradient.sum()) for gradient in gradients))

    found: list[float] = []
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    its.step()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({*found}) == 1, found


norms: list[float] = []
uses: tuple[Callable[[nn.Module, torch.optim.Optimizer], None], ...] = (
    plain, clips, reads, changes, adds, forgets, zeroes, encloses, two, copies, watched, plain,
)  # fmt: skip
for use in uses:
    samples.append((torch.randn(16, 64, generator=generator), torch.randn(16, 4, generator=generator)))
    for trained, its in ((alone, own[0]), (model, optimizer)):
        its.zero_grad()
        use(trained, its)
    for tested, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(tested, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{use}: {text}")  # noqa: B023
assert len(norms) == 4, norms
torch.testing.assert_close(norms[:2], norms[2:], rtol=1e-4, atol=1e-5)
assert hooks == ["before", "after"] * len(uses), hooks
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
batch(model).backward()
optimizer.step()
scheduler.step()
assert len(hooks) == 2 * len(uses) + 2

# Of what had no part anywhere there is no gradient, whatever is done between.


class Heads(nn.Module):
    """Two of them, on one trunk; a pass may be over one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(64, 400), nn.Linear(400, 4), nn.Linear(400, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.trunk(x))
        return self.left(hidden), self.right(hidden)


for case in ("again", "zeroes", "given", "one reads"):
    torch.manual_seed(5)
    whole = Heads()
    shared = copy.deepcopy(whole)
    its = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    tested = torch.optim.SGD(shared.parameters(), lr=0.1, momentum=0.9)
    shared, tested = carme.parallelize(shared, tested, bucket_mb=0.001, overlap_step=True)
    for _ in range(3):
        x = torch.randn(16, 64, generator=generator)
        for trained, its_own, its_x in ((whole, its, x), (shared, tested, x[rank::size])):
            its_own.zero_grad(set_to_none=case != "zeroes")
            left, right = trained(its_x)
            left.square().mean().backward(retain_graph=True)
            if case == "zeroes":
                its_own.zero_grad(set_to_none=False)
                left.square().mean().backward(retain_graph=True)
            if case != "given" and case != "one reads":
                right.square().mean().backward()
            if case == "given":
                trained.right.bias.grad = torch.ones(4)
            if case == "one reads" and trained is shared:
                if rank == 0:
                    assert trained.trunk.weight.grad.norm() > 0
                torch.distributed.barrier()
            assert its_own.state_dict()["param_groups"][0]["params"] == list(range(6))
            its_own.step()
        for value, other_one in zip(shared.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(value, other_one, rtol=1e-4, atol=1e-6, msg=case)

# A rank that leaves does not take with it what the others still wait for: it has a share of their sums.
large = nn.Linear(1024, 2048)
large, optimizer = carme.parallelize(large, torch.optim.SGD(large.parameters()), overlap_step=True)
large(torch.randn(4, 1024)).sum().backward()
optimizer.step()
if rank == 0:
    time.sleep(4)
large(torch.randn(4, 1024)).sum().backward()
if rank == 0:
    assert large.weight.grad.isfinite().all()
torch.distributed.destroy_process_group()
