"""ONNX models as PyTorch modules: a table of operators, and what runs a graph by it."""

from carme_runtime.onnx.conversion.module import OnnxModule, to_torch
from carme_runtime.onnx.conversion.table import OPERATORS

__all__ = ["OPERATORS", "OnnxModule", "to_torch"]
