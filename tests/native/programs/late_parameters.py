"""Optimizers of `parallelize`, and parameters without a gradient at first, against one process without it.

All ranks have the same batches, so that the mean over ranks is what each of them has.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from carme_runtime.torch import parallelize


class Two(nn.Module):
    """Its second layer takes part once it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.both else x


sgd, adam, adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
cases: tuple[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], bool | None], ...] = (
    (sgd, {"momentum": 0.9}, True),
    (sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, True),
    (sgd, {"momentum": 0.9, "dampening": 0.5}, None),
    (sgd, {"momentum": 0.9, "fused": False}, False),
    (sgd, {"momentum": 0.9, "foreach": True}, None),
    (sgd, {"weight_decay": 0.1}, None),
    (adam, {"weight_decay": 0.1}, True),
    (adamw, {"amsgrad": True}, True),
)
torch.manual_seed(0)
for kind, options, fused in cases:
    for overlap in (False, True):
        tested = Two()
        expected = copy.deepcopy(tested)
        another = kind(expected.parameters(), lr=0.01, **options)
        optimizer = kind(tested.parameters(), lr=0.01, **options)
        tested, optimizer = parallelize(tested, optimizer, overlap_step=overlap, bucket_mb=1e-4)
        assert optimizer.param_groups[0]["fused"] is fused, f"{kind} {options}"
        for step in range(8):
            x = torch.randn(4, 8)
            tested.both = expected.both = step > 2
            for model, its in ((tested, optimizer), (expected, another)):
                its.zero_grad()
                model(x).square().mean().backward()
                its.step()
            if step == 5:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for a, b in zip(tested.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

frozen = Two()
frozen.second.requires_grad_(False)
first = torch.optim.SGD(frozen.first.parameters(), lr=0.01)
parallelize(frozen, first, accumulate=2)
frozen.second.requires_grad_(True)
parallelize(frozen, torch.optim.SGD(frozen.second.parameters(), lr=0.01))
frozen.both = True
frozen(torch.randn(4, 8)).square().mean().backward()  # what the first one does not reduce, the second does

torch.distributed.destroy_process_group()
