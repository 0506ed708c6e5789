"""Gradients made smaller on their way."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

from typing import Any

import torch


class Compressor:
    """The form of a compression: makes a tensor smaller, and brings back what it was."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The smaller tensor, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves it as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point numbers in 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """In half precision; other kinds of numbers as they are."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """In its own type again."""
        return tensor.to(ctx)


class Compression:
    """The compressions there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
