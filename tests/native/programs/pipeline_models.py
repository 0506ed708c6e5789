"""Small models of the kinds that pipelines must train as a single process does."""

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Blocks with skips of their own, and one from the first block to the last."""

    def __init__(self, normal: type[nn.Module] | None = None, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=normal is None),
                normal(8) if normal else nn.GroupNorm(2, 8),
                nn.ReLU(inplace=True),
                nn.Conv2d(8, 8, 3, padding=1),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.relu_(self.stem(x))
        for block in self.blocks:
            x = functional.relu(x + block(x), inplace=True)
        return self.head((x + first).mean((2, 3)))


class UNet(nn.Module):
    """Skips over ever more stages, joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 8), (8, 8))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((8, 8), (16, 4))])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.down[0](x))
        b = torch.relu(self.down[1](functional.max_pool2d(a, 2)))
        c = torch.relu(self.down[2](functional.max_pool2d(b, 2)))
        d = torch.cat([torch.relu(self.up[0](c)), b], 1)
        e = torch.cat([torch.relu(self.up[1](d)), a], 1)
        return self.out(e)


class Transformer(nn.Module):
    """Tied embeddings: the first and the last stage have the same weights."""

    def __init__(self, dropout: float = 0.0, layers: int = 3, size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, size)
        self.position = nn.Parameter(0.1 * torch.randn(6, size))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(size, 2, batch_first=True) for _ in range(layers)
        )
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, size))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(layers))
        self.head = nn.Linear(size, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.position
        for attention, feed, norm in zip(self.attention, self.feed, self.norms, strict=True):
            x = x + attention(x, x, x, need_weights=False)[0]
            x = norm(x + feed(x))
        return self.head(x).transpose(1, 2)


class TwoInputs(nn.Module):
    """Two inputs, the second used late; sizes that follow from what is computed."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 12))
        self.second = nn.Linear(4, 12)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden.reshape(hidden.shape[0], 3, 4).flatten(1)
        return self.head(torch.cat([torch.tanh(hidden), self.second(y)], 1))


class Recurrent(nn.Module):
    """Two layers of an LSTM, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        return self.head(self.norm(hidden[:, -1]))


class Dense(nn.Module):
    """Each layer of a block takes the outputs of all before it, as in DenseNet."""

    def __init__(self, growth: int = 4, blocks: int = 2, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers, self.narrow = nn.ModuleList(), nn.ModuleList()
        width = 8
        for _ in range(blocks):
            self.layers.append(nn.ModuleList(self._layer(width + growth * n, growth) for n in range(layers)))
            width = (width + growth * layers) // 2
            self.narrow.append(nn.Conv2d(2 * width, width, 1))
        self.head = nn.Linear(width, 5)

    def _layer(self, width: int, growth: int) -> nn.Module:
        return nn.Sequential(
            nn.GroupNorm(1, width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layers, narrow in zip(self.layers, self.narrow, strict=True):
            parts = [x]
            for layer in layers:  # pyright: ignore[reportGeneralTypeIssues]
                parts.append(layer(torch.cat(parts, 1)))
            x = functional.avg_pool2d(narrow(torch.cat(parts, 1)), 2)
        return self.head(x.mean((2, 3)))


class TwoOutputs(nn.Module):
    """The first output is there early, the second late; both are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early = nn.Linear(8, 8), nn.Linear(8, 2)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.late = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        return self.early(x), self.late(self.middle(x))


class Deciding(nn.Module):
    """Its code depends on the data, so nobody can trace it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) if float(x.detach().abs().max()) < 1e6 else x


class Undecided(nn.Sequential):
    """Stages can begin with layers only."""

    cut_points = ("2",)

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), Deciding(), nn.Linear(8, 8), Deciding(), nn.Linear(8, 3))


class Words(nn.Module):
    """Takes sentences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = x + self.first(x)
        x = x + self.second(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(1))


class Views(nn.Module):
    """Behind the cut it uses two values, and views of one of them, of the other alone, and of its input."""

    cut_points = ("second",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.head = nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = torch.tanh(self.first(x))
        turned = base.view(-1, 2, 4).transpose(1, 2)
        left, right = base.chunk(2, 1)
        wide, gate, row = self.scale(base).expand(-1, 8), base.detach(), x.unsqueeze(1)
        hidden = self.second(base) + torch.cat([right, left], 1) * torch.sigmoid(gate)
        hidden = hidden + turned.flatten(1) + wide * row.squeeze(1)
        return self.head(torch.tanh(hidden))


class Turned(nn.Module):
    """Behind the cut it uses a turned value, and one that is turned back and takes another shape."""

    cut_points = ("second",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Conv1d(8, 3, 3, padding=1)
        self.head, self.last = nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.tanh(self.first(x)).transpose(1, 2)
        row = turned.transpose(1, 2).view(-1, 32)
        hidden = self.second(turned).mean(2) + self.head(row)
        return hidden + self.last(torch.relu(turned).transpose(1, 2).view(-1, 32))


class Untrained(nn.Module):
    """Both stages have a layer that gets no gradients."""

    cut_points = ("middle",)

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.first, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) + self.shared(x).detach()
        hidden = torch.tanh(self.middle(hidden))
        return hidden + self.shared(hidden).detach()


class DenseNet(nn.Module):
    """DenseNet-121's operators at its depth: 58 layers in four blocks, each with all outputs before it."""

    def __init__(self, growth: int = 4, normal: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        width, fewer = 2 * growth, 2  # a transition has so many times fewer channels afterwards
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), normal(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for number, layers in enumerate((6, 12, 24, 16)):
            block = nn.ModuleList()
            for layer in range(layers):
                given = width + layer * growth
                block.append(
                    nn.Sequential(
                        *(normal(given), nn.ReLU(), nn.Conv2d(given, 4 * growth, 1, bias=False)),
                        *(normal(4 * growth), nn.ReLU()),
                        nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                    )
                )
            self.blocks.append(block)
            width += layers * growth
            if number < 3:
                self.transitions.append(
                    nn.Sequential(
                        *(normal(width), nn.ReLU(), nn.Conv2d(width, width // fewer, 1, bias=False)),
                        nn.AvgPool2d(2),
                    )
                )
                width //= fewer
        self.last, self.head = normal(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            created = [x]
            for layer in block:  # pyright: ignore[reportGeneralTypeIssues]
                created.append(layer(torch.cat(created, 1)))
            x = torch.cat(created, 1)
            if number < len(self.transitions):
                x = self.transitions[number](x)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


def mlp() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], torch.Tensor]:
    """A model, inputs and targets of 24 samples; the same in every process."""
    torch.manual_seed(5)
    images, classes = torch.randn(24, 3, 8, 8), torch.randint(0, 3, (24,))
    words = torch.randint(0, 11, (24, 6))
    model, inputs, targets = {
        "mlp": lambda: (mlp(), (torch.randn(24, 8),), classes),
        "resnet": lambda: (Residual(), (images,), classes),
        "batchnorm": lambda: (Residual(nn.BatchNorm2d), (images,), classes),
        "densenet": lambda: (Dense(), (images,), classes),
        "unet": lambda: (UNet(), (images,), torch.randint(0, 2, (24, 8, 8))),
        "transformer": lambda: (Transformer(), (words,), words.roll(1, 1)),
        "dropout": lambda: (Transformer(0.2), (words,), words.roll(1, 1)),
        "lstm": lambda: (Recurrent(), (words,), classes),
        "words": lambda: (Words(), (words,), classes),
        "undecided": lambda: (Undecided(), (torch.randn(24, 8),), classes),
        "views": lambda: (Views(), (torch.randn(24, 8),), classes),
        "turned": lambda: (Turned(), (torch.randn(24, 4, 8),), classes),
        "untrained": lambda: (Untrained(), (torch.randn(24, 8),), classes),
        "inputs": lambda: (TwoInputs(), (torch.randn(24, 6), torch.randn(24, 4)), classes),
    }[name]()
    return model, inputs, targets
