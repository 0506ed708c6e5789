"""Plans of pipelines: where a graph is cut, and what that is expected to take."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from carme_runtime.graph import Graph
from carme_runtime.graph.show import columns, drawing, size_text
from carme_runtime.pipeline.devices import Device
from carme_runtime.pipeline.pieces import Pieces
from carme_runtime.pipeline.schedules import BACKWARD, FORWARD, INPUTS, Action, Schedule
from carme_runtime.pipeline.simulation import Channel, Run, held, simulate, slots_needed
from carme_runtime.pipeline.stages import Disk, Stage, StageFit, sentence
from carme_runtime.strategies import DATA, HYBRID, PIPELINE


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
        may_recompute: Whether stages can compute forward passes again.
        disk: Where what does not fit can go; None: nowhere.
        fits: What each rank's stage does to fit into memory; empty: none does anything. See `fitted`.
        devices: What each stage's rank has; empty: all are alike, and have `memory`.
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
    may_recompute: bool = False
    disk: Disk | None = None
    fits: tuple[StageFit, ...] = ()
    devices: tuple[Device, ...] = ()

    def memory_of(self, rank: int) -> int:
        """Bytes that the stage of a rank may not exceed; 0: no limit was known."""
        return self.devices[rank].memory if self.devices else self.memory

    def slowness_of(self, rank: int) -> float:
        """How many times as long a rank takes as the one that measured the model."""
        return self.devices[rank].slowness if self.devices else 1.0

    def travel_ms(self, size: float, rank: int, peer: int, /) -> float:
        """How long a message of so many bytes takes between the stages of two ranks."""
        nodes = self.devices[rank].nodes if self.devices else ()
        return self.graph.links.milliseconds(size, bool(nodes) and nodes == self.devices[peer].nodes)

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
    def _counts(self) -> list[int]:
        """By piece: of how many micro-batches activations are held at once."""
        return held(self.schedule)

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
        times = [self._passes_of(piece) for piece in range(self.pieces.count)]
        sizes, holders = self.pieces, self.schedule.holders
        moves = [
            fit.spilling_ms / len(own) for fit, own in zip(self.fits, self.schedule.actions, strict=False)
        ]

        @cache  # of passes, as all micro-batches but the first take equally long
        def taken(kind: str, piece: int, is_first: bool) -> float:
            forward, backward = times[piece]
            share = {FORWARD: forward, BACKWARD: backward}.get(kind, backward / 2)
            # The first micro-batch's gradients of parameters are taken as they are, the others' are added.
            if kind not in (FORWARD, INPUTS) and not is_first:
                share += self._accumulating_ms(piece)
            share += moves[holders[piece]] if moves else 0.0
            # The sender of a message copies it.
            back = kind != FORWARD
            return share + sum(
                self.travel_ms(sizes.bytes((a, b), self.micro_samples, back=back), holders[a], holders[b])
                for a, b in self._puts(piece, back)
            )

        def duration(action: Action) -> float:
            return taken(action.kind, action.piece, action.micro == 0)

        return simulate(self.schedule, self.pieces.channels, duration, slots=self.slots)

    @property
    def step_ms(self) -> float:
        """How long a step is expected to take, without the optimizer."""
        return self.run.length

    @property
    def floor_ms(self) -> float:
        """What the slowest stage computes, without waiting for anything."""
        return max(stage.busy_ms for stage in self.stages)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What each rank does and holds."""
        return tuple(self._stage(rank) for rank in range(self.schedule.ranks))

    @property
    def exceeding(self) -> Stage | None:
        """Of the stages that exceed their ranks' memory, the one that needs most; None where none does."""
        too_large = [s for s in self.stages if 0 < self.memory_of(s.rank) < s.present_bytes]
        return max(too_large, key=lambda stage: stage.present_bytes, default=None)

    @property
    def over(self) -> int:
        """What that stage needs, in bytes; 0 where none exceeds its memory."""
        return self.exceeding.present_bytes if self.exceeding else 0

    @property
    def fits_by_itself(self) -> bool:
        """Whether no stage does anything to fit into memory."""
        return not self.over and not any(fit.recomputes or fit.spilled_bytes for fit in self.fits)

    def fitted(self) -> "Plan":
        """The same plan with what its stages do to fit into memory, so that the step is shortest.

        What costs a rank least may cost the others more: they wait for it at other times.
        """
        if not self.memory:
            return self
        choices = [self._choices(rank) for rank in range(self.schedule.ranks)]
        found = self.with_fits(tuple(fits[0] for fits in choices))
        for rank, fits in enumerate(choices):
            for fit in fits[1:]:
                candidate = self.with_fits((*found.fits[:rank], fit, *found.fits[rank + 1 :]))
                found = candidate if candidate.step_ms < found.step_ms else found
        return found

    def with_fits(self, fits: tuple[StageFit, ...]) -> "Plan":
        """The same plan in which the stages of its ranks do this to fit into memory.

        It takes over what is known already and does not depend on that.
        """
        changed = replace(self, fits=fits)
        known = vars(self)
        vars(changed).update({name: known[name] for name in _WITHOUT_FITS if name in known})
        return changed

    def _choices(self, rank: int) -> list[StageFit]:
        """What a stage may do, the cheapest first: nothing if it fits, what comes nearest if nothing does."""
        plain = StageFit(False, self._needed(rank, False))
        if not 0 < self.memory_of(rank) < plain.needed_bytes:
            return [plain]
        return self.fits_of(rank) or [self._nearest_fit(rank)]

    def _nearest_fit(self, rank: int) -> StageFit:
        """Where nothing fits: what needs least memory."""
        least = min(self._all_fits(rank), key=lambda fit: fit.needed_bytes)
        return StageFit(least.recomputes, least.needed_bytes, least.recomputed_ms)

    def recomputes(self, rank: int) -> bool:
        """Whether the stage of a rank computes its forward passes again, instead of holding activations."""
        return bool(self.fits) and self.fits[rank].recomputes

    def fits_of(self, rank: int) -> list[StageFit]:
        """How the stage of a rank can fit into memory, the cheapest first."""
        least, memory = self._least_present(rank) if self.disk else 0, self.memory_of(rank)
        fitting = [
            fit
            for fit in self._all_fits(rank)
            if fit.needed_bytes - fit.spilled_bytes <= memory and (not fit.spilled_bytes or least <= memory)
        ]
        return sorted(fitting, key=lambda fit: fit.milliseconds)

    def _all_fits(self, rank: int) -> list[StageFit]:
        found = []
        for recomputes in (False, True) if self.may_recompute and not self.schedule.split else (False,):
            needed = self._needed(rank, recomputes)
            over = max(needed - self.memory_of(rank), 0) if self.disk else 0
            again = self._recomputed_ms(rank) if recomputes else 0.0
            found.append(StageFit(recomputes, needed, again, over, self._spilling_ms(rank, over, again)))
        return found

    def _recomputed_ms(self, rank: int) -> float:
        # The last piece's forward pass waits for its backward pass: it is computed once even so.
        own = [piece for piece in self._own(rank) if piece != self.pieces.count - 1]
        return self.schedule.micro_batches * sum(self._times(piece)[0] for piece in own)

    def _spilling_ms(self, rank: int, over: int, again: float) -> float:
        """What moving does not hide behind computing: each micro-batch has other activations."""
        if not over or self.disk is None:
            return 0.0
        own, m = self._own(rank), self.schedule.micro_batches
        counts = self._counts
        turns = max(m / max(counts[piece] for piece in own), 1.0)
        computing = again + m * sum(sum(self._times(piece)) for piece in own)
        computing += (m - 1) * sum(self._accumulating_ms(piece) for piece in own)
        return max(self.disk.milliseconds(over * turns) - computing, 0.0)

    def _least_present(self, rank: int) -> float:
        """Bytes that the most demanding operator of a stage needs at a time, and its messages."""
        graph, share = self.graph, self.micro_samples / self.graph.samples
        most = 0.0
        for piece in self._own(rank):
            for place in self.pieces.span(piece):
                operator = graph.operators[place]
                trained = graph.parameter_bytes(operator.parameters, trainable=True)
                room = share * (operator.held_bytes + max(operator.workspace_bytes, operator.backward_bytes))
                most = max(most, room + (2 + self.state_factor) * trained)
        return most + self._slot_bytes(rank)

    def after(self, measured_ms: float) -> "Plan":
        """The same plan with what steps took."""
        return replace(self, measured_ms=measured_ms)

    def _puts(self, piece: int, back: bool) -> list[Channel]:
        """The channels to other ranks on which a piece sends values, or gradients back."""
        return [(a, b) for a, b in self.remote(self.pieces.channels) if (b if back else a) == piece]

    def _times(self, piece: int) -> tuple[float, float]:
        """Milliseconds of a micro-batch's forward and backward pass through a piece."""
        span, slowness = self.pieces.span(piece), self.slowness_of(self.schedule.holders[piece])
        forward, backward = self.graph.times_before(self.micro_samples)
        return (
            slowness * (forward[span.stop] - forward[span.start]),
            slowness * (backward[span.stop] - backward[span.start]),
        )

    def _accumulating_ms(self, piece: int) -> float:
        """Milliseconds of adding the gradients of a piece's parameters to those of an earlier micro-batch."""
        span, before = self.pieces.span(piece), self.graph.accumulating_before
        return self.slowness_of(self.schedule.holders[piece]) * (before[span.stop] - before[span.start])

    def _passes_of(self, piece: int) -> tuple[float, float]:
        """The same with what is computed again, at the times when it is."""
        forward, backward = self._times(piece)
        if not self.recomputes(self.schedule.holders[piece]):
            return forward, backward
        return 0.0 if piece == self.pieces.count - 1 else forward, forward + backward

    def _own(self, rank: int) -> list[int]:
        return [piece for piece, holder in enumerate(self.schedule.holders) if holder == rank]

    def _stage(self, rank: int) -> Stage:
        pieces, m = self.pieces, self.schedule.micro_batches
        own = self._own(rank)
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
        fit = self.fits[rank] if self.fits else StageFit(False, self._needed(rank, False))
        return Stage(
            rank=rank,
            operators=len(places),
            layers=(named[0], named[-1]),
            forward_ms=m * sum(forward for forward, _ in times),
            backward_ms=m * sum(backward for _, backward in times)
            + (m - 1) * sum(self._accumulating_ms(piece) for piece in own),
            parameter_bytes=self.graph.parameter_bytes(names),
            memory_bytes=fit.needed_bytes,
            sent_bytes=int(sent),
            recomputed_ms=fit.recomputed_ms,
            spilled_bytes=fit.spilled_bytes,
            spilling_ms=fit.spilling_ms,
        )

    def _needed(self, rank: int, recomputes: bool) -> int:
        """Bytes that a stage needs at its peak."""
        graph, own = self.graph, self._own(rank)
        names = frozenset(itertools.chain.from_iterable(self.pieces.parameters(piece) for piece in own))
        trained = graph.parameter_bytes(names, trainable=True)
        total = graph.parameter_bytes(names) + (1 + self.state_factor) * trained + self._slot_bytes(rank)
        counts, share = self._counts, self.micro_samples / graph.samples
        activations = extra = 0.0
        for piece in own:
            levels = self._held_levels(piece)
            whole, peak = share * levels[-1], self._peak(piece, share, levels)
            if recomputes:
                activations += counts[piece] * self._received_here(piece)
                extra = max(extra, peak)
            else:
                activations += counts[piece] * whole
                extra = max(extra, peak - whole)
        return int(total + max(activations + extra + self._mask_bytes(own), self._step_bytes(names)))

    def _held_levels(self, piece: int) -> list[float]:
        """Bytes that the graph's number of samples leaves after each operator of a piece.

        What other ranks sent lies in their messages, and what the model is given is the caller's. What is
        sent is held until the piece's backward pass, and so is what the loss makes of the results.
        """
        graph, span = self.graph, self.pieces.span(piece)
        level, seen, levels = 0.0, set[str](), []
        for place in span:
            level += graph.own_held[place]
            for name in graph.operators[place].holds:
                if name not in seen and graph.maker[name] in span:
                    seen.add(name)
                    level += graph.value[name].bytes
            levels.append(level)
        if not seen:  # it is not known which values are held
            return levels
        last = piece == self.pieces.count - 1
        results = [name for name in graph.results if last]
        sent = {v for (source, _), values in self.pieces.channels.items() if source == piece for v in values}
        places = {name: graph.maker[name] for name in {*sent, *results}}
        alone = {graph.operators[place].within or name for name, place in places.items() if place in span}
        more = sum(graph.value[name].bytes for name in alone - seen)
        return [each + more + sum(graph.value[name].bytes for name in results) for each in levels]

    def _received_here(self, piece: int) -> float:
        """Bytes of a micro-batch that a piece gets of others on the same rank."""
        holders = self.schedule.holders
        return sum(
            self.pieces.bytes((source, target), self.micro_samples)
            for source, target in self.pieces.channels
            if target == piece and holders[source] == holders[target]
        )

    def _peak(self, piece: int, share: float, levels: list[float]) -> float:
        """The most that one micro-batch takes in a piece: what is held until an operator, and that one's own.

        Gradients of parameters are in memory anyway, but those of the second micro-batch are added to others.
        """
        graph, span = self.graph, self.pieces.span(piece)
        adds_up = self.schedule.micro_batches > 1
        most = 0.0
        for place, level, stay in zip(span, levels, self._bytes_until_the_end(piece), strict=True):
            operator = graph.operators[place]
            gradients = (
                graph.parameter_bytes(operator.parameters, trainable=True) if operator.backward_bytes else 0
            )
            back = share * max(operator.backward_bytes - gradients, 0) + adds_up * gradients
            back += share * stay
            own = max(share * operator.workspace_bytes, back)
            most = max(most, share * level + own)
        return most

    def _bytes_until_the_end(self, piece: int) -> list[float]:
        """Bytes that stay while the backward pass goes on from each operator of a piece to those before it.

        The backward pass begins at what the piece sent, with the gradients that came for it. It has both
        until its end, also when the operators behind the one in question have given up what they held.
        """
        graph, span = self.graph, self.pieces.span(piece)
        channels = [channel for channel in self.pieces.channels if channel[0] == piece]
        sent = {value for channel in channels for value in self.pieces.channels[channel]}
        awaited = {graph.operators[graph.maker[each]].within or each for each in sent}
        came = defaultdict[int, float](
            float
        )  # by operator: gradients of what it made, which its own backward pass counts
        for channel in channels:
            for name in self.pieces.gradients(channel):
                came[graph.maker[name]] += graph.value[name].bytes
        first = {name: at for at in reversed(span) for name in graph.operators[at].holds if name in awaited}
        begun = defaultdict[int, float](float)  # by operator: what is sent and held from there on
        for name, at in first.items():
            begun[at] += graph.value[name].bytes
        gradients, held_behind, stay = sum(came.values()), 0.0, list[float]()
        for place in reversed(span):
            stay.append(gradients - came[place] + held_behind)
            held_behind += begun[place]
        return stay[::-1]

    def _mask_bytes(self, own: list[int]) -> float:
        """Dropout's masks: those of all samples of all replicas are drawn together."""
        graph, samples = self.graph, self.samples * self.replicas
        operators = [graph.operators[place] for piece in own for place in self.pieces.span(piece)]
        dropped = [operator.outputs[0] for operator in operators if operator.draws_mask]
        return sum(graph.value_bytes(name, samples) for name in dropped)

    def _step_bytes(self, names: Iterable[str]) -> int:
        """What the optimizer's step takes for itself: Adam makes tensors as large as a parameter."""
        parameters = [self.graph.parameter[name] for name in names]
        largest = max((parameter.bytes for parameter in parameters if parameter.trainable), default=0)
        return _OF_STEP * largest if self.state_factor > 1 else 0

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
        lines = [
            f"{kind.ranks} stages x {self.replicas} replicas, {m} micro-batches of {self.micro_samples} "
            f"samples, schedule {kind.name}. Strategy: {self.strategy}.",
            columns(self._rows(), left=2),
            f"Predicted step: {self.step_ms:.2f} ms without the optimizer. "
            f"Idle: {100 * self.run.bubble:.0f} % (even stages: {100 * kind.bubble:.0f} %).",
        ]
        if self._uneven:
            lines.append("Ranks are not equally fast. Speeds are those with the same work; rank 0's is 1.")
        if self.memory:
            sizes = [size_text(self.memory_of(rank)) for rank in range(kind.ranks)]
            most = sizes[0] if len(set(sizes)) == 1 else ", ".join(sizes)
            lines.append(f"Memory of each rank for its stage: at most {most}.")
        lines += self.reasons
        if self.measured_ms:
            off = 100 * (self.step_ms / self.measured_ms - 1)
            lines.append(f"Measured step: {self.measured_ms:.2f} ms. The prediction is off by {off:+.0f} %.")
        if self.batch_norm:
            lines.append(f"BatchNorm: {_BATCH_NORM[self.batch_norm]}")
        return "\n".join(lines) + "\n"

    @property
    def _uneven(self) -> bool:
        return any(device.slowness != 1 for device in self.devices)

    def _rows(self) -> list[tuple[str, ...]]:
        """The table: a line for each stage, with a column of speeds where ranks are not equally fast."""
        head = ("stage", "layers", "operators", "forward ms", "backward ms", "parameters", "memory", "sent")
        rows: list[tuple[str, ...]] = [(*head, "speed") if self._uneven else head]
        for s in self.stages:
            first, last = s.layers
            row = (
                str(s.rank),
                first if first == last else f"{first} .. {last}",
                str(s.operators),
                f"{s.forward_ms:.2f}",
                f"{s.backward_ms:.2f}",
                size_text(s.parameter_bytes),
                size_text(s.memory_bytes),
                size_text(s.sent_bytes),
            )
            rows.append((*row, f"{1 / self.slowness_of(s.rank):.2f}") if self._uneven else row)
        return rows

    @property
    def reasons(self) -> list[str]:
        """Sentences on what stages do to fit into memory."""
        found = []
        for rank, fit in enumerate(self.fits):
            if fit.recomputes or fit.spilled_bytes:
                alternatives = [each for each in self.fits_of(rank) if each != fit]
                needed = self._needed(rank, False)
                found.append(sentence(rank, needed, self.memory_of(rank), fit, alternatives))
        return found

    def drawing(self) -> str:
        """The graph with its cuts as a picture (SVG)."""
        return drawing(self.graph, self.cuts)


#: Cached properties of a plan that do not depend on what its stages do to fit into memory.
_WITHOUT_FITS = ("_counts", "pieces", "slots")
_OF_STEP = 2  # tensors as large as a parameter that an optimizer with several of them as its state makes
_BATCH_NORM = {
    "micro": "micro. Each micro-batch has its own statistics, as with torch.distributed.pipelining.",
    "deferred": "deferred. Micro-batches have their own statistics; running ones are updated once a step.",
    "exact": "exact. The statistics are those of a replica's whole batch, which is one micro-batch.",
}
