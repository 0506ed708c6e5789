"""Trains one of three kinds of models with a limit of memory, and prints its plan as a line of JSON.

out_of_core_models.py MODEL LIMIT FOLDER
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import nn

import carme_runtime

torch.set_num_threads(1)
STEPS = 3


def mlp() -> tuple[nn.Module, torch.Tensor]:
    parts = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(1024, 10)), torch.randn(64, 1024)


def conv() -> tuple[nn.Module, torch.Tensor]:
    parts = [
        part
        for _ in range(6)
        for part in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
    ]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(nn.Conv2d(3, 32, 1), *parts, *ends), torch.randn(16, 3, 64, 64)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.words = nn.Embedding(4000, 256)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x)).mean(1))


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(), torch.randint(0, 4000, (16, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": mlp, "conv": conv, "transformer": transformer,
}  # fmt: skip


def main(model_name: str, limit: str, folder: str) -> None:
    with carme_runtime.memory(limit, folder) as budget:
        torch.manual_seed(0)
        model, x = MODELS[model_name]()
        y = torch.randint(0, 10, (len(x),))
        model, optimizer = budget.adopt(model, torch.optim.AdamW(model.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(json.dumps(budget.plan().as_dict()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
