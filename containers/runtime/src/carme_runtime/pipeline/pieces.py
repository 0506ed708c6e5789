"""A graph cut into pieces: what each one runs and holds, and which values pass between them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from carme_runtime.graph import Graph
from carme_runtime.pipeline.simulation import Channel


def cut_places(graph: Graph) -> list[int]:
    """Before which operators, by their places, another device may begin."""
    places = {operator.name: place for place, operator in enumerate(graph.operators)}
    allowed = [True] * len(graph.operators)
    for place, operator in enumerate(graph.operators):
        if operator.beside:
            start = places[operator.beside] + 1
            allowed[start : place + 1] = [False] * (place + 1 - start)
    before = 0  # operators that compute, as a piece of sizes alone is none
    found = []
    for place, each in enumerate(graph.operators):
        if before and allowed[place] and each.name not in graph.plain:
            found.append(place)
        before += each.name not in graph.plain
    return found


def first_of(graph: Graph, layer: str) -> int | None:
    """The place of the first operator of a layer, or of what is in it."""
    for place, operator in enumerate(graph.operators):
        if operator.module == layer or operator.module.startswith(f"{layer}."):
            return place
    return None


@dataclass(frozen=True)
class Pieces:
    """A graph with cuts.

    Args:
        graph: Which.
        cuts: Places of operators, growing, with which pieces begin, but the first.
    """

    graph: Graph
    cuts: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many pieces."""
        return len(self.cuts) + 1

    def piece_of(self, place: int) -> int:
        """Which piece runs the operator at a place; the caller's, who wants the results, is the last one."""
        return bisect_right(self.cuts, place)

    def span(self, piece: int) -> range:
        """Places of a piece's operators."""
        ends = (0, *self.cuts, len(self.graph.operators))
        return range(ends[piece], ends[piece + 1])

    @cached_property
    def channels(self) -> dict[Channel, tuple[str, ...]]:
        """Which values each channel carries, in the order in which they are made."""
        plain, users, carried = self.graph.plain, self.graph.users, {}
        for place, operator in enumerate(self.graph.operators):
            if operator.name in plain:
                continue
            source = self.piece_of(place)
            for value in operator.outputs:
                # Most values stay in their piece: their last user is in it as well.
                if not users[value] or self.piece_of(users[value][-1]) == source:
                    continue
                for target in sorted({self.piece_of(user) for user in users[value]} - {source}):
                    carried.setdefault((source, target), []).append(value)
        return {channel: tuple(values) for channel, values in sorted(carried.items())}

    def gradients(self, channel: Channel) -> tuple[str, ...]:
        """Of which of its values gradients come back."""
        return tuple(name for name in self.channels[channel] if self.graph.value[name].gradient)

    def bytes(self, channel: Channel, samples: int, back: bool = False) -> float:
        """The size of a channel's message, forward or back."""
        known = self._sizes.get((channel, samples, back))
        if known is None:
            names: Sequence[str] = self.gradients(channel) if back else self.channels[channel]
            known = sum(self.graph.value_bytes(name, samples) for name in names)
            self._sizes[channel, samples, back] = known
        return known

    @cached_property
    def _sizes(self) -> dict[tuple[Channel, int, bool], float]:
        return {}

    def parameters(self, piece: int) -> frozenset[str]:
        """Names of parameters that a piece uses."""
        operators = self.graph.operators
        return frozenset(name for place in self.span(piece) for name in operators[place].parameters)

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several pieces use, and these pieces."""
        users: dict[str, list[int]] = {}
        for piece in range(self.count):
            for name in self.parameters(piece):
                users.setdefault(name, []).append(piece)
        return {name: tuple(pieces) for name, pieces in sorted(users.items()) if len(pieces) > 1}
