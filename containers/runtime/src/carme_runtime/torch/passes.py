"""Runs the passes of a step on one rank, in the order of the schedule."""

# As in backend.py.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map

from carme_runtime.collectives import Group
from carme_runtime.collectives.errors import InvalidCall, Mismatch
from carme_runtime.collectives.mailboxes import Box, Mailboxes
from carme_runtime.pipeline import KINDS, Plan, Schedule, make, simulate
from carme_runtime.pipeline.schedules import BACKWARD, FORWARD, INPUTS, Action
from carme_runtime.pipeline.simulation import Channel
from carme_runtime.torch import messages
from carme_runtime.torch.pieces import (
    Later,
    Piece,
    Statistics,
    is_dropout,
    piece_of,
    update_running_statistics,
)
from carme_runtime.torch.tracing import Traced

Loss = Callable[[Any, Any], torch.Tensor]


@dataclasses.dataclass
class _Held:
    """What a micro-batch leaves in a piece until its backward pass."""

    leaves: dict[str, torch.Tensor]
    results: dict[str, Any]
    give_up: list[Callable[[], None]]
    loss: torch.Tensor | None = None
    later: list[Callable[[], None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Batch:
    """The batch of a step.

    Args:
        parts: By micro-batch: what the model is called with, and the targets.
        shares: By micro-batch: its part of the samples of all replicas.
        masks: By micro-batch: Dropout's.
        loss: The user's.
    """

    parts: list[tuple[tuple[torch.Tensor, ...], Any]]
    shares: list[float]
    masks: list[dict[str, torch.Tensor]]
    loss: Loss


class Passes:
    """This rank's passes.

    Args:
        traced: The model.
        made: The plan.
        run: The ranks; see `pipelines`.
        ranks: Those of this pipeline, by stage.
        group: The same, where there are several.
    """

    def __init__(self, traced: Traced, made: Plan, run: Any, ranks: list[int], group: Group | None) -> None:
        self._traced, self._plan, self._run, self._ranks = traced, made, run, ranks
        self._stage = ranks.index(run.rank)
        self._statistics, self._later = Statistics(), Later()
        split = made.schedule.split
        self._pieces: dict[int, Piece] = {
            piece: piece_of(traced, made.pieces, piece, made.batch_norm == "deferred", split)
            for piece, holder in enumerate(made.schedule.holders)
            if holder == self._stage
        }
        operators = traced.graph.operators
        self._own_operators = {operators[at].name for p in self._pieces for at in made.pieces.span(p)}
        self._dropouts = [node for node in traced.nodes if is_dropout(node)]
        self._own_masks = {n for p in self._pieces.values() for kind, n in p.arguments if kind == "mask"}
        self._remote = set(made.remote(made.pieces.channels))
        self._boxes = Mailboxes(run.context, group, self._described(), run.timeout) if group else None
        self._schedules: dict[int, Schedule] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._local: dict[tuple[Channel, bool, int], list[Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._value = 0.0
        self._failed = False

    def close(self) -> None:
        """Give up the memory of messages."""
        if self._boxes:
            self._boxes.close()
            self._boxes = None

    def run(self, batch: tuple[torch.Tensor, ...], targets: Any, loss: Loss) -> float:
        """Do all passes of a step; this rank's part of the mean loss. Raises InvalidCall, PeerLost."""
        if self._failed:
            raise InvalidCall("An earlier step of this pipeline failed.", "Make it again to go on.")
        self._check(batch)
        counts = self._counts(len(batch[0]))
        self._failed = True  # until all is well
        prepared, schedule = self._prepared(batch, targets, loss, counts)
        self._tensors, self._value = self._traced.named_tensors(), 0.0
        with torch.enable_grad():
            for action in schedule.actions[self._stage]:
                self._do(action, prepared)
        if self._boxes:
            self._boxes.flush()
        if self._plan.batch_norm == "deferred":
            with torch.no_grad():
                update_running_statistics(self._traced, self._statistics, self._own_operators)
            self._statistics.sums.clear()
        self._tensors, self._failed = {}, False
        return self._value

    # Before the step

    def _described(self) -> dict[Any, Box]:
        """The mailboxes between ranks of this pipeline."""
        boxes = {}
        pieces, samples = self._plan.pieces, self._plan.micro_samples
        for channel, slots in self._plan.slots.items():
            source, target = (self._ranks[self._plan.schedule.holders[piece]] for piece in channel)
            sizes = {n: self._traced.graph.value_bytes(n, samples) for n in pieces.channels[channel]}
            boxes[channel, False] = Box(source, target, slots, messages.room(list(sizes.values())))
            if gradients := pieces.gradients(channel):
                room = messages.room([sizes[name] for name in gradients])
                boxes[channel, True] = Box(target, source, slots, room)
        return boxes

    def _check(self, batch: tuple[torch.Tensor, ...]) -> None:
        graph = self._traced.graph
        if len(batch) != len(graph.inputs):
            raise InvalidCall(
                f"The batch has {len(batch)} tensors, and the example had {len(graph.inputs)}.",
                "Give step() the inputs as in the example, and targets separately.",
            )
        for name, tensor in zip(graph.inputs, batch, strict=True):
            value = graph.value[name]
            if tuple(tensor.shape[1:]) != value.shape[1:] or str(tensor.dtype)[6:] != value.dtype:
                raise InvalidCall(
                    f"The input {name} has samples of shape {list(tensor.shape[1:])} and type "
                    f"{str(tensor.dtype)[6:]}; in the example they had {list(value.shape[1:])} and "
                    f"{value.dtype}.",
                    "Give pipeline() an example like the data.",
                )
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

    def _counts(self, samples: int) -> list[int]:
        """Samples of each replica. Raises Mismatch where ranks of one differ."""
        if not self._run.everyone:
            return [samples]
        everyone = numpy.zeros(self._run.size, numpy.int64)
        mine = numpy.array([samples], numpy.int64)
        self._run.everyone.allgather(everyone, mine, timeout=self._run.timeout)
        stages = self._plan.schedule.ranks
        rows = everyone.reshape(-1, stages)
        for first, row in enumerate(rows):
            if (row != row[0]).any():
                raise Mismatch(
                    f"Ranks {first * stages} to {first * stages + stages - 1} are one pipeline, and got "
                    f"batches of {row.tolist()} samples.",
                    "Give all ranks of a pipeline the same batch.",
                )
        return rows[:, 0].tolist()

    def _prepared(
        self, batch: tuple[torch.Tensor, ...], targets: Any, loss: Loss, counts: list[int]
    ) -> tuple[_Batch, Schedule]:
        samples = len(batch[0])
        schedule = self._schedule(samples)
        few, more = divmod(samples, schedule.micro_batches)
        sizes = [few + (micro < more) for micro in range(schedule.micro_batches)]
        replica = self._ranks[0] // self._plan.schedule.ranks
        at, parts = 0, []
        offsets = []
        for size in sizes:
            cut = partial(_part, samples, at, at + size)
            parts.append((tuple(map(cut, batch)), tree_map(cut, targets)))
            offsets.append(at)
            at += size
        masks = self._masks(sum(counts), sum(counts[:replica]), offsets, sizes)
        return _Batch(parts, [size / sum(counts) for size in sizes], masks, loss), schedule

    def _schedule(self, samples: int) -> Schedule:
        """The plan's, or for the last, smaller batch one with fewer micro-batches."""
        planned = self._plan.schedule
        micro_batches = -(-samples // self._plan.micro_samples)
        if KINDS[planned.name].multiple_of_ranks:
            micro_batches = planned.micro_batches
        if micro_batches not in self._schedules:
            made = make(planned.name, planned.ranks, micro_batches)
            simulate(made, self._plan.pieces.channels, slots=self._plan.slots)  # that it ends
            self._schedules[micro_batches] = made
        return self._schedules[micro_batches]

    def _masks(
        self, total: int, before: int, offsets: list[int], sizes: list[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Dropout's masks, drawn for the whole batch in the order of the model, as a single process does."""
        masks: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
        graph = self._traced.graph
        for node in self._dropouts:
            value, symbolic = graph.value[node.name], node.meta["val"].shape
            dims = [d for d, size in enumerate(symbolic) if not isinstance(size, int)]
            per_sample = value.shape[dims[0]] // graph.samples if len(dims) == 1 else 0
            if not per_sample:
                raise InvalidCall(
                    f"Dropout {node.name} takes values in which samples cannot be told apart.",
                    "Let one dimension of them count the samples.",
                )
            shape = list(value.shape)
            shape[dims[0]] = total * per_sample
            keep = 1 - float(node.args[1])  # pyright: ignore
            drawn = torch.empty(shape, dtype=getattr(torch, value.dtype)).bernoulli_(keep)
            if node.name not in self._own_masks:
                continue
            drawn.div_(keep if keep else 1.0)
            for mask, offset, size in zip(masks, offsets, sizes, strict=True):
                mask[node.name] = drawn.narrow(dims[0], (before + offset) * per_sample, size * per_sample)
        return masks

    # Passes

    def _do(self, action: Action, batch: _Batch) -> None:
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
        held = _Held({}, {}, [])
        values: dict[str, Any] = {}
        for channel, names in self._plan.pieces.channels.items():
            if channel[1] != piece:
                continue
            gradients = self._plan.pieces.gradients(channel)
            parts, give_up = self._receive(channel, False, micro, len(names))
            held.give_up.append(give_up)
            for name, part in zip(names, parts, strict=True):
                if name in gradients and isinstance(part, torch.Tensor):
                    part = held.leaves[name] = part.detach().requires_grad_()
                values[name] = part
        own = self._pieces[piece]
        inputs, target = batch.parts[micro]
        given = dict(zip(self._traced.graph.inputs, inputs, strict=True))
        helpers = {"statistics": self._statistics, "later": self._later}
        sources: dict[str, dict[str, Any]] = {
            "parameter": self._tensors,
            "input": given,
            "value": values,
            "mask": batch.masks[micro],
            "helper": helpers,
        }
        results = own.function(*(sources[kind][name] for kind, name in own.arguments))
        held.results = dict(zip(own.results, results, strict=True))
        for channel, names in self._plan.pieces.channels.items():
            if channel[0] == piece:
                self._send(channel, False, micro, [held.results[name] for name in names])
        if piece == self._plan.pieces.count - 1:
            outputs = [{**values, **held.results}[name] for name in self._traced.graph.results]
            mean = batch.loss(outputs[0] if len(outputs) == 1 else tuple(outputs), target)
            held.loss = mean * batch.shares[micro]
            self._value += float(held.loss.detach())
        self._held[piece, micro] = held

    def _backward(self, piece: int, micro: int) -> None:
        held = self._held[piece, micro]
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if held.loss is not None and held.loss.requires_grad:
            roots.append(held.loss)
            gradients.append(None)
        for channel in self._plan.pieces.channels:
            names = self._plan.pieces.gradients(channel) if channel[0] == piece else ()
            if not names:
                continue
            parts, give_up = self._receive(channel, True, micro, len(names))
            for name, part in zip(names, parts, strict=True):
                if part is not None and held.results[name].requires_grad:
                    roots.append(held.results[name])
                    # Autograd may keep it, or a view of it, as somebody's gradient: longer than the message.
                    gradients.append(part.clone())
            give_up()
        if roots:
            self._later.calls = held.later
            torch.autograd.backward(roots, gradients)
        for channel in self._plan.pieces.channels:
            names = self._plan.pieces.gradients(channel) if channel[1] == piece else ()
            if names:
                leaves = [held.leaves.get(name) for name in names]
                self._send(channel, True, micro, [None if leaf is None else leaf.grad for leaf in leaves])
        held.loss, held.results, held.leaves = None, {}, {}

    def _finish(self, piece: int, micro: int) -> None:
        for give_up in self._held.pop((piece, micro)).give_up:
            give_up()

    # Messages

    def _send(self, channel: Channel, back: bool, micro: int, parts: list[Any]) -> None:
        if channel not in self._remote:
            self._local[channel, back, micro] = parts
            return
        assert self._boxes
        name = (channel, back)
        what = f"the message from stage {channel[back]} to stage {channel[not back]}"
        self._boxes.put(name, messages.pack(self._boxes.slot(name), parts, what))

    def _receive(
        self, channel: Channel, back: bool, micro: int, count: int
    ) -> tuple[list[Any], Callable[[], None]]:
        if channel not in self._remote:
            return self._local.pop((channel, back, micro)), _nothing
        assert self._boxes
        name = (channel, back)
        memory, number = self._boxes.take(name)
        return messages.unpack(memory, count), partial(self._boxes.give_up, name, number)


def _nothing() -> None:
    pass


def _part(samples: int, begin: int, end: int, leaf: Any) -> Any:
    """A micro-batch's part of a tensor that counts samples; anything else as it is."""
    if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == samples:
        return leaf[begin:end]
    return leaf
