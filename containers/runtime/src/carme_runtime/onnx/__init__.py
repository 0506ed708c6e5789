"""ONNX models on several workers: fused into tasks where little travels, and run as a Petri net.

    import carme_runtime.onnx

    results = carme_runtime.onnx.run("model.onnx", {"x": images}, workers=2)

Needs the extra `onnx`: pip install 'carme-runtime[onnx]'.
"""

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.examples import check_inputs, example_of
from carme_runtime.onnx.loading import Input, Model, load
from carme_runtime.onnx.plans import Plan, Task, parse_workers, plan
from carme_runtime.onnx.running import Runner, run
from carme_runtime.onnx.tracing import trace

__all__ = [
    "Input",
    "Model",
    "OnnxError",
    "Plan",
    "Runner",
    "Task",
    "check_inputs",
    "example_of",
    "load",
    "parse_workers",
    "plan",
    "run",
    "trace",
]
