"""Batch normalization over the samples of all ranks."""

# As in torch/backend.py.
# pyright: reportMissingImports=false

import torch
from torch import nn

from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.horovod.reductions import Sum, allreduce
from carme_runtime.horovod.world import world


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d`, whose mean and variance in training are those over all ranks.

    Arguments and parameters are those of the others. Ranks may have different numbers of samples. All ranks
    must call it the same number of times, forwards and backwards.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # the name is the base class's
        if input.dim() < 2:
            raise InvalidCall(
                f"SyncBatchNorm got a tensor of {input.dim()} dimensions.", "Give samples and channels first."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The samples normalized, over all ranks while training."""
        if world().size == 1 or not (self.training or self.running_mean is None or self.running_var is None):
            return super().forward(input)
        self._check_input_dim(input)
        # Sums of 16-bit numbers are not worth much.
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        over = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        own = wide.new_tensor([input.numel() // input.shape[1]])
        # First the mean and then what is around it: the difference of two large sums would lose digits.
        sums, count = allreduce(torch.cat([wide.sum(over), own]), op=Sum).split([input.shape[1], 1])
        count = count.detach()
        mean = sums / count
        centred = wide - mean.view(shape)
        variance = allreduce((centred * centred).sum(over), op=Sum) / count
        if self.training and self.track_running_stats:
            self._remember(mean.detach(), variance.detach(), count)
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Let the running averages follow; their variance is that without bias, as in the base class."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)
