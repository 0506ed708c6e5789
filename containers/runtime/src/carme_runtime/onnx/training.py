"""Trains ONNX models with PyTorch, over all ranks of a run."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from carme_runtime.onnx import asynchronous
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
    staleness: int = 2,
    compensation: float = 0.0,
    checkpoints: str | os.PathLike[str] | None = None,
    interval: int = 100,
    **settings: Any,
) -> Training:
    """Train a model. In a script that carme-run starts, all ranks train together.

    With `mode="sync"` each rank takes its share of every batch, and the losses and weights are those of one
    process, up to rounding. With `mode="async"` no rank waits for the others' gradients: each takes the next
    share that nobody has taken, steps on it alone, and sends what that changes to all others. So a slow rank
    takes fewer shares, and the weights that a gradient is computed with may lack the latest changes.

    Args:
        source: What `carme_runtime.onnx.load` takes or gives.
        data: Batches: pairs of inputs (an array or tensor, or a tuple where the model has several) and
            targets. The first dimension counts the samples. All ranks see the same batches.
        loss: `cross_entropy`, `mse`, `l1`, `binary_cross_entropy`, or a function of outputs and targets. The
            cross entropies leave out a Softmax or Sigmoid that the model ends with.
        optimizer: `sgd`, `adam`, `adamw`, or what makes one of parameters and `lr`.
        learning_rate: Of the optimizer.
        epochs: How often the data is gone through; it must be possible to iterate over it so often.
        mode: `sync`: gradients of all ranks are averaged before each step. `async`: see above; what a model
            keeps besides its weights, as BatchNorm does, each rank has of its own; the result is the mean.
        staleness: With `async`: by how many steps of all ranks the weights may be behind, 1 or more (stale
            synchronous parallel, Ho et al., 2013). A rank has 2 * `staleness` * ranks + 2 copies of them.
        compensation: With `async`: the lambda with which gradients are corrected for what the others have
            changed meanwhile (delay compensation, Zheng et al., 2017); 0: not at all.
        checkpoints: With `sync`: a folder that all ranks see, in which what is trained is saved. A later call
            with the same data goes on with it, on any number of ranks (`carme-run --max-restarts`).
        interval: Steps from one checkpoint to the next.
        settings: More arguments of the optimizer, such as momentum.

    Raises:
        OnnxError: An operator cannot be trained, a batch does not fit the model, or a name is unknown.
    """
    _check(mode, epochs, staleness, compensation, checkpoints, interval)
    criterion = _named(LOSSES, loss, "loss")
    make = _named(OPTIMIZERS, optimizer, "optimizer")
    module = _trainable(source, loss)
    stepping = make(module.parameters(), lr=learning_rate, **settings)
    batches = (batch for _ in range(epochs) for batch in _batches(module, data))
    if mode == "async" and _place()[1] > 1:
        losses = _train_asynchronously(module, stepping, criterion, batches, staleness, compensation)
    else:
        saved = _Saved(module, stepping, checkpoints, interval)
        losses = _train_synchronously(module, stepping, criterion, batches, saved)
    if not losses:
        raise OnnxError("There is no data to train with.", "Give pairs of inputs and targets.")
    return Training(module.eval(), losses)


def _place() -> tuple[int, int]:
    """This rank, of how many."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _trainable(source: Any, loss: str | Callable[..., torch.Tensor]) -> OnnxModule:
    """The module, without the end that the loss works out itself. Raises OnnxError if it has no weights."""
    module = to_torch(source)
    if isinstance(loss, str) and loss in _LAST:
        module.leave_out(_LAST[loss])
    if not list(module.parameters()):
        raise OnnxError("The model has no weights that could be trained.", "Train another model.")
    return module.train()


def _check(
    mode: str, epochs: int, staleness: int, compensation: float, checkpoints: Any, interval: int
) -> None:
    if mode not in ("sync", "async"):
        raise OnnxError(f"There is no mode '{mode}' of training.", "Use mode='sync' or mode='async'.")
    if epochs < 1:
        raise OnnxError(f"{epochs} epochs train nothing.", "Give 1 or more.")
    if staleness < 1:
        raise OnnxError(
            f"A staleness of {staleness} steps cannot be kept.", "Give 1 or more, or use mode='sync'."
        )
    if not compensation >= 0:
        raise OnnxError(f"A compensation of {compensation} corrects nothing.", "Give 0 or more.")
    if interval < 1:
        raise OnnxError(f"Checkpoints cannot be {interval} steps apart.", "Give an interval of 1 or more.")
    if checkpoints is not None and mode == "async":
        raise OnnxError(
            "Ranks that do not wait for each other have no checkpoints.",
            "Use mode='sync', or leave checkpoints= out.",
        )


