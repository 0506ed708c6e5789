"""ONNX models on several workers: fused into tasks where little travels, and run as a Petri net.

    import carme_runtime.onnx

    results = carme_runtime.onnx.run("model.onnx", {"x": images}, workers=2)

Needs the extra `onnx`: pip install 'carme-runtime[onnx]'; `to_torch` and `fit` need PyTorch, too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from carme_runtime.onnx.errors import OnnxError
from carme_runtime.onnx.examples import check_inputs, example_of
from carme_runtime.onnx.library import library
from carme_runtime.onnx.loading import Input, Model, load
from carme_runtime.onnx.plans import Plan, Task, parse_workers, plan
from carme_runtime.onnx.running import Runner, run
from carme_runtime.onnx.tracing import trace

if TYPE_CHECKING:
    from carme_runtime.onnx.conversion import to_torch
    from carme_runtime.onnx.training import fit

__all__ = [
    "Input",
    "Model",
    "OnnxError",
    "Plan",
    "Runner",
    "Task",
    "check_inputs",
    "example_of",
    "fit",
    "load",
    "parse_workers",
    "plan",
    "run",
    "to_torch",
    "trace",
]

_WITH_TORCH = {"to_torch": "carme_runtime.onnx.conversion", "fit": "carme_runtime.onnx.training"}


def __getattr__(name: str) -> Any:
    """What needs PyTorch, imported when it is requested."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library("torch")
    return getattr(importlib.import_module(_WITH_TORCH[name]), name)
