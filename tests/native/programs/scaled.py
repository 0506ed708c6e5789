"""Scripts for `carme-run --scale-probe`; the first argument names one."""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)


class Named(nn.Module):
    """Is called with names, and returns its loss, as many libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(values)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def keras_fit() -> None:
    import keras

    model: Any = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    model.fit(torch.randn(2048, 32).numpy(), torch.randint(0, 4, (2048,)).numpy(), 32, 10_000, verbose=0)


def batches(size: int):
    data = TensorDataset(torch.randn(1024, 32), torch.randint(0, 4, (1024,)))
    while True:
        yield from DataLoader(data, batch_size=size, shuffle=True, drop_last=True)


def break_probe() -> None:
    """Let what the probe does besides the script's step fail."""
    from carme_runtime.scaling import measuring

    def fail(*_: object) -> None:
        raise ValueError("an odd number\nof lines")

    measuring.memory = fail


def train(steps: int = 1_000_000) -> None:
    named = Named()
    layers = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4))
    model = named if KIND == "named" else layers
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    if KIND == "a step before":
        peer = nn.Linear(2, 2)
        before = torch.optim.SGD(peer.parameters())
        peer(torch.ones(4, 2)).sum().backward()
        before.step()
    for number, (values, labels) in zip(range(steps), batches(32), strict=False):
        if KIND == "uneven":
            values, labels = values[: 2 + number % 29], labels[: 2 + number % 29]
        if KIND == "memory" and number == 5:
            torch.empty(1 << 60)
        if KIND == "python's memory" and number == 5:
            raise MemoryError  # as Python does, without a word
        if KIND == "error" and number == 5:
            raise ValueError("of the script's own")
        optimizer.zero_grad()
        if KIND == "named":
            model(values=values, labels=labels)["loss"].backward()
        elif KIND == "module":
            criterion(model(values), labels).backward()
        else:
            functional.cross_entropy(model(values), labels).backward()
        optimizer.step()


if KIND == "broken probe":
    break_probe()
if KIND == "keras":
    keras_fit()
elif KIND == "short":
    train(5)
elif KIND == "idle":
    print(torch.ones(2).sum().item())
else:
    train()
print("the script went on", flush=True)
