"""Optimizer steps that run during the backward pass, in less memory than training needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carme_runtime
from patience import HANG

from .memory_limits import limit
from .test_memory import LIBRARIES, finish, losses, start

pytestmark = pytest.mark.timeout(8 * HANG)
WIDTH, LAYERS, STEPS = 512, 40, 5
REQUESTED = "--step-during-backward"


def moved(lines: list[dict[str, Any]]) -> int:
    """Bytes that the last step moved."""
    return lines[-1]["plan"]["measured_read"] + lines[-1]["plan"]["measured_written"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_foreach"])
def test_losses_are_the_same_and_less_is_moved(tmp_path: Path, optimizer: str) -> None:
    arguments = (optimizer, WIDTH, LAYERS, STEPS)
    limited = (*arguments, f"{LIBRARIES + 40}M", tmp_path)
    early = finish(start("--no-clip", REQUESTED, *limited))
    assert early[-1]["plan"]["late_step"] == ""
    assert losses(early) == losses(finish(start("--no-clip", *arguments)))
    late = finish(start("--no-clip", *limited))
    assert late[-1]["plan"]["late_step"] == "adopt(..., step_during_backward=True) asks for it"
    assert moved(early) < 0.9 * moved(late)


def test_a_script_that_clips_gradients_is_stepped_as_ever(tmp_path: Path) -> None:
    arguments = ("sgd", WIDTH, LAYERS, STEPS)
    limited = finish(start(REQUESTED, *arguments, f"{LIBRARIES + 40}M", tmp_path))
    assert limited[-1]["plan"]["late_step"].startswith("the script uses gradients between the backward pass")
    assert losses(limited) == losses(finish(start(*arguments)))


class Script:
    """A model under a limit of memory, whose steps run during the backward pass from the second one on."""

    def __init__(self, folder: Path, kind: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
        self.budget = carme_runtime.memory(limit(), folder)
        self.model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        self.optimizer = kind(self.model.parameters(), lr=0.1, **options)

    def __enter__(self) -> "Script":
        self.budget.__enter__()
        self.budget.adopt(self.model, self.optimizer, step_during_backward=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.budget.__exit__(*error)

    def backward(self) -> None:
        self.model(torch.ones(4, 256)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def reason(self) -> str:
        return self.budget.plan().late_step


def test_a_plan_says_whether_the_step_runs_during_the_backward_pass(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.step()
        before = script.model[0].weight.detach().clone()
        script.backward()
        assert not torch.equal(script.model[0].weight, before)  # although nobody has stepped yet
        script.optimizer.step()
        script.optimizer.zero_grad()
        assert "The optimizer's step runs during the backward pass" in str(script.budget.plan())
        weights = [each.detach().clone() for each in script.model.parameters()]
    torch.manual_seed(0)
    assert all(each.grad is None for each in script.model.parameters())
    assert all(
        torch.equal(stepped, copied)
        for stepped, copied in zip(script.model.parameters(), weights, strict=True)
    )


def twice(script: Script) -> None:
    script.backward()
    script.step()


def by_closure(script: Script) -> None:
    def closure() -> float:
        script.backward()
        return 0.0

    script.optimizer.step(closure)
    script.optimizer.zero_grad()


def hooked(script: Script) -> None:
    script.optimizer.register_step_pre_hook(lambda *_: None)
    script.step()


def looking(script: Script) -> None:
    script.backward()
    assert float(script.model[0].weight.grad.norm()) > 0
    script.optimizer.step()
    script.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (twice, "several backward passes make the gradients of a step"),
        (by_closure, "the gradients are made within the step, by a closure"),
        (hooked, "the optimizer has hooks that run before its step"),
        (looking, "the script uses gradients between the backward pass and the step"),
    ],
)
def test_what_else_is_done_with_gradients_keeps_steps_as_ever(
    tmp_path: Path, operation: Callable[[Script], None], reason: str
) -> None:
    torch.manual_seed(0)
    with Script(tmp_path) as script:
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        plain.load_state_dict(script.model.state_dict())
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            operation(script)
            for _ in range(1 + (operation is twice)):
                plain(torch.ones(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert script.reason.startswith(reason)
        assert f"after the backward pass: {reason}" in str(script.budget.plan())
        for stepped, expected in zip(script.model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(stepped, expected)


def test_an_optimizer_that_takes_all_parameters_at_once_steps_as_ever(tmp_path: Path) -> None:
    with Script(tmp_path, torch.optim.LBFGS, max_iter=1, history_size=1) as script:
        by_closure(script)
        assert script.reason == "LBFGS does not take each parameter by itself"


def without_zero_grad(script: Script) -> None:
    script.backward()
    script.optimizer.step()
    script.backward()


def other_rate(script: Script) -> None:
    script.backward()
    script.optimizer.param_groups[0]["lr"] = 0.01
    script.optimizer.step()


def left_out(script: Script) -> None:
    script.backward()
    script.optimizer.zero_grad()
    script.backward()


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (looking, "A gradient is used that is gone"),
        (without_zero_grad, "A gradient is used that is gone"),
        (other_rate, "Settings of the optimizer changed after the backward pass"),
        (left_out, "A second backward pass came before optimizer.step()"),
    ],
)
def test_a_later_use_of_gradients_is_refused_in_a_sentence(
    tmp_path: Path, mistake: Callable[[Script], None], sentence: str
) -> None:
    with Script(tmp_path) as script:
        script.step()
        script.step()
        assert script.reason == ""
        with pytest.raises(carme_runtime.CarmeRuntimeError, match=sentence):
            mistake(script)


def test_tensors_that_lie_in_the_heap_change_no_step(tmp_path: Path) -> None:
    """The allocator puts them into what the program has freed there, and they cannot leave."""
    torch.manual_seed(0)
    with carme_runtime.memory(limit(40), tmp_path) as budget:
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        model, optimizer = budget.adopt(model, torch.optim.SGD(model.parameters(), 0.01))
        followed = []
        for step in range(12):
            freed = [bytes(1000) for _ in range(2000)]
            end = bytes(1000)  # behind them: what is freed does not go back to the kernel
            if step % 3:
                freed.clear()
            optimizer.zero_grad()
            model(torch.randn(128, 512)).square().mean().backward()
            optimizer.step()
            followed.append(budget._steps.followed)
            assert end
    assert all(followed[6:]), followed  # of the first ones some are recorded, one of them anew


def test_what_is_used_after_the_optimizers_step_changes_no_step(tmp_path: Path) -> None:
    """As for the accuracy of a batch: it belongs to the step that begins."""
    torch.manual_seed(0)
    with carme_runtime.memory(limit(40), tmp_path) as budget:
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        model, optimizer = budget.adopt(model, torch.optim.SGD(model.parameters(), 0.01))
        followed: list[bool] = []
        found = 0
        for _ in range(8):
            optimizer.zero_grad()
            output = model(torch.randn(512, 512))
            output.square().mean().backward()
            optimizer.step()
            found += int((output.argmax(1) == 0).sum())
            followed.append(budget._steps.followed)
    assert all(followed[4:]), followed
