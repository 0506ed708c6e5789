"""Plans of pipelines: where a graph is cut, and what that is expected to take."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from carme_runtime.graph import Graph
from carme_runtime.graph.show import columns, drawing, size_text
from carme_runtime.pipeline.pieces import Pieces
from carme_runtime.pipeline.schedules import BACKWARD, FORWARD, Action, Schedule
from carme_runtime.pipeline.simulation import Channel, Run, held, simulate, slots_needed
from carme_runtime.strategies import DATA, HYBRID, PIPELINE


@dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline does and holds.

    Args:
        rank: Within the pipeline.
        operators: How many it runs.
        layers: The first and the last layer.
        forward_ms: All its micro-batches in one step.
        backward_ms: The same.
        parameter_bytes: Of its parameters and buffers.
        memory_bytes: With gradients, optimizer state, activations, messages and workspace.
        sent_bytes: In one step, forward and back.
    """

    rank: int
    operators: int
    layers: tuple[str, str]
    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    memory_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Plan:
    """A pipeline as it will run.

    Args:
        graph: Of the model, with the links between devices.
        cuts: See `Pieces`.
        schedule: Who does what when.
        samples: Of each replica's share of a batch, at most.
        replicas: How many pipelines train together.
        state_factor: Bytes that the optimizer holds for each byte of a trained parameter.
        batch_norm: How layers that normalise over the batch treat micro-batches; empty: there are none.
        measured_ms: How long steps took, once there were some: their median.
        memory: Bytes of each device that no stage may exceed; 0: no limit was known.
    """

    graph: Graph
    cuts: tuple[int, ...]
    schedule: Schedule
    samples: int
    replicas: int = 1
    state_factor: float = 2.0
    batch_norm: str = ""
    measured_ms: float = 0.0
    memory: int = 0

    @property
    def strategy(self) -> str:
        """What the ranks do together, in the words of `carme_runtime.strategies`."""
        if self.schedule.ranks == 1:
            return DATA
        return HYBRID if self.replicas > 1 else PIPELINE

    @cached_property
    def pieces(self) -> Pieces:
        """The graph, cut."""
        return Pieces(self.graph, self.cuts)

    @property
    def micro_samples(self) -> int:
        """Of the largest micro-batch."""
        return -(-self.samples // self.schedule.micro_batches)

    @cached_property
    def slots(self) -> dict[Channel, int]:
        """Room for how many messages each channel between ranks has, in each direction."""
        return slots_needed(self.schedule, self.remote(self.pieces.channels))

    def remote(self, channels: Iterable[Channel]) -> list[Channel]:
        """Those channels that lead from one rank to another."""
        holders = self.schedule.holders
        return [(a, b) for a, b in channels if holders[a] != holders[b]]

    @cached_property
    def run(self) -> Run:
        """The step on paper."""
        times = [self._times(piece) for piece in range(self.pieces.count)]
        links, sizes = self.graph.links, self.pieces

        def duration(action: Action) -> float:
            forward, backward = times[action.piece]
            share = {FORWARD: forward, BACKWARD: backward}.get(action.kind, backward / 2)
            # Whoever puts a message copies it.
            return share + sum(
                links.milliseconds(sizes.bytes(c, self.micro_samples, back=action.kind != FORWARD))
                for c in self._puts(action)
            )

        return simulate(self.schedule, self.pieces.channels, duration, slots=self.slots)

    @property
    def step_ms(self) -> float:
        """How long a step is expected to take, without the optimizer."""
        return self.run.length

    @property
    def floor_ms(self) -> float:
        """What the slowest stage computes, without waiting for anything."""
        return max(stage.forward_ms + stage.backward_ms for stage in self.stages)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What each rank does and holds."""
        return tuple(self._stage(rank) for rank in range(self.schedule.ranks))

    def after(self, measured_ms: float) -> "Plan":
        """The same plan with what steps took."""
        return replace(self, measured_ms=measured_ms)

    def _puts(self, action: Action) -> list[Channel]:
        forward = action.kind == FORWARD
        remote = self.remote(self.pieces.channels)
        return [(a, b) for a, b in remote if (a if forward else b) == action.piece]

    def _times(self, piece: int) -> tuple[float, float]:
        own = [self.graph.operators[place] for place in self.pieces.span(piece)]
        samples = self.micro_samples
        return sum(o.forward_ms(samples) for o in own), sum(o.backward_ms(samples) for o in own)

    def _stage(self, rank: int) -> Stage:
        pieces, m = self.pieces, self.schedule.micro_batches
        own = [piece for piece, holder in enumerate(self.schedule.holders) if holder == rank]
        places = [place for piece in own for place in pieces.span(piece)]
        names = frozenset(itertools.chain.from_iterable(pieces.parameters(piece) for piece in own))
        times = [self._times(piece) for piece in own]
        sent = sum(
            m * pieces.bytes((a, b), self.micro_samples, back=self.schedule.holders[b] == rank)
            for a, b in self.remote(pieces.channels)
            if rank in (self.schedule.holders[a], self.schedule.holders[b])
        )
        layers = [self.graph.operators[place].module for place in places]
        named = [layer for layer in layers if layer] or [self.graph.operators[places[0]].name]
        return Stage(
            rank=rank,
            operators=len(places),
            layers=(named[0], named[-1]),
            forward_ms=m * sum(forward for forward, _ in times),
            backward_ms=m * sum(backward for _, backward in times),
            parameter_bytes=self.graph.parameter_bytes(names),
            memory_bytes=self._memory(rank, own, names),
            sent_bytes=int(sent),
        )

    def _memory(self, rank: int, own: list[int], names: frozenset[str]) -> int:
        graph, counts = self.graph, held(self.schedule)
        share = self.micro_samples / graph.samples
        total: float = graph.parameter_bytes(names)
        total += (1 + self.state_factor) * graph.parameter_bytes(names, trainable=True)
        workspace = 0.0
        for piece in own:
            operators = [graph.operators[place] for place in self.pieces.span(piece)]
            total += counts[piece] * share * sum(o.held_bytes for o in operators)
            workspace = max(workspace, max(share * o.workspace_bytes for o in operators))
        return int(total + workspace + self._slot_bytes(rank))

    def _slot_bytes(self, rank: int) -> float:
        """Received messages, and those that wait to be sent."""
        total = 0.0
        for channel, count in self.slots.items():
            if rank in (self.schedule.holders[channel[0]], self.schedule.holders[channel[1]]):
                total += count * (
                    self.pieces.bytes(channel, self.micro_samples)
                    + self.pieces.bytes(channel, self.micro_samples, back=True)
                )
        return total

    def __str__(self) -> str:
        """A table for people."""
        kind, m = self.schedule, self.schedule.micro_batches
        rows: list[tuple[str, ...]] = [
            ("stage", "layers", "operators", "forward ms", "backward ms", "parameters", "memory", "sent")
        ]
        for s in self.stages:
            first, last = s.layers
            rows.append(
                (
                    str(s.rank),
                    first if first == last else f"{first} .. {last}",
                    str(s.operators),
                    f"{s.forward_ms:.2f}",
                    f"{s.backward_ms:.2f}",
                    size_text(s.parameter_bytes),
                    size_text(s.memory_bytes),
                    size_text(s.sent_bytes),
                )
            )
        lines = [
            f"{kind.ranks} stages x {self.replicas} replicas, {m} micro-batches of {self.micro_samples} "
            f"samples, schedule {kind.name}. Strategy: {self.strategy}.",
            columns(rows, left=2),
            f"Predicted step: {self.step_ms:.2f} ms without the optimizer. "
            f"Idle: {100 * self.run.bubble:.0f} % (even stages: {100 * kind.bubble:.0f} %).",
        ]
        if self.memory:
            lines.append(f"Memory of each rank for its stage: at most {size_text(self.memory)}.")
        if self.measured_ms:
            off = 100 * (self.step_ms / self.measured_ms - 1)
            lines.append(f"Measured step: {self.measured_ms:.2f} ms. The prediction is off by {off:+.0f} %.")
        if self.batch_norm:
            lines.append(f"BatchNorm: {_BATCH_NORM[self.batch_norm]}")
        return "\n".join(lines) + "\n"

    def drawing(self) -> str:
        """The graph with its cuts as a picture (SVG)."""
        return drawing(self.graph, self.cuts)


_BATCH_NORM = {
    "micro": "micro. Each micro-batch has its own statistics, as with torch.distributed.pipelining.",
    "deferred": "deferred. Micro-batches have their own statistics; running ones are updated once a step.",
    "exact": "exact. The statistics are those of a replica's whole batch, which is one micro-batch.",
}
