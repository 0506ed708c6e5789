"""The first step of a pipeline runs while rank 0's parameters still travel.

    pipeline_streamed.py STAGES

Other ranks' parameters are NaN, and what travels gets into them only where code waits for it: what is used
before that shows.
"""

import copy
import sys
import time
import weakref
from typing import Any

import pipeline_models
import pytest
import torch
import torch.distributed as dist
from pipelined import alike, rank, single_step, size
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.torch import pipeline

torch.set_num_threads(1)
WAIT, COMPUTE = "wait", "tanh"
events: list[str] = []
broadcast: Any = Group.broadcast


class Noting(TorchDispatchMode):
    """Notes what is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        events.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


class Travelling:
    """What arrives in a tensor when somebody waits for it."""

    def __init__(self, group: Group, into: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if rank() == size() - 1:
            time.sleep(0.05)  # this rank is late
        self._into, self._content = into, into.clone()
        self._pending = broadcast(group, self._content, *arguments, **options)

    def wait(self) -> None:
        events.append(WAIT)
        self._pending.wait()
        if rank():
            self._into.copy_(self._content)


def travelling(group: Group, into: Any, *arguments: Any, **options: Any) -> Any:
    kind = Travelling if options.get("asynchronous") else broadcast
    return kind(group, into, *arguments, **options)


def build_pipeline(name: str, stages: int, schedule: str = "1f1b") -> tuple[Any, Any, Any, Any]:
    """A pipeline whose parameters travel, its optimizer, and rank 0's model and optimizer."""
    model, inputs, targets = pipeline_models.make(name)
    reference = copy.deepcopy(model)
    if rank():
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    share = len(targets) // (size() // stages)
    tested, optimizer = pipeline(
        model,
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        example=[t[:share] for t in inputs],
        stages=stages,
        micro_batches=4,
        schedule=schedule,
        cut_points=["6"] if name == "mlp" else (),
        start="streamed",
    )
    return tested, optimizer, reference, torch.optim.SGD(reference.parameters(), 0.05, momentum=0.9)


def train(name: str, stages: int, schedule: str) -> None:
    """Losses, gradients and weights are those of one process."""
    tested, optimizer, reference, expected = build_pipeline(name, stages, schedule)
    _, inputs, targets = pipeline_models.make(name)
    share = len(targets) // tested.replicas
    own = slice(tested.replica * share, (tested.replica + 1) * share)
    events.clear()
    for step in range(2):
        with Noting():
            loss = tested.step([t[own] for t in inputs], targets[own], loss=functional.cross_entropy)
        alike(loss, single_step(reference, inputs, targets, 1, True), f"loss of step {step}")
        known = dict(reference.named_parameters())
        for each, parameter in tested.named_parameters():
            alike(parameter.grad, known[each].grad, f"gradient of {each} in step {step}")  # pyright: ignore
        for stepped in (optimizer, expected):
            stepped.step()
            stepped.zero_grad()
    if rank() and name == "mlp" and schedule == "1f1b":
        last = len(events) - events[::-1].index(WAIT)
        assert events.index(COMPUTE) < last, "the first layer waited for the last one"
    assert rank() == 0 or WAIT in events, "nothing travelled when the first step began"
    assert not tested._carriers, "what has carried parameters stays"
    same_state(tested, reference)
    tested.close()


def same_state(tested: Any, reference: Any) -> None:
    state = tested.state_dict()
    for name, value in reference.state_dict().items() if rank() == 0 else ():
        alike(state[name], value, name)


def first_uses(stages: int) -> None:
    """Whatever uses the pipeline first has rank 0's parameters."""
    tested, _, reference, _ = build_pipeline("mlp", stages)
    same_state(tested, reference)
    tested.close()
    tested, _, reference, _ = build_pipeline("mlp", stages)
    peer = {name: value + 1 for name, value in reference.state_dict().items()}
    tested.load_state_dict(peer if rank() == 0 else {})  # which nothing that travels comes after
    reference.load_state_dict(peer)
    same_state(tested, reference)
    tested.close()
    tested, _, reference, _ = build_pipeline("mlp", stages)
    _, inputs, _ = pipeline_models.make("mlp")
    with torch.no_grad():
        alike(tested.eval()(*inputs), reference(*inputs), "evaluation")
    tested.close()
    tested, _, _, _ = build_pipeline("mlp", stages)  # and is never used: nobody waits for it in vain
    tested.close()


def at_once(stages: int) -> None:
    """Without streaming, parameters that need a copy on their way have one at a time."""
    model, inputs, _ = pipeline_models.make("mlp")
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    reference = copy.deepcopy(model)
    if rank():
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    copies: list[weakref.ref[torch.Tensor]] = []

    def noting(group: Group, into: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(into, torch.Tensor):
            assert not any(reference() is not None for reference in copies), "there is another copy"
            copies.append(weakref.ref(into))
        return broadcast(group, into, *arguments, **options)

    Group.broadcast = noting  # pyright: ignore[reportAttributeAccessIssue]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    tested, _ = pipeline(model, optimizer, example=inputs, stages=stages, cut_points=["6"])
    Group.broadcast = broadcast
    assert copies
    same_state(tested, reference)
    tested.close()


def failing(stages: int) -> None:
    """A pipeline whose parameters did not arrive leaves the model to itself, and closes."""

    def lose() -> None:
        raise OSError("lost")

    tested, _, _, _ = build_pipeline("mlp", stages)
    tested._arrivals.leave(lose)
    with pytest.raises(OSError, match="lost"):
        tested.close()
    assert not any(module._forward_pre_hooks for module in tested._traced.model.modules())
    assert tested._passes._post._boxes is None, "the memory of messages stays"


def mistake() -> None:
    model, inputs, _ = pipeline_models.make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InvalidCall, match=r"no start 'slowly'.*'streamed'"):
        pipeline(model, optimizer, example=inputs, start="slowly")


if __name__ == "__main__":
    dist.init_process_group("carme")
    at_once(int(sys.argv[1]))
    Group.broadcast = travelling  # pyright: ignore[reportAttributeAccessIssue]
    stages = int(sys.argv[1])
    mistake()
    for name, schedule in (("mlp", "1f1b"), ("mlp", "zb1p"), ("transformer", "1f1b")):
        train(name, stages, schedule)
    first_uses(stages)
    failing(stages)
    dist.destroy_process_group()
