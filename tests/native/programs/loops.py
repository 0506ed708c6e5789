"""Training loops of scripts, by `parallelize` and Horovod, against one process on the whole batches.

Argument 1: which loop; the others: its variants.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# By its name, before carme_runtime is there.
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import carme_runtime.horovod as hvd
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import parallelize
from carme_runtime.torch.parallel import join_run

WIDTH = 24
torch.set_num_threads(1)
join_run()
rank, size = dist.get_rank(), dist.get_world_size()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4 * size, WIDTH, generator=generator)


def own(x: torch.Tensor) -> torch.Tensor:
    """This rank's share of a batch."""
    return x[rank::size]


def compare(tested: nn.Module, expected: nn.Module, what: object) -> None:
    for (name, a), b in zip(tested.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what} {name}: {text}")  # noqa: B023


def refused(use: Callable[[], object], *words: str) -> None:
    try:
        use()
    except InvalidCall as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{error} has no {missing}"
    else:
        raise AssertionError("was not refused")


# -- backward passes inside of others


class Segments(nn.Module):
    """Computes segments again in the backward pass, where all or all but the last layer has its gradients.

    The middle layer is used twice.
    """

    def __init__(self, again: bool, head: bool) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in (self.layers[0], self.layers[1], self.layers[2], self.layers[1]):
            segment = nn.Sequential(layer, nn.Tanh())
            x = checkpoint(segment, x, use_reentrant=True) if self.again else segment(x)
        return self.head(x)


def reentrant(variant: str) -> None:
    kinds = set(variant.split("+"))
    passes = 2 if "accumulate" in kinds else 1
    torch.manual_seed(0)
    tested = Segments(True, "head" in kinds)
    expected = Segments(False, "head" in kinds)
    expected.load_state_dict(tested.state_dict())
    optimizer, another = sgd(tested), sgd(expected)
    if "horovod" in kinds:
        hvd.init()
        # It adds up passes, and does not divide by their number.
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
    else:
        options = {"shard": "shard_optimizer", "overlap": "overlap_step"}
        given: dict[str, Any] = {options[kind]: True for kind in kinds & {*options}}
        parallelize(tested, optimizer, accumulate=passes, bucket_mb=0.002, **given)
    divisor = 1 if "horovod" in kinds else passes
    x = list(batches(4 * passes))
    for step in range(4):
        optimizer.zero_grad()
        another.zero_grad()
        for batch in x[step * passes : (step + 1) * passes]:
            if "failing" in kinds and step == 1 and rank == 1:
                tested.layers[2].register_forward_hook(fail_once)  # behind the first segment's gradients
            try:
                tested(own(batch)).square().mean().backward()
            except RuntimeError as error:
                assert "this pass fails" in str(error), error
            if "failing" not in kinds or step != 1:
                (expected(batch.clone()).square().mean() / divisor).backward()
        if "failing" in kinds and step == 1:
            continue  # nobody makes this step
        optimizer.step()
        another.step()
    tested.state_dict()  # waits for what travels after a step
    compare(tested, expected, variant)


failed: list[int] = []


def fail_once(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        if not failed:
            failed.append(1)
            raise RuntimeError("this pass fails")

    if output.requires_grad:
        output.register_hook(fail)


def too_late(_: str) -> None:
    """A gradient that a segment adds to one that travels already is refused."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.ModuleList([layer])
    parallelize(model, sgd(model))
    x = torch.randn(2, WIDTH, requires_grad=True)
    inner = checkpoint(lambda t: layer(t).tanh(), x, use_reentrant=True)
    loss = layer(inner.detach()).sum() + inner.sum()
    refused(loss.backward, "second gradient", "use_reentrant=False")


class Training(torch.autograd.Function):
    """Trains another model in its backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, train: Callable[[], None]) -> torch.Tensor:
        context.train = train
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            context.train()
        return gradients[0], None


