"""Training with a divided optimizer against `parallelize` with a whole one, on the same ranks.

Argument 1: `optimizers`, `state`, `travel`, `gradients`, `layout`, `again`, `members`, `moved` (with a folder
for a limit of memory), `mistakes` or `alone`.
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

import copy
import io
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import carme_runtime
from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.torch import parallelize
from carme_runtime.torch.parallel import join_run

KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-2},
}
torch.set_num_threads(1)
join_run()
rank, size = dist.get_rank(), dist.get_world_size()


class Attentive(nn.Module):
    """Uses parameters of modules that it does not call, a recurrent layer, a scalar, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 24)
        self.mix = nn.MultiheadAttention(24, 2, batch_first=True)
        self.walk = nn.LSTM(24, 24, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.mix(h, h, h)[0]
        h = self.norm(self.walk(h)[0]) * self.scale
        return nn.functional.linear(h, self.embed.weight)


def build() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, 61), nn.ReLU(), nn.Linear(61, 61), nn.ReLU(), nn.Linear(61, 8))


def batches(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x, y = torch.randn(4 * size, 32, generator=generator), torch.randn(4 * size, 8, generator=generator)
        yield x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1, count: int = 4) -> None:
    for x, y in batches(seed, count):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def pair(name: str = "AdamW", **options: Any):
    """A model whose optimizer is whole, and one whose optimizer is divided."""
    created = []
    for shard in (False, True):
        model = build()
        optimizer = getattr(torch.optim, name)(model.parameters(), **KINDS[name])
        more: dict[str, Any] = options | {"shard_optimizer": True} if shard else {}
        created.append(parallelize(model, optimizer, bucket_mb=0.01, **more))
    return created


def compare(model: nn.Module, another: nn.Module, what: str) -> None:
    for (name, a), b in zip(model.state_dict().items(), another.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=lambda t: f"{what} {name}: {t}")  # noqa: B023


def numbers(state: Any) -> int:
    """Elements of the state that is in memory here."""
    return sum(
        value.numel()
        for entries in state.values()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )


def same_state(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    assert a["param_groups"] == b["param_groups"], what
    assert sorted(a["state"]) == sorted(b["state"]), what
    for number, entries in a["state"].items():
        rest = b["state"][number]
        assert list(entries) == list(rest), (what, list(entries), list(rest))
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, rest[key], rtol=1e-5, atol=1e-7)
            else:
                assert value == rest[key], (what, number, key)


def optimizers() -> None:
    for name in KINDS:
        (whole, first), (divided, second) = pair(name)
        train(whole, first)
        train(divided, second)
        compare(divided, whole, name)
        same_state(second.state_dict(), first.state_dict(), name)
        if held := numbers(first.state):
            # Blocks are filled up to lines of 64 bytes.
            assert numbers(second.state) <= held / size + 256, (name, numbers(second.state), held)


def state() -> None:
    (whole, first), (divided, second) = pair()
    train(whole, first)
    train(divided, second)
    file = io.BytesIO()
    torch.save({"model": divided.state_dict(), "optimizer": second.state_dict()}, file)

    def saved() -> Any:
        file.seek(0)
        return torch.load(file)

    # Into one process, into ranks with a whole optimizer, into a new one that is divided later, and back.
    train(whole, first, seed=2)
    for how in ("whole", "divided", "divided later"):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        if how != "divided later":
            parallelize(model, optimizer, shard_optimizer=how == "divided")
        model.load_state_dict(saved()["model"])
        optimizer.load_state_dict(saved()["optimizer"])
        if how == "divided later":
            parallelize(model, optimizer, shard_optimizer=True)
        train(model, optimizer, seed=2)
        compare(model, whole, how)
        same_state(optimizer.state_dict(), first.state_dict(), how)
    train(divided, second, seed=3)
    second.load_state_dict(saved()["optimizer"])
    divided.load_state_dict(saved()["model"])
    train(divided, second, seed=2)
    compare(divided, whole, "back")


def travel() -> None:
    """Parameters travel after a step, and anyone who uses one in the model's way waits for it."""
    torch.manual_seed(3)
    plain = Attentive()
    tested = copy.deepcopy(plain)
    created = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, tested)]
    parallelize(plain, created[0])
    parallelize(tested, created[1], bucket_mb=0.002, shard_optimizer=True, overlap_step=True)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        x = torch.randint(0, 97, (3, 5), generator=generator)
        losses = []
        for model, optimizer in zip((plain, tested), created, strict=True):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0]), (step, losses)
        if step == 2:
            with torch.no_grad():
                torch.testing.assert_close(tested.embed(x), plain.embed(x), rtol=1e-5, atol=1e-7)
        if step == 3:
            compare(tested, plain, "after a step")
        if step == 4:
            twin = copy.deepcopy(tested)
            twin(x)  # has no part in the run
    compare(tested, plain, "at the end")
    same_state(created[1].state_dict(), created[0].state_dict(), "travel")


