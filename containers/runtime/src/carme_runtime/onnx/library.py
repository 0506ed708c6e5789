"""The libraries of the extra `onnx`, imported where they are needed, or a sentence."""

import importlib
from typing import Any

from carme_runtime.onnx.errors import OnnxError


def library(name: str) -> Any:
    """A module of `onnx`, `onnxruntime`, `onnx_ir` or `torch`. Raises OnnxError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        if package == "torch":
            raise OnnxError("PyTorch is not installed.", "Use: pip install 'carme-runtime[torch]'") from None
        raise OnnxError(
            f"{package} cannot be imported ({error}).", "Use: pip install 'carme-runtime[onnx]'"
        ) from None