def step_inside(_: str) -> None:
    """A step inside of another backward pass, which would use this rank's own gradients, is refused."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(model)
    parallelize(model, optimizer)

    def train() -> None:
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()

    outer = Training.apply(torch.ones(2, requires_grad=True), train)
    refused(outer.sum().backward, "inside of a backward pass", "outermost backward()")  # pyright: ignore


# -- several optimizers


def several(variant: str) -> None:
    """Optimizers over different layers, and a layer that the script trains itself."""
    torch.manual_seed(0)
    tested = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    expected = copy.deepcopy(tested)
    kind = torch.optim.SGD
    created = [kind(tested[n].parameters(), lr=0.1, momentum=0.9) for n in range(3)]
    plain = [kind(expected[n].parameters(), lr=0.1, momentum=0.9) for n in range(3)]
    options: list[dict[str, Any]] = [{"accumulate": 2}, {"accumulate": 2}, {"accumulate": 4}]
    for number, (optimizer, option) in enumerate(zip(created, options, strict=True)):
        parallelize(tested, optimizer, overlap_step=variant == "overlap" and number < 2, **option)
    for count, batch in enumerate(batches(8), 1):
        share = own(batch)[: 1 + rank] if variant == "uneven" else own(batch)
        whole = batch
        if variant == "uneven":
            whole = torch.cat([batch[r::size][: 1 + r] for r in range(size)])
        tested(share).square().mean().backward()
        loss = expected(whole).square().mean()
        for n, gradient in enumerate(torch.autograd.grad(loss, list(expected.parameters()))):
            parameter = list(expected.parameters())[n]
            part = gradient / (2 if n < 4 else 4)
            parameter.grad = part if parameter.grad is None else parameter.grad + part
        for number in range(3):
            if count % options[number]["accumulate"] == 0:
                for each in (created[number], plain[number]):
                    each.step()
                    each.zero_grad()
        if count % 4 == 0:
            for model in (tested, expected):
                with torch.no_grad():
                    for parameter in model[3].parameters():
                        assert parameter.grad is not None
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    compare(tested, expected, variant)


class Plain:
    """Something that takes memory like what `parallelize` makes."""


def together(_: str) -> None:
    """After fewer passes than announced, gradients of all optimizers are clipped by one norm.

    What `parallelize` makes for them lies elsewhere on each rank, in another order.
    """
    torch.manual_seed(0)
    tested = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    expected = copy.deepcopy(tested)
    created, plain = ([sgd(layer) for layer in model] for model in (tested, expected))
    generator = random.Random(rank)
    between: list[list[Plain]] = []
    for optimizer in created:
        between.append([Plain() for _ in range(generator.randrange(40))])
        parallelize(tested, optimizer, accumulate=4)
    for batch in batches(2):
        tested(own(batch)).square().mean().backward()
        (expected(batch).square().mean() / 4).backward()
    for model, optimizers in ((tested, created), (expected, plain)):
        clip_grad_norm_(model.parameters(), 1e-2)
        for optimizer in optimizers:
            optimizer.step()
    compare(tested, expected, "together")


# -- steps after fewer passes


def incomplete(variant: str) -> None:
    """The usual loop, over 6 batches with 4 passes to a step, twice; `norms` looks at all gradients."""
    torch.manual_seed(0)
    tested = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    expected = copy.deepcopy(tested)
    optimizer, another = sgd(tested), sgd(expected)
    parallelize(tested, optimizer, accumulate=4, overlap_step=variant == "overlap")
    x = list(batches(6))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000) for _ in range(2)]
    for epoch in range(3):
        for count, batch in enumerate(x, 1):
            last = count % 4 == 0 or count == len(x)
            for model, its, share, scaler in (
                (tested, optimizer, own(batch), scalers[0]),
                (expected, another, batch, scalers[1]),
            ):
                if epoch == 1 and count == len(x):
                    # Of the last pass of an epoch one rank's loss is infinite, and so is the whole one.
                    share = share * infinity(variant, model is tested)
                loss = model(share).square().mean() / (1 if model is tested else 4)
                scaler.scale(loss).backward() if "scaler" in variant else loss.backward()
                if last:
                    change_and_step(variant, model, its, scaler)
        compare(tested, expected, (variant, epoch))
        if "scaler" in variant:
            assert scalers[0].get_scale() == scalers[1].get_scale() == (64 if epoch < 1 else 32)


def infinity(variant: str, is_tested: bool) -> float:
    return float("inf") if "scaler" in variant and (rank == size - 1 or not is_tested) else 1.0


def change_and_step(
    variant: str, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    if variant == "scaler_unscales":
        scaler.unscale_(optimizer)
    if variant == "value":
        clip_grad_value_(model.parameters(), 1e-3)
    elif variant != "scaler":
        clip_grad_norm_(model.parameters(), 1e-2)
    if "scaler" in variant:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if variant.endswith("model_zeroes"):
        model.zero_grad(set_to_none="scaler" not in variant)
    else:
        optimizer.zero_grad(set_to_none="zeros" not in variant)


def discarded(variant: str) -> None:
    """Gradients that a script forgets between two steps do not count as a pass."""
    torch.manual_seed(0)
    tested = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    expected = copy.deepcopy(tested)
    optimizer, another = sgd(tested), sgd(expected)
    parallelize(tested, optimizer, accumulate=2)
    for count, batch in enumerate(batches(9)):
        for model, its, share in ((tested, optimizer, own(batch)), (expected, another, batch)):
            (model(share).square().mean() / (1 if model is tested else 2)).backward()
            if count % 3 == 0 and variant == "model":
                model.zero_grad()
            elif count % 3 == 0:
                its.zero_grad(set_to_none=variant != "zeros")
            if count % 3 == 2:
                if model is tested:
                    assert_reduced(tested)
                its.step()
                its.zero_grad()
    compare(tested, expected, variant)


def assert_reduced(model: nn.Sequential) -> None:
    gradient = model[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    everyone = [torch.empty_like(gradient) for _ in range(size)]
    dist.all_gather(everyone, gradient)
    assert all(torch.equal(each, gradient) for each in everyone), "gradients were not reduced"


def late(_: str) -> None:
    """A pass after gradients were reduced for clipping is refused, until they are forgotten."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(model)
    parallelize(model, optimizer, accumulate=2)
    x = torch.randn(2, WIDTH)
    for forget in (optimizer.zero_grad, model.zero_grad, optimizer.step):
        model(x).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        refused(model(x).sum().backward, "fewer than 2 passes", "zero_grad")
        forget()
        optimizer.zero_grad()
        for _ in range(2):
            model(x).sum().backward()
        assert_reduced(nn.Sequential(model))
        optimizer.zero_grad()


