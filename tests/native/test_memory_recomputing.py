"""Forward passes that are computed again where that is cheaper than moving what they leave."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import carme_runtime
from carme_runtime.errors import CarmeRuntimeError
from carme_runtime.out_of_core import Plan, budget, leave_recomputation
from carme_runtime.out_of_core.called_models import CalledModels
from carme_runtime.out_of_core.recomputing import Recomputing, _Group
from carme_runtime.out_of_core.trace import Operation, Trace
from patience import HANG

from .memory_limits import limit

pytestmark = pytest.mark.timeout(4 * HANG)
WIDTH, BLOCKS, SAMPLES, STEPS = 128, 4, 4096, 4
SLOW, FAST = 1e3, 1e15  # bytes in a second


class Network(nn.Module):
    """Blocks in a row with Dropout, the last one with statistics; then a row of layers."""

    def __init__(self) -> None:
        super().__init__()
        wide = 4 * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, WIDTH))
            for _ in range(BLOCKS)
        )
        self.blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Parts:
    """A model whose parts the script calls itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def train(self, mode: bool) -> "Parts":
        self._model.train(mode)
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for block in self._model.blocks:
            x = x + block(x)
        return self._model.head(x)


def create_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network()
    return model, torch.optim.AdamW(model.parameters())


def losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of some steps, and at last of an evaluation, which the statistics of BatchNorm change."""
    generator, found = torch.Generator().manual_seed(1), list[float]()
    for step in range(STEPS + 1):
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        y = torch.randint(0, 10, (SAMPLES,), generator=generator)
        optimizer.zero_grad()
        with torch.set_grad_enabled(step < STEPS):
            loss = nn.functional.cross_entropy(model.train(step < STEPS)(x), y)
        if step < STEPS:
            loss.backward()
            optimizer.step()
        found.append(loss.item())
    return found


def limited(folder: Path, *, recompute: bool, room: int = 60) -> tuple[list[float], Plan]:
    """Losses with so many MiB for blocks, and the plan. Afterwards the model is as ever, and so is a copy."""
    with carme_runtime.memory(limit(room), folder) as limited_budget:
        model, optimizer = create_network()
        model, optimizer = limited_budget.adopt(model, optimizer, recompute=recompute)
        found, plan = losses(model, optimizer), limited_budget.plan()
        twin = copy.deepcopy(model)
    for each in (model, twin):
        assert all(getattr(part.forward, "__self__", None) is part for part in each.modules())
    return found, plan


def test_with_a_slow_disk_layers_are_computed_again_to_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "measured_rates", lambda _: (SLOW, SLOW))
    alone = losses(*create_network())
    found, never = limited(tmp_path, recompute=False)
    assert found == alone and never.measured_read > 0
    assert never.recomputed.reason == "adopt(..., recompute=True) asks for it"
    found, plan = limited(tmp_path, recompute=True)
    assert found == alone  # the same masks of Dropout, and BatchNorm's statistics changed once
    chosen = plan.recomputed
    assert not chosen.reason and 1 <= chosen.groups <= BLOCKS + 1 < chosen.of  # not the one with BatchNorm
    assert 0 < chosen.seconds < chosen.instead_seconds
    assert plan.whole < 0.8 * never.whole and plan.read + plan.written < 0.7 * (never.read + never.written)
    assert "groups of layers" in str(plan) and "to the disk and back takes" in str(plan)


def test_with_a_fast_disk_nothing_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "measured_rates", lambda _: (FAST, FAST))
    _, plan = limited(tmp_path, recompute=True)
    assert plan.recomputed.groups == 0
    assert plan.recomputed.reason.startswith("moving what layers leave") and "No forward pass" in str(plan)


def test_a_planner_that_fails_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError("pop from an empty deque")

    monkeypatch.setattr(budget, "measured_rates", lambda _: (SLOW, SLOW))
    monkeypatch.setattr(Trace, "traffic", fail)
    alone, reported = losses(*create_network()), list[Any]()
    with carme_runtime.memory(limit(60), tmp_path) as limited_budget:
        limited_budget.recompute_called(reported.append)
        assert losses(*create_network()) == alone
        with pytest.raises(CarmeRuntimeError, match="could not be planned: IndexError"):
            limited_budget.plan()
    assert [each.groups for each in reported] == [0]
    assert reported[0].reason == "what a step moves could not be found out"


@pytest.mark.parametrize("whole", [True, False], ids=["a model", "two models"])
def test_layers_of_models_that_a_script_calls_are_computed_again_without_a_change_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(budget, "measured_rates", lambda _: (SLOW, SLOW))
    alone, reported = losses(*create_network()), list[Any]()
    with carme_runtime.memory(limit(60), tmp_path) as limited_budget:
        limited_budget.recompute_called(reported.append)
        model, optimizer = create_network()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))  # an evaluation is not training
        model.load_state_dict(create_network()[0].state_dict())  # it has changed the statistics
        found = losses(model if whole else Parts(model), optimizer)
        plan = limited_budget.plan()
    assert found == alone
    assert reported == [plan.recomputed] and not plan.recomputed.reason
    assert 1 <= plan.recomputed.groups < plan.recomputed.of  # not the one with BatchNorm
    assert all(getattr(part.forward, "__self__", None) is part for part in model.modules())


def test_stages_of_a_pipeline_choose_themselves(tmp_path: Path) -> None:
    reported = list[Any]()
    with carme_runtime.memory(limit(), tmp_path) as limited_budget:
        leave_recomputation()  # nothing where nobody has requested any
        limited_budget.recompute_called(reported.append)
        model = row(nn.Tanh())
        model(torch.ones(2, 4)).sum().backward()
        leave_recomputation()
        leave_recomputation()
        assert len(reported) == 1 and "changes nothing for stages of a pipeline" in reported[0]
        assert "forward" not in model.__dict__


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1))))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.ones(1024, 256)).square().mean().backward()
    optimizer.step()
    print(float(sum(each.grad.sum() for each in model.parameters())).hex())
    optimizer.zero_grad()
"""