def gradients() -> None:
    """Nobody takes a part of the gradient for all of it."""
    (whole, first), (divided, second) = pair("SGD")
    (x, y), *_ = batches(1, 1)
    weight = divided[0].weight  # pyright: ignore[reportIndexIssue]
    for model in (whole, divided):
        nn.functional.mse_loss(model(x), y).backward()
    assert "divided" in repr(weight.grad)
    assert weight.grad.shape == weight.shape
    for use in (
        lambda: nn.utils.clip_grad_norm_(divided.parameters(), 1.0),
        lambda: weight.grad.norm(),
        lambda: weight.grad + 1,
        lambda: weight.grad.tolist(),
        lambda: nn.functional.mse_loss(divided(x), y).backward(),  # gradients were not zeroed
    ):
        try:
            use()
        except InvalidCall as error:
            assert "divided" in str(error), error
            assert "zero_grad" in str(error), error
        else:
            raise AssertionError("a part of the gradient was taken for all of it")
    for zeros in (True, False):
        second.zero_grad(set_to_none=not zeros)
        second.step()  # without a gradient, or with zeros
        first.zero_grad(set_to_none=not zeros)
        first.step()
        for model, optimizer in ((whole, first), (divided, second)):
            optimizer.zero_grad(set_to_none=not zeros)

            def closure(model=model):
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        compare(divided, whole, f"zeros: {zeros}")


def layout() -> None:
    """Weights whose last dimension is not the innermost one in memory are trained as one process does."""

    def images() -> nn.Module:
        torch.manual_seed(7)
        created = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Flatten())
        return created.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    generator = torch.Generator().manual_seed(1)
    models = [images() for _ in range(3)]
    created = [torch.optim.AdamW(models[0].parameters(), lr=1e-2, eps=1e-4, fused=False)]
    for model, shard in zip(models[1:], (False, True), strict=True):
        created.append(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
        parallelize(model, created[-1], shard_optimizer=shard)
    for _ in range(3):
        x = torch.randn(4 * size, 3, 8, 8, generator=generator)
        for model, optimizer in zip(models, created, strict=True):
            share = x if model is models[0] else x[4 * rank : 4 * rank + 4]
            optimizer.zero_grad()
            model(share).square().mean().backward()
            optimizer.step()
    whole = created[0].state_dict()["state"]
    for model, optimizer in zip(models[1:], created[1:], strict=True):
        assert not model[0].weight.is_contiguous()  # pyright: ignore[reportIndexIssue]
        for a, b in zip(model.parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for number, entries in optimizer.state_dict()["state"].items():
            torch.testing.assert_close(entries["exp_avg"], whole[number]["exp_avg"], rtol=1e-4, atol=1e-6)
    state = created[2].state_dict()
    created[2].load_state_dict(state)
    again = created[2].state_dict()["state"]
    assert all(torch.equal(again[n]["exp_avg"], e["exp_avg"]) for n, e in state["state"].items())


def again() -> None:
    """Divided once more, with a parameter that is trained now, and then whole."""
    torch.manual_seed(5)
    plain, tested = build(), build()
    created = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, tested)]
    for each in (plain, tested):
        each[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    for shard in (True, True, False):
        parallelize(plain, created[0])
        parallelize(tested, created[1], shard_optimizer=shard)
        train(plain, created[0])
        train(tested, created[1])
        compare(tested, plain, "again")
        same_state(created[1].state_dict(), created[0].state_dict(), "again")
        for each in (plain, tested):
            each[0].requires_grad_(True)  # pyright: ignore[reportIndexIssue]


def members() -> None:
    """Models that one optimizer trains, called one by one: as one process on the whole batch."""

    def build_both() -> nn.ModuleDict:
        torch.manual_seed(7)
        return nn.ModuleDict({"encode": nn.Linear(32, 8), "decode": nn.Linear(8, 32)})

    def step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        nn.functional.mse_loss(model["decode"](model["encode"](x)), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"overlap_step": True},
        {"shard_optimizer": True, "overlap_step": True},
        {"start": "streamed"},
    )
    for options in kinds:
        plain, parallel = build_both(), build_both()
        plain_optimizer, optimizer = (
            torch.optim.AdamW(each.parameters(), 1e-2) for each in (plain, parallel)
        )
        parallelize(parallel, optimizer, **options)
        for seed in range(4):
            x = torch.randn(4 * size, 32, generator=torch.Generator().manual_seed(seed))
            step(plain, plain_optimizer, x)
            step(parallel, optimizer, x[rank::size])
        compare(parallel, plain, f"members {options}")