# -- closures


def closures(variant: str) -> None:
    kinds = set(variant.split("+"))
    torch.manual_seed(0)
    tested = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    expected = copy.deepcopy(tested)
    optimizer, another = sgd(tested), sgd(expected)
    offered: dict[str, dict[str, Any]] = {
        "clip": {"clip_norm": 1e-3},
        "accumulate": {"accumulate": 2},
        "overlap": {"overlap_step": True},
        "shard": {"shard_optimizer": True},
    }
    options = {name: value for kind in kinds for name, value in offered.get(kind, {}).items()}
    parallelize(tested, optimizer, **options)

    def closure_of(model: nn.Module, its: torch.optim.Optimizer, x: torch.Tensor) -> Callable[[], float]:
        def closure() -> float:
            its.zero_grad()
            # With accumulate=2 a step after one pass divides by two as well.
            loss = model(x).square().mean()
            (loss / (2 if model is expected and "accumulate" in kinds else 1)).backward()
            if model is expected and "clip" in kinds:
                clip_grad_norm_(model.parameters(), 1e-3)
            return loss.item()

        return closure

    for batch in batches(4):
        closure: Any = closure_of(tested, optimizer, own(batch))
        found = optimizer.step(closure=closure) if "named" in kinds else optimizer.step(closure)
        assert found is not None
        another.step(closure_of(expected, another, batch))  # pyright: ignore[reportArgumentType]
    tested.state_dict()
    compare(tested, expected, variant)


# -- buffers