class _Saved:
    """What is saved of a training while it goes on, and what it goes on with."""

    def __init__(
        self,
        module: OnnxModule,
        optimizer: torch.optim.Optimizer,
        folder: str | os.PathLike[str] | None,
        interval: int,
    ) -> None:
        self._state = {"model": module, "optimizer": optimizer}
        self._folder, self._interval = folder, interval

    def resume(self) -> list[float]:
        """Load the newest checkpoint, when the ranks have joined: the losses of the steps until there."""
        if self._folder is None:
            return []
        from carme_runtime.checkpoint import Checkpoints

        self._checkpoints = Checkpoints(Path(self._folder))
        return list((self._checkpoints.resume(**self._state) or {"losses": []})["losses"])

    def step(self, losses: list[float]) -> None:
        """So many steps are made."""
        if self._folder is not None and len(losses) % self._interval == 0:
            self._checkpoints.save(len(losses), **self._state, losses=losses)

    def close(self) -> None:
        """Return when the last checkpoint is written."""
        if self._folder is not None:
            self._checkpoints.wait()


def _named(table: dict[str, Any], choice: Any, kind: str) -> Any:
    if not isinstance(choice, str):
        return choice
    if choice not in table:
        raise OnnxError(f"There is no {kind} '{choice}'.", f"Use one of {', '.join(table)}, or a function.")
    return table[choice]


def _batches(
    module: OnnxModule, data: Iterable[tuple[Any, Any]]
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    for inputs, targets in data:
        sequence = inputs if isinstance(inputs, tuple | list) else (inputs,)
        found = tuple(torch.as_tensor(each) for each in sequence)
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
    part, share = _part((inputs, targets), rank, ranks)
    optimizer.zero_grad()
    value = _loss(module, criterion, *part)
    value.backward()
    optimizer.step()
    found = value.detach() * share
    if ranks > 1:
        found = found if share else torch.zeros(())
        torch.distributed.all_reduce(found)
    return float(found)


def _part(batch: Any, number: int, count: int) -> tuple[Any, float]:
    """One of the parts of a batch, and its share of the samples."""
    inputs, targets = batch
    own = targets.tensor_split(count)[number]
    return (tuple(each.tensor_split(count)[number] for each in inputs), own), len(own) / len(targets)


def _loss(
    module: OnnxModule,
    criterion: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
) -> torch.Tensor:
    outputs = module(*inputs)
    if isinstance(outputs, torch.Tensor) and outputs.ndim > 2 and targets.ndim < 2:
        outputs = outputs.flatten(1)  # scores with pixels, but a single one
    return criterion(outputs, targets)


def _train_synchronously(
    module: OnnxModule,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor],
    batches: Iterator[tuple[Any, Any]],
    saved: _Saved,
) -> list[float]:
    """Each rank takes its share of every batch; the losses of the steps."""
    rank, ranks = _place()
    if ranks > 1:
        from carme_runtime.torch import parallelize

        parallelize(module, optimizer)
    losses = saved.resume()
    for inputs, targets in itertools.islice(batches, len(losses), None):
        losses.append(_step(module, optimizer, criterion, inputs, targets, rank, ranks))
        saved.step(losses)
    saved.close()
    return losses


def _train_asynchronously(
    module: OnnxModule,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., torch.Tensor],
    batches: Iterator[Any],
    staleness: int,
    compensation: float,
) -> list[float]:
    """Train until there are no more batches; the mean loss over each."""
    from carme_runtime.collectives.mailboxes import Counter
    from carme_runtime.torch.pipeline_run import Run

    run, dist = Run(), torch.distributed
    assert run.world_group
    parameters = [each for each in module.parameters() if each.requires_grad]
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, 0)
    exchange = asynchronous.Exchange(run.context, run.world_group, parameters, staleness, run.timeout)
    counter = Counter(run.context, run.world_group, run.timeout)
    asynchronous.train(
        exchange,
        counter,
        asynchronous.numbered(batches, run.size, _part),
        lambda part: _loss(module, criterion, *part),
        parameters,
        optimizer,
        compensation,
    )
    exchange.close()
    counter.close()
    for parameter in parameters:  # which differ by rounding, by the order in which changes came
        dist.broadcast(parameter.data, 0)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= run.size
    parts = sorted(exchange.losses.items())
    return [sum(loss for _, loss in parts[at : at + run.size]) for at in range(0, len(parts), run.size)]