def moved() -> None:
    """Parameters that get other memory after the optimizer was divided are trained on."""

    def images() -> nn.Module:
        torch.manual_seed(7)
        layers = (nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(180, 400), nn.Tanh(), nn.Linear(400, 8))
        return nn.Sequential(*layers)  # one parameter of 281 KiB can leave memory

    generator = torch.Generator().manual_seed(1)
    models = [images() for _ in range(2)]
    created = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4) for model in models]
    parallelize(models[1], created[1], shard_optimizer=True, bucket_mb=0.4)

    def steps(count: int) -> None:
        for _ in range(count):
            x = torch.randn(4 * size, 3, 8, 8, generator=generator)
            for model, optimizer in zip(models, created, strict=True):
                model(x if model is models[0] else x[rank::size]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    steps(2)
    models[1].double().float()
    steps(2)
    models[1].to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    for model in models:
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    steps(2)
    with carme_runtime.memory("2GiB", sys.argv[2]) as budget:
        budget.adopt(models[1], created[1])
        steps(2)
        for parameter in models[1].parameters():
            assert budget._working().block_of(parameter) is not None or parameter.numel() < 1000
    steps(2)
    whole = created[0].state_dict()["state"]
    for number, entries in created[1].state_dict()["state"].items():
        torch.testing.assert_close(entries["exp_avg"], whole[number]["exp_avg"], rtol=1e-4, atol=1e-6)
    models[1].double()
    try:
        created[1].step()
    except InvalidCall as error:
        assert "torch.float64" in str(error) and "parallelize again" in str(error), error
    else:
        raise AssertionError("another type was not refused")


def mistakes() -> None:
    def refused(make: Any, *words: str, **options: Any) -> None:
        model = build()
        try:
            parallelize(model, make(model), shard_optimizer=True, **options)
        except InvalidCall as error:
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"{error} has no {missing}"
        else:
            raise AssertionError(f"{words} was not refused")

    class Own(torch.optim.SGD):
        def step(self, closure=None):  # pyright: ignore
            return super().step(closure)

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    refused(lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS", "AdamW")
    refused(lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor", "AdamW")
    refused(lambda m: Own(m.parameters(), lr=0.1), "Own", "AdamW")
    refused(lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1), "4 of the 6", "freeze")
    refused(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "wire", wire="bf16")
    refused(scheduled, "scheduler", "shard_optimizer")
    added = [nn.Parameter(torch.ones(1))]
    refused(lambda m: torch.optim.SGD([*m.parameters(), *added], lr=0.1), "several models", "ModuleDict")
    model = build()
    model.to(torch.complex64)
    try:
        parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), shard_optimizer=True)
    except InvalidCall as error:
        assert "0.weight has torch.complex64" in str(error), error
    else:
        raise AssertionError("complex numbers were not refused")
    mistakes_afterwards()


def mistakes_afterwards() -> None:
    class Renamed(torch.optim.SGD):
        pass

    model = build()
    optimizer = Renamed(model.parameters(), lr=0.1)
    parallelize(model, optimizer, shard_optimizer=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, count=1)
    scheduler.step()
    assert type(optimizer).__name__ == "Renamed"
    assert optimizer.param_groups[0]["lr"] < 0.1
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 32)).sum()).backward()
    try:
        scaler.step(optimizer)
    except InvalidCall as error:
        assert "GradScaler cannot use one" in str(error), error
        assert "bfloat16" in str(error), error
    else:
        raise AssertionError("GradScaler was not refused")
    for use in (
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ):
        try:
            use()
        except InvalidCall:
            continue
        raise AssertionError("was not refused")


def alone() -> None:
    """One rank asks for the state, and the others train on: each of them says what is wrong."""
    _, (model, optimizer) = pair()
    train(model, optimizer)
    try:
        if rank == 0:
            optimizer.state_dict()
        else:
            train(model, optimizer)
    except Mismatch as error:
        print("REFUSED", error)
    if dist.get_rank() == 0:
        print("ENDED")


globals()[sys.argv[1]]()
if sys.argv[1] != "alone":
    dist.destroy_process_group()