class Averaging(nn.Module):
    """Puts another tensor in its buffer's place in each forward pass."""

    avg: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("avg", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.avg = 0.9 * self.avg + 0.1 * x.mean(0)
        return self.layer(x - self.avg)


def reassigned(_: str) -> None:
    """Before each pass all ranks have what a process has that sees rank 0's samples."""
    torch.manual_seed(0)
    tested, expected = Averaging(), torch.zeros(WIDTH)
    optimizer = sgd(tested)
    parallelize(tested, optimizer)
    seen: list[torch.Tensor] = []
    tested.register_forward_pre_hook(lambda module, _: seen.append(module.avg.clone()))  # pyright: ignore
    for batch in batches(4):
        optimizer.zero_grad()
        tested(own(batch)).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(seen[-1], expected)
        expected = 0.9 * expected + 0.1 * batch[::size].mean(0)


class Multiplying(nn.Module):
    """Multiplies by a buffer that it replaces, so that autograd saves it, and keeps its last input."""

    avg: torch.Tensor
    previous: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("avg", torch.zeros(WIDTH))
        self.register_buffer("previous", torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.avg = 0.5 * self.avg + x.mean(0)
        self.previous = x.detach()
        return self.layer(x) * self.avg


def saved(_: str) -> None:
    """What autograd saved, and a batch, stay as they are where modules have put them in buffers' places."""
    torch.manual_seed(0)
    tested = Multiplying()
    expected = [copy.deepcopy(tested) for _ in range(size)]  # each rank's model
    optimizer = sgd(tested)
    parallelize(tested, optimizer)
    for a, b in zip(batches(3), reversed(list(batches(3))), strict=True):
        shares = [(a[r::size].clone(), b[r::size].clone()) for r in range(size)]
        first, second = own(a).clone(), own(b).clone()
        optimizer.zero_grad()
        (tested(first).square().mean() + tested(second).square().mean()).backward()
        torch.testing.assert_close((first, second), shares[rank], rtol=0, atol=0)
        losses = [torch.zeros(()) for _ in range(size)]
        for number in range(2):
            avg = expected[0].avg.clone()
            for r, model in enumerate(expected):
                model.avg = avg
                losses[r] = losses[r] + model(shares[r][number]).square().mean()
        parts = [
            torch.autograd.grad(loss, list(model.parameters()))
            for loss, model in zip(losses, expected, strict=True)
        ]
        mean = [sum(each) / size for each in zip(*parts, strict=True)]
        for total, parameter in zip(mean, tested.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, total, rtol=1e-4, atol=1e-6)
        optimizer.step()
        for model in expected:
            for own_parameter, parameter in zip(model.parameters(), tested.parameters(), strict=True):
                own_parameter.data.copy_(parameter.data)


def lengths(_: str) -> None:
    """Buffers that have other lengths on each rank are refused, or left to the ranks."""
    for options in ({"broadcast_buffers": False}, {}):
        tested = Multiplying()
        parallelize(tested, sgd(tested), **options)
        x = torch.randn(3 + rank, WIDTH)
        tested(x).sum().backward()
        if options:
            tested(x).sum().backward()
        elif rank:
            refused(lambda: tested(x), "Buffers", "broadcast_buffers=False")  # noqa: B023
        else:
            try:
                tested(x)
            except InvalidCall as error:
                assert "broadcast_buffers=False" in str(error), error


def twice(_: str) -> None:
    """Two forward passes with statistics before one backward pass, all ranks with the same samples."""
    torch.manual_seed(0)
    tested = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
    expected = copy.deepcopy(tested)
    optimizer, another = sgd(tested), sgd(expected)
    parallelize(tested, optimizer)
    for a, b in zip(batches(4), reversed(list(batches(4))), strict=True):
        for model, its in ((tested, optimizer), (expected, another)):
            its.zero_grad()
            (model(a).square().mean() + model(b).square().mean()).backward()
            its.step()
    compare(tested, expected, "twice")
    for a, b in zip(tested.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


for variant in sys.argv[2:]:
    globals()[sys.argv[1]](variant)
dist.destroy_process_group()
