"""What is measured on a GPU: kernels, not their launches. Needs a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("There is no GPU.", allow_module_level=True)

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512 * 400, 16)), batch_size=512)
for (x,) in data:
    optimizer.zero_grad()
    model(x.cuda().repeat(1, 256)).square().mean().backward()
    optimizer.step()
"""


def kernels_ms(run: object, repeats: int = 5) -> float:
    """Milliseconds of a call by CUDA's events, the median."""
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()  # pyright: ignore[reportCallIssue]
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)[repeats // 2]


def test_the_graph_has_the_times_of_kernels():
    from carme_runtime.torch import trace

    torch.manual_seed(0)
    size = 8192
    layers = torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 16)
    model = torch.nn.Sequential(*layers).cuda()
    x = torch.randn(4096, size, device="cuda")
    graph = trace(model, x)
    assert graph.device == torch.cuda.get_device_name(0)
    large = max(graph.operators, key=lambda operator: operator.timings[-1].forward_ms)
    expected = kernels_ms(lambda: torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    assert 0.7 * expected < large.timings[-1].forward_ms < 1.5 * expected + 0.1
    # Gradients of the weights alone: the model's input needs none.
    assert large.timings[-1].backward_ms > 0.5 * expected
    assert large.timings[-1].samples == 4096
    rest = sum(operator.timings[-1].forward_ms for operator in graph.operators) - large.timings[-1].forward_ms
    assert rest < expected


def test_the_scale_probe_measures_a_gpu(tmp_path: Path):
    script, result = tmp_path / "train.py", tmp_path / "result.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "carme_runtime.launcher.command", "-n", "1"]
    command += ["--scale-probe", "--scale-result", str(result), "--scale-seconds", "20", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    print(json.dumps(found)[:3000])
    assert torch.cuda.get_device_name(0) in json.dumps(found), found
