"""Real models give what ONNX Runtime gives: cut into tasks on 1, 2 and 4 workers, and as PyTorch modules.

    ./test models

A table at the end has each model's largest difference.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import carme_runtime.onnx as carme_onnx
from carme_runtime.onnx import Runner
from real_models import LIGHT, REAL, Real, distance, expected

TOLERANCE = 1e-4
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_fused_tasks_give_what_the_whole_model_gives(
    real: Real, tmp_path: Path, record_property: Any
) -> None:
    model = real.load()
    inputs = real.inputs(model)
    wanted = expected(model, inputs, tmp_path)
    for workers in (1, 2, 4):
        tasks = min(workers, len(model.nodes))
        found = carme_onnx.run(model, inputs, workers=workers, tasks=tasks)
        worst = max(distance(found[name], wanted[name]) for name in model.outputs)
        record_property(f"{workers}_workers", worst)
        print(f"{real.name}: {workers} workers, {tasks} tasks, largest difference {worst:.1e}")
        assert worst < TOLERANCE


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_the_torch_module_gives_what_onnx_runtime_gives(real: Real, tmp_path: Path) -> None:
    model = real.load()
    inputs = real.inputs(model)
    wanted = expected(model, inputs, tmp_path)
    module = carme_onnx.to_torch(model).eval()
    with torch.no_grad():
        found = module(*(torch.from_numpy(inputs[each.name].copy()) for each in model.inputs))
    results = found if isinstance(found, tuple) else (found,)
    worst = max(distance(r.numpy(), wanted[n]) for n, r in zip(model.outputs, results, strict=True))
    print(f"{real.name}: PyTorch, largest difference {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("name", LIGHT)
def test_light_networks_take_three_steps_as_a_loop_of_pytorch_does(name: str) -> None:
    real = next(each for each in REAL if each.file.endswith(f"light_{name}.onnx"))
    data = [(torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(k)), [k, 7 + k])
            for k in range(3)]  # fmt: skip
    torch.manual_seed(0)
    trained = carme_onnx.fit(real.load(), data, learning_rate=1e-3)
    torch.manual_seed(0)  # of Dropout
    module = carme_onnx.to_torch(real.load()).train()
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=1e-3), []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x).flatten(1), torch.tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert trained.losses == pytest.approx(losses, rel=1e-5)
    assert losses == pytest.approx(losses) and all(loss == loss for loss in losses)


def test_a_killed_worker_changes_no_result_of_the_detector(tmp_path: Path) -> None:
    real = next(each for each in REAL if "det_infer" in each.file)
    model = real.load()
    batches = [real.inputs(model) | {"x": carme_onnx.example_of(model, real.shapes, seed=k)["x"]}
               for k in range(10)]  # fmt: skip
    killed = []

    def kill(run: Any, number: int) -> None:
        if number == 6:
            killed.append(run.workers[0])
            os.kill(killed[0], signal.SIGKILL)

    found = Runner(model, 2, tasks=2, watch=kill).run(batches)
    assert killed
    for inputs, outputs in zip(batches, found, strict=True):
        wanted = expected(model, inputs, tmp_path)
        assert max(distance(outputs[name], wanted[name]) for name in model.outputs) < TOLERANCE
