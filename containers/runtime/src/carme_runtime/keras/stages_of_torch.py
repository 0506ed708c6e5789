"""Keras models in stages on the torch backend."""

# torch need not be installed where this is checked.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from carme_runtime import strategies
from carme_runtime.keras.data import Share
from carme_runtime.keras.library import keras
from carme_runtime.keras.masks import Carried
from carme_runtime.keras.optimizer import as_they_are, reducing
from carme_runtime.keras.stage_loops import LoopingSteps
from carme_runtime.keras.tracing import KerasGraph
from carme_runtime.torch.pipelines import Pipeline, pipeline


class TorchPipelineSteps(LoopingSteps):
    """See `PipelineSteps`."""

    def _graph_of(self, model: Any, carried: Carried | None = None) -> KerasGraph:
        return KerasGraph(model, carried)

    def _carried(self, example: tuple[Any, ...]) -> Carried:
        device = example[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return super()._carried(example)

    def _build_pipeline(self, example: tuple[Any, ...], whole_batch: bool) -> Pipeline:
        wanted, marked = self._wanted, self._graph.stages > 1
        self._graph.train()
        with torch.enable_grad():  # also where the first batch is for prediction
            return pipeline(
                self._graph,
                _placeholder(getattr(self._model, "optimizer", None), self._graph),
                example=example,
                stages=self.stages or wanted.stages,
                micro_batches=wanted.micro_batches,
                schedule=wanted.schedule,
                memory=wanted.memory,
                strategy=strategies.AUTO if marked else wanted.strategy,
                batch_norm=wanted.batch_norm,
                cut_points=self._graph.cut_points,
                whole_batch=whole_batch,
            )[0]

    def _content(self, v: Any, holds: bool) -> torch.Tensor:
        content = v.value.detach() if holds else torch.empty(tuple(v.shape), dtype=v.value.dtype)
        return content.contiguous()

    def _bytes_of(self, content: torch.Tensor) -> np.ndarray:
        return content.detach().reshape(-1).view(torch.uint8).numpy()

    def _put(self, v: Any, content: torch.Tensor) -> None:
        if self._is_whole(v):
            v.value.data.copy_(content)
        else:
            v.value.data = content

    def _free(self, v: Any) -> None:
        v.value.data = torch.empty(0, dtype=v.value.dtype)

    def _is_whole(self, v: Any) -> bool:
        return tuple(v.value.shape) == tuple(v.shape)

    def _unrecorded(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def _detached(self, value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _outputs(self, pipe: Pipeline, inputs: Any) -> Any:
        pipe.eval()
        with torch.no_grad():
            outputs = pipe(*inputs)
        pipe.train()
        return outputs

    def _train_batch(self, data: Any) -> None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        inputs = self._graph.inputs_of(x)
        pipe = self._pipe.train()
        self._share_losses()
        penalty, added = self._penalty()

        def loss(outputs: Any, target: Any) -> torch.Tensor:
            targets, weighted = target
            return self._loss(self._graph.outputs_of(outputs), targets, weighted, added)

        y, weights = keras.tree.map_structure(_tensor, (y, weights))
        self._count_before(inputs, y, weights)
        for parameter in pipe.parameters():
            parameter.grad = None
        counted = None if self._running.samples else 0
        pipe.step(inputs, (y, weights), loss=loss, counted=counted)
        if penalty is not None:
            penalty.backward()
        own = {n: p.grad for n, p in pipe.named_parameters() if p.requires_grad and p.grad is not None}
        self._step(self._model.optimizer, own)

    def _trained(self, inputs: Sequence[torch.Tensor], part: Share) -> list[torch.Tensor]:
        outputs = self._pipe.train().outputs(inputs, counted=None if part.samples else 0)
        flat = list(outputs) if isinstance(outputs, tuple) else [outputs]
        # The pipeline takes gradients of a mean over this replica's share.
        factor = part.total / part.samples if part.samples else 0.0
        for tensor in flat if factor != 1 else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * factor)
        return flat

    def _step(self, optimizer: Any, gradients: dict[str, torch.Tensor]) -> None:
        own = [self._graph.variables[name] for name in gradients]
        for v, gradient in zip(own, gradients.values(), strict=True):
            v.value.grad = gradient.detach()
        if optimizer.global_clipnorm:
            norm = self._pipe.gradient_norm([v.value.grad for v in own])
            scale = min(1.0, optimizer.global_clipnorm / max(float(norm), 1e-30))
            for v in own:
                v.value.grad.mul_(scale)
        with torch.no_grad(), reducing(as_they_are):
            if own:
                optimizer.apply([v.value.grad for v in own], own)
            elif self._slots:
                self._slots.count_step()


def _tensor(value: Any) -> Any:
    """What micro-batches can be cut of."""
    return value if value is None else keras.ops.convert_to_tensor(value)


def _placeholder(optimizer: Any, graph: KerasGraph) -> torch.optim.Optimizer:
    """A PyTorch optimizer that keeps as much for a parameter as Keras' does; it never steps."""
    parameters = [p for p in graph.parameters() if p.is_floating_point()]
    averages = bool(getattr(optimizer, "use_ema", False))
    if isinstance(optimizer, keras.optimizers.SGD):
        if averages and optimizer.momentum:
            return torch.optim.Adam(parameters)
        return torch.optim.SGD(parameters, 0.1, momentum=optimizer.momentum or float(averages))
    return torch.optim.Adam(parameters, amsgrad=averages)
