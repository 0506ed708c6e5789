"""Ordinary loops with a pipeline, and sees that a single process does the same.

    pipeline_loops.py MODEL STAGES SCHEDULES...

Each of SCHEDULES is NAME:MICRO_BATCHES, with :tight for the least memory that works. Each goes on
from the checkpoint that the one before it saved.
"""

import copy
import sys
from typing import Any

import pipeline_models
import torch
import torch.distributed as dist
from pipelined import alike, rank, size, tightest
from torch.nn import functional

from carme_runtime.torch import pipeline

torch.set_num_threads(1)
Loss = functional.cross_entropy


def own(count: int, tested: Any) -> slice:
    """This replica's samples."""
    return slice(tested.replica * count, (tested.replica + 1) * count)


def train(tested: Any, optimizer: Any, reference: Any, expected_value: Any, data: Any, share: int) -> None:
    """Three steps, the second on a smaller batch, the third of two backward passes."""
    inputs, targets = data
    for step, count in enumerate((share, 5, share)):
        part, whole = own(count, tested), slice(0, count * tested.replicas)
        for repeat in range(1 + (step == 2)):
            torch.manual_seed(10 * step + repeat)
            outputs = tested(*(t[part] for t in inputs))
            Loss(outputs, targets[part]).backward()
            torch.manual_seed(10 * step + repeat)
            expected = reference(*(t[whole] for t in inputs))
            Loss(expected, targets[whole]).backward()
            alike(outputs.detach(), expected.detach()[part], f"outputs of step {step}")
        known = dict(reference.named_parameters())
        for name, parameter in tested.named_parameters():
            alike(parameter.grad, known[name].grad, f"gradient of {name} in step {step}")
        for kind in (2.0, float("inf")):
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.2 / kind, kind)
            alike(torch.nn.utils.clip_grad_norm_(tested.parameters(), 0.2 / kind, kind), norm, "norm")
        for each in (optimizer, expected_value):
            each.step()
            each.zero_grad()


def evaluate(tested: Any, reference: Any, inputs: Any) -> None:
    """On batches smaller and larger than those of training."""
    tested.eval()
    reference.eval()
    for count in (1, 7, len(inputs[0])):
        with torch.no_grad():
            outputs = tested(*(t[:count] for t in inputs))
            alike(outputs, reference(*(t[:count] for t in inputs)), f"evaluation of {count}")
            assert not outputs.requires_grad
    tested.train()
    reference.train()


def compare_states(tested: Any, reference: Any, expected_value: Any) -> tuple[Any, Any]:
    state, optimizer_state = tested.state_dict(), tested.optimizer_state_dict()
    if rank() == 0:
        known = reference.state_dict()
        for name, tensor in state.items():
            alike(tensor.double(), known[name].double(), name)
        expected = expected_value.state_dict()
        assert optimizer_state["param_groups"] == expected["param_groups"]
        assert list(optimizer_state["state"]) == list(expected["state"])
        for number, entry in expected["state"].items():
            for key, value in entry.items():
                alike(optimizer_state["state"][number][key], value, f"{key} of parameter {number}")
    else:
        assert not state and not optimizer_state
    both = [state, optimizer_state]
    dist.broadcast_object_list(both, 0)
    return both[0], both[1]


def main(name: str, stages: int, schedules: list[str]) -> None:
    saved: Any = None
    reference, inputs, targets = pipeline_models.make(name)
    expected_value = torch.optim.AdamW(reference.parameters(), 0.01)
    for specification in schedules:
        schedule, micro_batches, *words = specification.split(":")
        model, _, _ = pipeline_models.make(name)
        model = model if saved is None else copy.deepcopy(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
        if saved:
            optimizer.load_state_dict(saved[1])
        share = len(targets) // (size() // stages)
        options: dict[str, Any] = {
            "example": [t[:share] for t in inputs],
            "stages": stages,
            "micro_batches": int(micro_batches),
            "schedule": schedule,
            "batch_norm": "exact" if name == "batchnorm" else None,
        }
        if "tight" in words:
            options = tightest(model, optimizer, options)
        tested, optimizer = pipeline(model, optimizer, **options)
        assert any(fit.recomputes for fit in tested.plan().fits) == ("tight" in words)
        if saved:
            tested.load_state_dict(saved[0] if rank() == 0 else {})
        train(tested, optimizer, reference, expected_value, (inputs, targets), share)
        evaluate(tested, reference, inputs)
        saved = compare_states(tested, reference, expected_value)
        tested.close()
        stages = 1 if stages == size() else size()  # the next one has another layout


if __name__ == "__main__":
    dist.init_process_group("carme")
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    dist.destroy_process_group()
