"""Runs the passes of a step on one rank, in the order of the schedule."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map

from carme_runtime import profile
from carme_runtime.activity import doing
from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.collectives.mailboxes import Mailboxes
from carme_runtime.pipeline import KINDS, Plan, Schedule, Schedules, losses, rows
from carme_runtime.pipeline.messages import Post, boxes_of
from carme_runtime.pipeline.schedules import BACKWARD, FORWARD, INPUTS, Action
from carme_runtime.pipeline.timeline import NAMES
from carme_runtime.torch import messages
from carme_runtime.torch.arrivals import Arrivals
from carme_runtime.torch.calls import Called
from carme_runtime.torch.evaluation import Constants, evaluated
from carme_runtime.torch.frozen import Frozen
from carme_runtime.torch.pieces import (
    Later,
    Piece,
    Statistics,
    other_random,
    piece_of,
    update_running_statistics,
)
from carme_runtime.torch.recomputing import Before, changed_tensors, first_time
from carme_runtime.torch.shapes import InputShapes
from carme_runtime.torch.traced import Traced, is_dropout

Loss = Callable[[Any, Any], torch.Tensor]
Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclasses.dataclass
class _Held:
    """What a micro-batch leaves in a piece until its backward pass."""

    leaves: dict[str, torch.Tensor]
    results: dict[str, Any]
    give_up: list[Callable[[], None]]
    loss: torch.Tensor | None = None
    later: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)
    gradients: list[Any] = dataclasses.field(default_factory=list)  # of the outputs, for the backward pass
    compute: Callable[[], None] | None = None  # what the backward pass begins with: the forward pass


@dataclasses.dataclass
class _Batch:
    """The batch of a step.

    Args:
        parts: By micro-batch: what the model is called with, and the targets.
        shares: By micro-batch: its part of the samples of all replicas.
        masks: By micro-batch: Dropout's.
        rows: By micro-batch: those of this replica's batch.
        loss: The user's; None: the caller wants outputs.
        pieces: Those of this rank, in training or in evaluation.
    """

    parts: list[tuple[tuple[torch.Tensor, ...], Any]]
    shares: list[float]
    masks: list[dict[str, torch.Tensor]]
    rows: list[range]
    loss: Loss | None
    pieces: Mapping[int, Piece]


class Passes:
    """This rank's passes.

    Args:
        traced: The model.
        plan: The pipeline's.
        run: The ranks; see `pipelines`.
        ranks: Those of this pipeline, by stage.
        group: The same, where there are several.
        arrivals: What waits for parameters that still travel; None: none does.
    """

    def __init__(
        self,
        traced: Traced,
        plan: Plan,
        run: Any,
        ranks: list[int],
        group: Group | None,
        arrivals: Arrivals | None,
    ) -> None:
        self._traced, self._plan, self._run = traced, plan, run
        self._ranks, self._group, self._arrivals = ranks, group, arrivals
        # Not all is then used by calls of PyTorch's functions that are seen.
        self._opaque = plan.schedule.split or any(node.op == "call_module" for node in traced.nodes)
        self._stage = ranks.index(run.rank)
        self._statistics, self._later = Statistics(), Later()
        self._pieces, self._shapes = self._own_pieces(), InputShapes(traced)
        self._frozen = Frozen(traced.graph, (v for values in plan.pieces.channels.values() for v in values))
        self._evaluating: dict[int, Piece] = {}
        operators = traced.graph.operators
        self._own_operators = {operators[at].name for p in self._pieces for at in plan.pieces.span(p)}
        dropouts = [node for node in traced.nodes if is_dropout(node)]
        # A single process may run them in another order than the stages.
        self._dropouts = sorted(dropouts, key=lambda node: node.meta.get("order", 0))
        self._own_masks = {n for p in self._pieces.values() for kind, n in p.arguments if kind == "mask"}
        boxes = Mailboxes(run.context, group, boxes_of(plan, ranks), run.timeout) if group else None
        self._post = Post(plan, boxes, messages.pack, self._unpacked)
        self._schedules = Schedules(plan.schedule, plan.pieces.channels, plan.slots)
        self._held: dict[tuple[int, int], _Held] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._losses: list[torch.Tensor] = []
        self._device = next((t.device for t in traced.named_tensors().values()), torch.device("cpu"))
        self._failed = False
        self._recomputes = plan.recomputes(self._stage)
        self._changed = changed_tensors(traced) if self._recomputes else frozenset()
        self._draws = bool(other_random(traced))

    def _own_pieces(self, constants: Constants | None = None) -> dict[int, Piece]:
        plan = self._plan
        deferred, split = plan.batch_norm == "deferred", plan.schedule.split
        return {
            piece: piece_of(self._traced, plan.pieces, piece, deferred, split, constants)
            for piece, holder in enumerate(plan.schedule.holders)
            if holder == self._stage
        }

    def close(self) -> None:
        """Give up the memory of messages."""
        self._post.close()

    def run(
        self, batch: tuple[torch.Tensor, ...], targets: Any, loss: Loss, counted: int | None = None
    ) -> float:
        """Do all passes of a step; this rank's part of the mean loss. Raises InvalidCall, PeerLost.

        With `counted=0` the batch does not count: its replica only takes part.
        """
        self._check_whole()
        self._check(batch)
        self._check_size(batch)
        self._frozen.check(self._traced.model)
        _check_targets(len(batch[0]), targets)
        counts = self._counts(len(batch[0]) if counted is None else counted)
        self._failed = True  # until all is well
        schedule = self._schedule(len(batch[0]))
        prepared = self._prepared(batch, targets, loss, counts, schedule.micro_batches)
        self._tensors, self._losses, self._held = self._traced.named_tensors(), [], {}
        with torch.enable_grad(), profile.pipeline_step(self._stage, schedule):
            for action in schedule.actions[self._stage]:
                self._do(action, prepared)
        self._end()
        return sum(map(float, self._losses))  # here, as looking at one waits for a GPU

    def call(
        self, batch: tuple[torch.Tensor, ...], shapes: Shapes | None, counted: int | None = None
    ) -> Called:
        """The forward passes of a batch, one micro-batch after the other on all stages.

        Args:
            batch: What the model is called with. In evaluation it may have any number of samples.
            shapes: In evaluation: of all parameters and buffers of the model.
            counted: 0 where the batch does not count, and its replica only takes part.

        Returns:
            The outputs, on all ranks, and what the backward pass needs if gradients are enabled.
        """
        self._check_whole()
        self._check(batch)
        if shapes is None:
            self._check_size(batch)
        if torch.is_grad_enabled():
            self._frozen.check(self._traced.model)
        self._check_outputs(len(batch[0]))
        samples = len(batch[0]) if counted is None else counted
        counts = self._counts(samples, all_replicas=shapes is None)
        if shapes is not None and not self._evaluating:
            self._evaluating = self._own_pieces(evaluated(self._traced, shapes, batch))
        self._failed = True
        micro_batches = -(-len(batch[0]) // self._plan.micro_samples)
        prepared = self._prepared(batch, None, None, counts, micro_batches, shapes is not None)
        self._tensors, self._held = self._traced.named_tensors(), {}
        outputs: list[list[Any]] = []
        # In this order a rank waits only for what comes before in it: no number of slots is too small.
        for micro in range(micro_batches):
            for piece in sorted(self._pieces):
                with doing(self._stage, NAMES[FORWARD], micro):
                    self._forward(piece, micro, prepared)
                if piece == self._plan.pieces.count - 1:
                    outputs.append([part.detach() for part in self._held[piece, micro].outputs])
                if not torch.is_grad_enabled():
                    del self._held[piece, micro]
        held = self._held
        self._end(statistics=shapes is None)
        sizes = [len(part[0][0]) for part in prepared.parts]
        whole = self._everywhere([_joined(parts) for parts in zip(*outputs, strict=True)])
        return Called(whole, held, sizes, samples / sum(counts))

    def call_backward(self, called: Called, gradients: Sequence[torch.Tensor | None]) -> None:
        """The backward passes of what `call` did, for gradients of the outputs."""
        self._check_whole()
        self._failed = True
        self._tensors, self._held = self._traced.named_tensors(), called.held
        last = self._plan.pieces.count - 1
        begin = 0
        with torch.enable_grad():
            for micro, size in enumerate(called.sizes):
                for piece in sorted(self._pieces, reverse=True):
                    if piece == last:
                        parts = [_rows(g, begin, size, sum(called.sizes)) for g in gradients]
                        self._held[piece, micro].gradients = [
                            None if part is None else part * called.share for part in parts
                        ]
                    with doing(self._stage, NAMES[BACKWARD], micro):
                        self._backward(piece, micro)
                    with torch.no_grad():
                        for call in self._held[piece, micro].later:
                            call()
                    self._finish(piece, micro)
                begin += size
        self._end(statistics=False)

    def _end(self, statistics: bool = True) -> None:
        """After the passes of a batch."""
        self._post.flush()
        if statistics and self._plan.batch_norm == "deferred":
            with torch.no_grad():
                update_running_statistics(self._traced, self._statistics, self._own_operators)
            self._statistics.sums.clear()
        self._tensors, self._held, self._failed = {}, {}, False

    def _everywhere(self, outputs: list[Any]) -> list[torch.Tensor]:
        """What the last piece's rank has, on all ranks of the pipeline."""
        if not self._group:
            return outputs
        root = self._plan.schedule.holders[-1]
        size = numpy.zeros(1, numpy.int64)
        if self._stage == root:
            size[0] = messages.room([part.numel() * part.element_size() for part in outputs])
        self._group.broadcast(size, root, timeout=self._run.timeout)
        memory = numpy.zeros(int(size[0]), numpy.uint8)
        if self._stage == root:
            messages.pack(memory, outputs, "the outputs")
        self._group.broadcast(memory, root, timeout=self._run.timeout)
        return self._to_device(messages.unpack(memory, len(self._traced.graph.results)))

    def _to_device(self, parts: list[Any]) -> list[Any]:
        """The parts of a message, with tensors on the device of the model."""
        return [part.to(self._device) if isinstance(part, torch.Tensor) else part for part in parts]

    def _check_whole(self) -> None:
        if self._failed:
            raise InvalidCall("An earlier step of this pipeline failed.", "Make it again to go on.")

    def _check_outputs(self, samples: int) -> None:
        """See that outputs of micro-batches can be put together."""
        graph = self._traced.graph
        for name in graph.results if samples > self._plan.micro_samples else ():
            value = graph.value[name]
            if not value.shape or value.shape[0] % graph.samples or not value.per_sample:
                raise InvalidCall(
                    f"The model returns a value of shape {list(value.shape)}, whose dimension 0 does not "
                    "count the samples, so those of micro-batches cannot be put together.",
                    "Use step(), which calls the loss for each micro-batch, or micro_batches=1.",
                )

    # Before the step

    def _check(self, batch: tuple[torch.Tensor, ...]) -> None:
        graph = self._traced.graph
        if len(batch) != len(graph.inputs):
            raise InvalidCall(
                f"The batch has {len(batch)} tensors, and the example had {len(graph.inputs)}.",
                "Give step() the inputs as in the example, and targets separately.",
            )
        for number, (name, tensor) in enumerate(zip(graph.inputs, batch, strict=True)):
            value = graph.value[name]
            fits = self._shapes.fit(number, tensor.shape, value.shape)
            if not fits or str(tensor.dtype)[6:] != value.dtype:
                raise InvalidCall(
                    f"The input {name} has samples of shape {list(tensor.shape[1:])} and type "
                    f"{str(tensor.dtype)[6:]}; in the example they had {list(value.shape[1:])} and "
                    f"{value.dtype}.",
                    "Give pipeline() an example like the data.",
                )

    def _check_size(self, batch: tuple[torch.Tensor, ...]) -> None:
        if len(batch[0]) > self._plan.samples:
            raise InvalidCall(
                f"The batch has {len(batch[0])} samples, and the example had {self._plan.samples}.",
                "Give pipeline() an example that is as large as the largest batch.",
            )
        kind = KINDS[self._plan.schedule.name]
        if kind.multiple_of_ranks and len(batch[0]) < self._plan.schedule.micro_batches:
            raise InvalidCall(
                f"The schedule {self._plan.schedule.name} needs at least "
                f"{self._plan.schedule.micro_batches} samples; the batch has {len(batch[0])}.",
                "Leave such a batch out, or use schedule='1f1b'.",
            )

    def _counts(self, samples: int, all_replicas: bool = True) -> list[int]:
        """Samples of each replica, or of this one alone. Raises Mismatch where ranks of one differ."""
        group = self._run.world_group if all_replicas else self._group
        if not group:
            return [samples]
        counts = numpy.zeros(group.size, numpy.int64)
        own = numpy.array([samples], numpy.int64)
        group.allgather(counts, own, timeout=self._run.timeout)
        stages = self._plan.schedule.ranks
        rows = counts.reshape(-1, stages)
        for number, row in enumerate(rows):
            if (row != row[0]).any():
                first = number * stages if all_replicas else self._ranks[0]
                raise Mismatch(
                    f"Ranks {first} to {first + stages - 1} are one pipeline, and got "
                    f"batches of {row.tolist()} samples.",
                    "Give all ranks of a pipeline the same batch.",
                )
        return rows[:, 0].tolist()

    def _prepared(
        self,
        batch: tuple[torch.Tensor, ...],
        targets: Any,
        loss: Loss | None,
        counts: list[int],
        micro_batches: int,
        evaluating: bool = False,
    ) -> _Batch:
        samples = len(batch[0])
        few, more = divmod(samples, micro_batches)
        sizes = [few + (micro < more) for micro in range(micro_batches)]
        replica = self._ranks[0] // self._plan.schedule.ranks
        at, parts = 0, []
        offsets = []
        for size in sizes:
            cut = partial(_part, samples, at, at + size)
            parts.append((tuple(map(cut, batch)), tree_map(cut, targets)))
            offsets.append(at)
            at += size
        masks: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
        if not evaluating:
            before = sum(counts[:replica]) if counts[replica] else 0
            masks = self._masks(batch, sum(counts), before, offsets, sizes)
        pieces = self._evaluating if evaluating else self._pieces
        shares = [size / sum(counts) if evaluating or counts[replica] else 0.0 for size in sizes]
        spans = [range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        return _Batch(parts, shares, masks, spans, loss, pieces)

    def _schedule(self, samples: int) -> Schedule:
        """The plan's, or for the last, smaller batch one with fewer micro-batches."""
        planned = self._plan.schedule
        micro_batches = -(-samples // self._plan.micro_samples)
        if KINDS[planned.name].multiple_of_ranks:
            micro_batches = planned.micro_batches
        return self._schedules.of(micro_batches)

    def _masks(
        self, batch: tuple[torch.Tensor, ...], total: int, before: int, offsets: list[int], sizes: list[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Dropout's masks, drawn for the whole batch in the order of the model, as a single process does."""
        masks: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
        graph = self._traced.graph
        for node in self._dropouts:
            value = graph.value[node.name]
            shape, dims, samples = self._shapes.of_mask(node, value, batch)
            per_sample = shape[dims[0]] // samples if len(dims) == 1 else 0
            if not per_sample:
                raise InvalidCall(
                    f"Dropout {node.name} takes values in which samples cannot be distinguished.",
                    "Let one dimension of them count the samples.",
                )
            shape[dims[0]] = total * per_sample
            keep = 1 - float(node.args[1])  # pyright: ignore
            on_gpu = functools.partial(_draw_on_gpu, self._device)
            draw = node.meta.get("draw", on_gpu if self._device.type == "cuda" else _draw)
            drawn = draw(shape, keep, getattr(torch, value.dtype)).to(self._device)
            if node.name not in self._own_masks:
                continue
            drawn.div_(keep if keep else 1.0)
            for mask, offset, size in zip(masks, offsets, sizes, strict=True):
                mask[node.name] = drawn.narrow(dims[0], (before + offset) * per_sample, size * per_sample)
        return masks

    # Passes

    def _do(self, action: Action, batch: _Batch) -> None:
        with doing(self._stage, NAMES[action.kind], action.micro):
            if action.kind == FORWARD:
                self._forward(action.piece, action.micro, batch)
            elif action.kind in (BACKWARD, INPUTS):
                self._backward(action.piece, action.micro)
                if action.kind == BACKWARD:
                    self._finish(action.piece, action.micro)
            else:
                held = self._held[action.piece, action.micro]
                with torch.no_grad():
                    for call in held.later:
                        call()
                self._finish(action.piece, action.micro)

    def _forward(self, piece: int, micro: int, batch: _Batch) -> None:
        held, values = self._received(piece, micro, batch)
        self._held[piece, micro] = held
        compute = partial(self._compute, piece, micro, batch, values)
        is_last = piece == self._plan.pieces.count - 1
        if not self._recomputes or not torch.is_grad_enabled():
            compute(held, self._tensors, self._statistics)
        elif is_last and batch.loss is not None:
            # Nothing waits for it but its backward pass.
            held.compute = partial(compute, held, self._tensors, self._statistics)
            return
        else:
            names = {name for kind, name in batch.pieces[piece].arguments if kind == "parameter"}
            before = Before(self._device, self._tensors, self._changed & names, self._draws)
            with first_time(self._device):
                compute(held, self._tensors, self._statistics)
            held.compute = partial(self._compute_again, compute, held, before)
        for channel, names in self._plan.pieces.channels.items():
            if channel[0] == piece:
                self._post.send(channel, False, micro, [held.results[name] for name in names])
        if held.compute:
            held.results = {}

    def _compute_again(self, compute: Callable[..., None], held: _Held, before: Before) -> None:
        with before.restored():
            compute(held, {**self._tensors, **before.tensors}, Statistics())

    def _received(self, piece: int, micro: int, batch: _Batch) -> tuple[_Held, dict[str, Any]]:
        """What a forward pass is given by other pieces, and what will hold it."""
        held = _Held({}, {}, [])
        values: dict[str, Any] = {}
        for channel, names in self._plan.pieces.channels.items():
            if channel[1] != piece:
                continue
            gradients = self._plan.pieces.gradients(channel)
            parts, give_up = self._post.receive(channel, False, micro, names)
            if batch.loss is None:
                # Its backward pass comes late, or never: the slot is needed before.
                parts = [part.clone() if isinstance(part, torch.Tensor) else part for part in parts]
                give_up()
            else:
                held.give_up.append(give_up)
            for name, part in zip(names, parts, strict=True):
                if name in gradients and isinstance(part, torch.Tensor):
                    part = held.leaves[name] = part.detach().requires_grad_()
                values[name] = part
        return held, values

    def _compute(
        self,
        piece: int,
        micro: int,
        batch: _Batch,
        values: dict[str, Any],
        held: _Held,
        tensors: Mapping[str, torch.Tensor],
        statistics: Statistics,
    ) -> None:
        """Run a piece; `held` gets its results, of the last piece the model's outputs or the loss."""
        own = batch.pieces[piece]
        inputs, target = batch.parts[micro]
        named_inputs = dict(zip(self._traced.graph.inputs, inputs, strict=True))
        helpers = {"statistics": statistics, "later": self._later}
        sources: dict[str, Mapping[str, Any]] = {
            "parameter": tensors,
            "input": named_inputs,
            "value": values,
            "mask": batch.masks[micro],
            "helper": helpers,
        }
        arguments = [sources[kind][name] for kind, name in own.arguments]
        first = arguments if self._opaque else None
        looking = self._arrivals.looking(first) if self._arrivals else contextlib.nullcontext()
        with looking, rows.running(batch.rows[micro]):
            results = own.function(*arguments)
        held.results = dict(zip(own.results, results, strict=True))
        if piece == self._plan.pieces.count - 1:
            outputs = [{**values, **held.results}[name] for name in self._traced.graph.results]
            if batch.loss is None:
                held.outputs = outputs
            else:
                mean = _mean_loss(batch.loss, outputs, target)
                held.loss = mean * batch.shares[micro]
                self._losses.append(held.loss.detach())

    def _backward(self, piece: int, micro: int) -> None:
        held = self._held[piece, micro]
        if held.compute:
            held.compute()
            held.compute = None
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if held.loss is not None and held.loss.requires_grad:
            roots.append(held.loss)
            gradients.append(None)
        for output, gradient in zip(held.outputs, held.gradients, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient)
        for channel in self._plan.pieces.channels:
            names = self._plan.pieces.gradients(channel) if channel[0] == piece else ()
            if not names:
                continue
            parts, give_up = self._post.receive(channel, True, micro, names)
            for name, part in zip(names, parts, strict=True):
                if part is not None and held.results[name].requires_grad:
                    roots.append(held.results[name])
                    # Autograd may keep it, or a view of it, as somebody's gradient: longer than the message.
                    gradients.append(part.clone())
            give_up()
        if roots:
            self._later.calls = held.later
            # As in an ordinary loop, where the backward pass stands outside of autocast.
            with torch.autocast(self._device.type, enabled=False):
                torch.autograd.backward(roots, gradients)
        for channel in self._plan.pieces.channels:
            names = self._plan.pieces.gradients(channel) if channel[1] == piece else ()
            if names:
                leaves = [held.leaves.get(name) for name in names]
                self._post.send(
                    channel, True, micro, [None if leaf is None else leaf.grad for leaf in leaves]
                )
        held.loss, held.results, held.leaves, held.outputs = None, {}, {}, []
        held.gradients = []

    def _finish(self, piece: int, micro: int) -> None:
        for give_up in self._held.pop((piece, micro)).give_up:
            give_up()

    def _unpacked(self, memory: Any, names: Sequence[str]) -> list[Any]:
        return self._to_device(messages.unpack(memory, len(names)))


def _mean_loss(loss: Loss, outputs: list[Any], targets: Any) -> torch.Tensor:
    """The loss of a micro-batch. Raises InvalidCall where it cannot be computed, or is no mean."""
    with losses.explained(outputs, tree_leaves(targets)):
        mean: Any = loss(outputs[0] if len(outputs) == 1 else tuple(outputs), targets)
    if isinstance(mean, torch.Tensor) and mean.numel() != 1:
        raise losses.not_a_single_number(mean.shape)
    return mean


def _draw(shape: list[int], keep: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).bernoulli_(keep)


def _draw_on_gpu(device: torch.device, shape: list[int], keep: float, dtype: torch.dtype) -> torch.Tensor:
    """As the GPU's own kernel draws it."""
    ones = torch.ones(shape, dtype=dtype, device=device)
    return (torch.nn.functional.dropout(ones, 1 - keep) != 0).to(dtype)


def _part(samples: int, begin: int, end: int, leaf: Any) -> Any:
    """A micro-batch's part of a tensor that counts samples; anything else as it is."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == samples:
        return leaf[begin:end]
    return leaf


def _check_targets(samples: int, targets: Any) -> None:
    """Raise InvalidCall where no tensor of the targets counts the samples; some may be weights of classes."""
    found = [len(leaf) for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if found and samples not in found:
        raise InvalidCall(
            f"The targets have {found[0]} samples, and the inputs {samples}.",
            "Give targets whose dimension 0 counts the samples of the inputs.",
        )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """An output of the whole batch, of those of its micro-batches."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _rows(gradient: torch.Tensor | None, begin: int, size: int, samples: int) -> torch.Tensor | None:
    """A micro-batch's part of the gradient of an output, which may have several rows per sample."""
    if gradient is None or size == samples:
        return gradient
    each = len(gradient) // samples
    return gradient[begin * each : (begin + size) * each]
