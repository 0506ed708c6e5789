"""Runs the passes of a Keras model's stage on the TensorFlow backend, in the order of the schedule."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from carme_runtime import profile
from carme_runtime.activity import doing
from carme_runtime.collectives.errors import InvalidCall
from carme_runtime.keras import messages
from carme_runtime.keras.calls import Call, Calls
from carme_runtime.keras.library import keras
from carme_runtime.keras.world import World
from carme_runtime.pipeline import KINDS, Plan, Schedules
from carme_runtime.pipeline.messages import Post, boxes_of
from carme_runtime.pipeline.schedules import FORWARD, Action
from carme_runtime.pipeline.simulation import Channel

Loss = Callable[[list[Any], Any], Any]


@dataclasses.dataclass
class _Held:
    """What a micro-batch leaves in a piece until its backward pass: what the tape knows."""

    tape: Any
    leaves: dict[str, Any]
    results: dict[str, Any]
    loss: Any = None
    outputs: list[Any] = dataclasses.field(default_factory=list)  # of the model, where no loss is made here
    gradients: list[Any] = dataclasses.field(default_factory=list)  # that came to them


@dataclasses.dataclass
class Batch:
    """The batch of a step; all but `loss` by micro-batch.

    Args:
        inputs: What the model is called with.
        targets: What the loss is called with besides the outputs.
        shares: Its part of the samples of all replicas.
        masks: Dropout's, by name of the call.
        rows: Those that it has of this replica's batch.
        loss: The mean over a micro-batch's samples. None: outputs are returned.
        training: Or evaluation.
    """

    inputs: list[list[Any]]
    targets: list[Any]
    shares: list[float]
    masks: list[dict[str, Any]]
    rows: list[range]
    loss: Loss | None
    training: bool


class Passes:
    """This rank's passes.

    Args:
        calls: The model.
        plan: The one on which all ranks agreed.
        line: The ranks of this pipeline, by stage, for no other use.
        ranks: Their numbers in the run.
    """

    def __init__(self, calls: Calls, plan: Plan, line: World, ranks: list[int]) -> None:
        self._tf: Any = import_module("tensorflow")
        self._calls, self._plan, self._line = calls, plan, line
        self.stage = line.rank
        self._pieces = [p for p, holder in enumerate(plan.schedule.holders) if holder == self.stage]
        by_name = {call.name: call for call in calls.calls}
        operators = plan.graph.operators
        self._own = {p: [by_name[operators[at].name] for at in plan.pieces.span(p)] for p in self._pieces}
        self._functions: dict[tuple[int, bool], Any] = {}
        self._post = Post(plan, line.mailboxes(boxes_of(plan, ranks)), self._packed, self._unpacked)
        self._schedules = Schedules(plan.schedule, plan.pieces.channels, plan.slots)
        self._held: dict[tuple[int, int], _Held] = {}
        self._outputs: list[list[Any]] = []
        self._gradients: dict[str, Any] = {}

    @property
    def variables(self) -> list[str]:
        """Names of the variables that this rank's pieces use."""
        return list(dict.fromkeys(n for own in self._own.values() for call in own for n in call.variables))

    @property
    def calls(self) -> set[str]:
        """Names of the calls that this rank makes."""
        return {call.name for own in self._own.values() for call in own}

    def close(self) -> None:
        """Give up the memory of messages. All ranks of the pipeline call it together."""
        self._post.close()

    def train(self, batch: Batch) -> dict[str, Any]:
        """All passes of a step; gradients of this rank's variables, by name."""
        self._gradients, self._held = {}, {}
        schedule = self._schedules.of(len(batch.shares))
        with profile.pipeline_step(self.stage, schedule):
            for action in schedule.actions[self.stage]:
                self._do(action, batch)
        self._post.flush()
        return self._gradients

    def call(self, batch: Batch) -> tuple[list[Any], dict[tuple[int, int], Any]]:
        """Forward passes, one micro-batch after the other: outputs, on the last piece's rank; else nothing.

        Returns them with what `call_backward` takes, which is empty in evaluation.
        """
        self._outputs, self._held = [], {}
        # In this order a rank waits only for what comes before in it: no number of slots is too small.
        for micro in range(len(batch.inputs)):
            for piece in self._pieces:
                with doing(self.stage, "forward pass", micro):
                    self._forward(piece, micro, batch)
        self._post.flush()
        held, self._held = self._held, {}
        return [self._tf.concat(parts, 0) for parts in zip(*self._outputs, strict=True)], held

    def call_backward(
        self, held: dict[tuple[int, int], Any], sizes: Sequence[int], gradients: Sequence[Any]
    ) -> dict[str, Any]:
        """The backward passes of what `call` did; gradients of this rank's variables, by name.

        Args:
            held: What `call` returned.
            sizes: Samples of the micro-batches.
            gradients: Of the outputs; None where there is none.
        """
        self._gradients, self._held, begin = {}, held, 0
        for micro, size in enumerate(sizes):
            for piece in reversed(self._pieces):
                if piece == self._plan.pieces.count - 1:
                    parts = [None if each is None else each[begin : begin + size] for each in gradients]
                    self._held[piece, micro].gradients = parts
                with doing(self.stage, "backward pass", micro):
                    self._backward(piece, micro)
            begin += size
        self._post.flush()
        return self._gradients

    def sizes(self, samples: int) -> list[int]:
        """Of the micro-batches of a batch."""
        planned = self._plan.schedule
        count = -(-samples // self._plan.micro_samples)
        if KINDS[planned.name].multiple_of_ranks:
            count = -(-count // planned.ranks) * planned.ranks
            if samples < count:
                raise InvalidCall(
                    f"The schedule {planned.name} needs at least {count} samples; the batch has {samples}.",
                    "Leave such a batch out, or use schedule='1f1b'.",
                )
        few, more = divmod(samples, count)
        return [few + (micro < more) for micro in range(count)]

    # -- passes

    def _do(self, action: Action, batch: Batch) -> None:
        forward = action.kind == FORWARD
        with doing(self.stage, "forward pass" if forward else "backward pass", action.micro):
            if forward:
                self._forward(action.piece, action.micro, batch)
            else:
                self._backward(action.piece, action.micro)

    def _forward(self, piece: int, micro: int, batch: Batch) -> None:
        tf, pieces, trains = self._tf, self._plan.pieces, batch.training
        values = dict(zip(self._calls.inputs, batch.inputs[micro], strict=True))
        leaves: dict[str, Any] = {}
        for channel, names in pieces.channels.items():
            if channel[1] == piece:
                values |= zip(names, self._receive(channel, False, micro, names), strict=True)
                leaves |= {name: values[name] for name in pieces.gradients(channel)}
        results: dict[str, Any] = {}
        tape = tf.GradientTape() if trains else None
        loss, outputs = None, list[Any]()
        with tape or contextlib.nullcontext():
            if tape:
                tape.watch(list(leaves.values()))
            names, computed = self._run(piece, values, batch.masks[micro], batch.rows[micro], trains)
            results = dict(zip(names, computed, strict=True))
            if piece == pieces.count - 1:
                outputs = [{**values, **results}[name] for name in self._plan.graph.results]
                if batch.loss is None:
                    self._outputs.append(outputs)
                else:
                    loss = batch.loss(outputs, batch.targets[micro])
                    loss = loss * tf.cast(batch.shares[micro], loss.dtype)
        for channel, sent in pieces.channels.items():
            if channel[0] == piece:
                self._post.send(channel, False, micro, [results[name] for name in sent])
        if tape:
            self._held[piece, micro] = _Held(tape, leaves, results, loss, outputs)

    def _run(
        self, piece: int, values: dict[str, Any], masks: dict[str, Any], rows: range, training: bool
    ) -> Any:
        """Run a piece's calls; the names of the values that others need, and these."""
        if (piece, training) not in self._functions:
            self._functions[piece, training] = self._function(piece, training)
        taken, results, function = self._functions[piece, training]
        keeps = any(call.extras.is_stateful for call in self._own[piece])
        numbers = self._calls.states.rows(rows.start, len(rows)) if keeps else None
        return results, function([values[name] for name in taken], masks, numbers)

    def _function(self, piece: int, training: bool) -> tuple[list[str], list[str], Any]:
        calls, pieces, graph = self._own[piece], self._plan.pieces, self._plan.graph
        computed = {name for call in calls for name in call.outputs}
        used = [name for call in calls for name in call.sources]
        taken = [name for name in dict.fromkeys(used) if name not in computed]
        sent = [n for channel, names in pieces.channels.items() if channel[0] == piece for n in names]
        sent += [n for n in graph.results if n in computed and piece == pieces.count - 1]
        results = list(dict.fromkeys(sent))

        def run(values: list[Any], masks: dict[str, Any], rows: Any) -> list[Any]:
            known = dict(zip(taken, values, strict=True))
            for call in calls:
                known |= zip(call.outputs, _called(call, known, masks, training, rows), strict=True)
            return [known[name] for name in results]

        plain = self._tf.autograph.experimental.do_not_convert(run)
        return taken, results, self._tf.function(plain, reduce_retracing=True)

    def _backward(self, piece: int, micro: int) -> None:
        held, pieces = self._held.pop((piece, micro)), self._plan.pieces
        targets, output_gradients = [], []
        if held.loss is not None:
            targets.append(held.loss)
            output_gradients.append(self._tf.ones_like(held.loss))
        for output, gradient in zip(held.outputs, held.gradients, strict=False):
            if gradient is not None and output.dtype.is_floating:
                targets.append(output)
                output_gradients.append(gradient)
        for channel in pieces.channels:
            names = pieces.gradients(channel) if channel[0] == piece else ()
            if names:
                for name, gradient in zip(names, self._receive(channel, True, micro, names), strict=True):
                    if gradient is not None:
                        targets.append(held.results[name])
                        output_gradients.append(gradient)
        own = dict.fromkeys(n for call in self._own[piece] for n in call.variables)
        trained = [name for name in own if self._calls.variables[name].trainable]
        leaves = list(held.leaves)
        sources = [held.leaves[name] for name in leaves] + [self._calls.variables[n] for n in trained]
        found = [None] * len(sources)
        if targets and sources:
            found = held.tape.gradient(targets, sources, output_gradients)
        back = dict(zip(leaves, found[: len(leaves)], strict=True))
        for channel in pieces.channels:
            names = pieces.gradients(channel) if channel[1] == piece else ()
            if names:
                self._post.send(channel, True, micro, [back[name] for name in names])
        for name, gradient in zip(trained, found[len(leaves) :], strict=True):
            if gradient is not None:
                self._gradients[name] = sum_of_gradients(self._gradients.get(name), gradient)

    # -- messages

    def _receive(self, channel: Channel, back: bool, micro: int, names: Sequence[str]) -> list[Any]:
        parts, give_up = self._post.receive(channel, back, micro, names)
        give_up()
        return parts

    def _packed(self, memory: Any, parts: list[Any], title: str) -> int:
        arrays = [None if part is None else self._tf.convert_to_tensor(part).numpy() for part in parts]
        return messages.pack(memory, arrays, title)

    def _unpacked(self, memory: Any, names: Sequence[str]) -> list[Any]:
        types = [np.dtype(self._plan.graph.value[name].dtype) for name in names]
        parts = messages.unpack(memory, types)
        return [None if part is None else self._tf.convert_to_tensor(part) for part in parts]


def _called(
    call: Call, values: dict[str, Any], masks: dict[str, Any], training: bool, rows: Any
) -> Iterator[Any]:
    """What a call makes; Dropout takes a mask that was drawn for the whole batch."""
    if call.name in masks:
        return iter([values[call.sources[0]] * masks[call.name]])
    return iter(call.run(values, training, rows))


def sum_of_gradients(gradient: Any, addend: Any) -> Any:
    """The sum of two gradients; the first may be None.

    Those of an embedding stay rows with their numbers, as many optimizers treat them otherwise than tensors.
    """
    tf = import_module("tensorflow")
    if gradient is None:
        return addend
    if isinstance(gradient, tf.IndexedSlices) and isinstance(addend, tf.IndexedSlices):
        slices = (gradient, addend)
        values, indices = (tf.concat([getattr(g, name) for g in slices], 0) for name in ("values", "indices"))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) + tf.convert_to_tensor(addend)


def mask_of_batch(call: Call, total: int, begin: int, sizes: Sequence[int]) -> Iterator[Any]:
    """Draws a Dropout layer's mask for a batch, as one process does; gives those of micro-batches.

    Args:
        call: Of the layer, whose seed moves on.
        total: Samples of the batch.
        begin: The first one of this rank's replica.
        sizes: Of its micro-batches.
    """
    tf = import_module("tensorflow")
    layer, symbol = call.step.operation, call.step.node.outputs[0]
    ones = tf.ones([total, *symbol.shape[1:]], symbol.dtype)
    mask = keras.random.dropout(ones, layer.rate, seed=layer.seed_generator)
    for size in sizes:
        yield mask[begin : begin + size]
        begin += size