def carme_run(script: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "carme_runtime.launcher.command", *options, script]
    return subprocess.run(
        command,
        env=os.environ | {"KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=3 * HANG,
        check=False,
    )


def test_carme_run_says_once_what_became_of_recomputation(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT)
    expected = carme_run(script, "-n", "2")
    assert expected.returncode == 0, expected.stderr
    found = carme_run(script, "-n", "2", "--memory-per-rank", "2G", "--spill", tmp_path, "--recompute")
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == sorted(expected.stdout.splitlines())
    reported = re.findall(r"carme-run: .*comput.*", found.stderr)
    assert len(reported) == 1 and reported[0].startswith("carme-run: No forward pass is computed again"), (
        found.stderr
    )


def test_keras_models_that_are_to_compute_again_are_refused_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    (script := tmp_path / "train.py").write_text(
        "import keras, numpy\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])\n"
        "model.compile(optimizer='adam', loss='mse')\n"
        "model.fit(numpy.ones((8, 4)), numpy.ones((8, 1)), verbose=0)\n"
        "print('trained')\n"
    )
    done = carme_run(script, "--memory-per-rank", "3G", "--spill", tmp_path, "--recompute")
    assert done.returncode == 1 and "trained" not in done.stdout, done.stdout
    assert "carme-run: --recompute works with layers of PyTorch, and this script trains" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_a_model_without_layers_in_a_row_has_nothing_to_compute_again(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as limited_budget:
        model = nn.Bilinear(4, 4, 4)
        model, optimizer = limited_budget.adopt(
            model, torch.optim.SGD(model.parameters(), 0.1), recompute=True
        )
        model(torch.ones(2, 4), torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert "the model has no layers in a row" in str(limited_budget.plan())


class Recorded:
    """The operations of a step of four layers: each makes a block of 1 MiB in 10 ms for its backward pass.

    Args:
        layers: Whose forward passes are those.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self.steps = SimpleNamespace(position=-1, record_anew=lambda: None)
        for layer in layers:
            layer.register_forward_pre_hook(self._note)
        forward = [
            Operation("forward", uses=(n - 1,) if n else (), makes=((n, 1 << 20),), seconds=0.01)
            for n in range(4)
        ]
        backward = [
            Operation("backward", uses=(n, n - 1) if n else (n,), dies=(n,), seconds=0.01)
            for n in reversed(range(4))
        ]
        self.trace = Trace([*forward, *backward], dict.fromkeys(range(4), 1 << 20))

    def _note(self, *_: Any) -> None:
        self.steps.position += 1

    def block_of(self, _: torch.Tensor) -> Any:
        """That of a group's result, which is requested behind the last layer."""
        return SimpleNamespace(label=self.steps.position)

    def choose(self, model: nn.Sequential, mib_per_second: float) -> Recomputing:
        """What is chosen after two steps with so fast a disk, and room for two of the blocks."""
        recomputing = Recomputing(self)  # pyright: ignore[reportArgumentType]
        recomputing.add(model)
        for _ in range(2):
            self.steps.position = -1
            model(torch.ones(2, 4)).sum().backward()
            rate = mib_per_second * (1 << 20)
            recomputing.end_step(self.trace, 2 << 20, rate, rate)
        return recomputing


def row(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize(("rate", "groups"), [(1, 1), (100_000, 0)])
def test_what_is_computed_again_depends_on_the_disk(rate: float, groups: int) -> None:
    found = Recorded(model := row(nn.Tanh())).choose(model, rate).found
    assert (found.groups, found.of) == (groups, 2)
    assert found.reason == (
        ""
        if groups
        else "moving what layers leave for the backward pass takes no longer than computing it again"
    )


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Encoder(nn.Module):
    """An encoder in rows, and a head in one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Blocks(nn.Module):
    """A list of blocks, each a group."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(wide() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(wide(), nn.Tanh()),
        lambda: Encoder(wide()),
        lambda: Encoder(nn.Sequential(wide(), wide())),
        lambda: Encoder(Blocks()),
        lambda: nn.Sequential(Blocks(), nn.Tanh(), wide()),
    ],
    ids=["row in a row", "row", "rows in a row", "list", "list in a row"],
)
def test_a_part_that_is_called_before_its_model_is_in_no_group_twice(make: Any) -> None:
    torch.manual_seed(0)
    x, model = torch.ones(2, 4), make()
    expected = model(x)
    part = next(model.children())
    recomputing = Recomputing(Recorded(nn.Sequential()))  # pyright: ignore[reportArgumentType]
    called, plain, running, most = CalledModels(recomputing.add), _Group.__call__, 0, 0

    def counted(group: _Group, *args: Any, **kwargs: Any) -> Any:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        try:
            return plain(group, *args, **kwargs)
        finally:
            running -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Group, "__call__", counted)
        part(x)
        for _ in range(2):  # what is noticed runs in groups from its next call on
            assert torch.equal(model(x), expected)
    called.close()
    assert most == 1
    recomputing.close()
    assert all("forward" not in each.__dict__ for each in model.modules())


def test_layers_that_change_their_statistics_later_on_do_it_once() -> None:
    model, plain = row(nn.BatchNorm1d(4)).eval(), row(nn.BatchNorm1d(4)).eval()
    assert Recorded(model).choose(model, 1).found.groups
    for each in (model, plain):
        each.zero_grad()
        each.train()
        for step in range(3):
            each(torch.arange(8.0).reshape(2, 4) * step).sum().backward()
    for tested, reference in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(tested, reference)
    for tested, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(tested.grad, reference.grad)  # pyright: ignore[reportArgumentType]


def test_layers_that_are_changed_after_the_adoption_are_those_that_run(tmp_path: Path) -> None:
    with carme_runtime.memory(limit(), tmp_path) as limited_budget:
        model = row(nn.Tanh())
        model, _ = limited_budget.adopt(model, torch.optim.SGD(model.parameters(), 0.1), recompute=True)
        x = torch.ones(2, 4)
        for change in (
            lambda: model.__setitem__(2, nn.Linear(4, 3)),
            lambda: model.append(nn.Linear(3, 5)),
            lambda: model.__delitem__(1),
        ):
            change()
            expected = x
            for layer in model:
                expected = layer(expected)
            assert torch.equal(model(x), expected)
