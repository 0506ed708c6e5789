"""Trains ONNX models with PyTorch, over all ranks of a run."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from carme_runtime.onnx.conversion import OnnxModule, to_torch
from carme_runtime.onnx.errors import OnnxError

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "binary_cross_entropy": functional.binary_cross_entropy_with_logits,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
#: What losses that work on logits want left out at the model's end.
_LAST = {"cross_entropy": "Softmax", "binary_cross_entropy": "Sigmoid"}


@dataclass
class Training:
    """What `fit` gives.

    Args:
        module: The trained module.
        losses: Of each step, the mean over the global batch.
    """

    module: OnnxModule
    losses: list[float] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trained model as ONNX. Raises OnnxError where the file cannot be written."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            draft.write_bytes(self.module.to_onnx().SerializeToString())
            draft.replace(target)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise OnnxError(f"{target} cannot be written: {error.strerror}.", "Name another file.") from None


def fit(
    source: Any,
    data: Iterable[tuple[Any, Any]],
    *,
    loss: str | Callable[..., torch.Tensor] = "cross_entropy",
    optimizer: str | Callable[..., torch.optim.Optimizer] = "sgd",
    learning_rate: float = 0.01,
    epochs: int = 1,
    mode: str = "sync",
    **settings: Any,
) -> Training:
    """Train a model. In a script that carme-run starts, all ranks train together: each takes its share of
    every batch, and the losses and weights are those of one process, up to rounding.

    Args:
        source: What `carme_runtime.onnx.load` takes or gives.
        data: Batches: pairs of inputs (an array or tensor, or a tuple where the model has several) and
            targets. The first dimension counts the samples. All ranks see the same batches.
        loss: `cross_entropy`, `mse`, `l1`, `binary_cross_entropy`, or a function of outputs and targets. The
            cross entropies leave out a Softmax or Sigmoid that the model ends with.
        optimizer: `sgd`, `adam`, `adamw`, or what makes one of parameters and `lr`.
        learning_rate: Of the optimizer.
        epochs: How often the data is gone through; it must be possible to iterate over it so often.
        mode: `sync`: gradients of all ranks are averaged before each step.
        settings: More arguments of the optimizer, such as momentum.

    Raises:
        OnnxError: An operator cannot be trained, a batch does not fit the model, or a name is unknown.
    """
    if mode != "sync":
        raise OnnxError(f"There is no mode '{mode}' of training.", "Use mode='sync'.")
    if epochs < 1:
        raise OnnxError(f"{epochs} epochs train nothing.", "Give 1 or more.")
    criterion = _named(LOSSES, loss, "loss")
    make = _named(OPTIMIZERS, optimizer, "optimizer")
    module = to_torch(source)
    if isinstance(loss, str) and loss in _LAST:
        module.leave_out(_LAST[loss])
    if not list(module.parameters()):
        raise OnnxError("The model has no weights that could be trained.", "Train another model.")
    stepping = make(module.parameters(), lr=learning_rate, **settings)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        from carme_runtime.torch import parallelize

        parallelize(module, stepping)
    module.train()
    made = Training(module)
    for _ in range(epochs):
        for inputs, targets in _batches(module, data):
            made.losses.append(_step(module, stepping, criterion, inputs, targets, rank, ranks))
    if not made.losses:
        raise OnnxError("There is no data to train with.", "Give pairs of inputs and targets.")
    module.eval()
    return made


def _named(table: dict[str, Any], given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    if given not in table:
        raise OnnxError(f"There is no {what} '{given}'.", f"Use one of {', '.join(table)}, or a function.")
    return table[given]


def _batches(
    module: OnnxModule, data: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    for inputs, targets in data:
        several = inputs if isinstance(inputs, tuple | list) else (inputs,)
        found = tuple(torch.as_tensor(each) for each in several)
        wanted = torch.as_tensor(targets)
        if len(found) != len(module.inputs):
            raise OnnxError(
                f"A batch has {len(found)} inputs, and the model takes {len(module.inputs)}.",
                f"Give {', '.join(module.inputs)}.",
            )
        lengths = {each.shape[0] if each.ndim else 0 for each in (*found, wanted)}
        if len(lengths) > 1 or 0 in lengths:
            raise OnnxError(
                f"Inputs and targets of a batch have {sorted(lengths)} samples.",
                "Give the same number of each.",
            )
        yield found, wanted


def _step(
    module: OnnxModule,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    rank: int,
    ranks: int,
) -> float:
    """One step; the mean loss over the batch."""
    own = tuple(each.tensor_split(ranks)[rank] for each in inputs)
    wanted = targets.tensor_split(ranks)[rank]
    optimizer.zero_grad()
    outputs = module(*own)
    if isinstance(outputs, torch.Tensor) and outputs.ndim > 2 and targets.ndim < 2:
        outputs = outputs.flatten(1)  # scores with pixels of which there is one
    value = criterion(outputs, wanted)
    value.backward()
    optimizer.step()
    share = value.detach() * (len(wanted) / len(targets))
    if ranks > 1:
        share = share if len(wanted) else torch.zeros(())
        torch.distributed.all_reduce(share)
    return float(share)
