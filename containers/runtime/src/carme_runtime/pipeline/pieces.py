"""A graph cut into pieces: what each one runs and holds, and which values pass between them."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from carme_runtime.graph import Graph
from carme_runtime.pipeline.simulation import Channel

MOST_DIMENSIONS = 8  # of a value that is sent


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


def fewest_bytes(graph: Graph, used: Sequence[str], piece_of: Callable[[str], int]) -> list[str]:
    """What is sent to a device that uses these values, so that it is least: it makes views itself.

    Args:
        graph: Of the values.
        used: Those that other devices make, in that order.
        piece_of: Which piece makes a value. A piece that makes none of those used sends nothing.

    Returns:
        Some of them, or values that they are views of, in the order in which they are made.
    """
    if graph.views.keys().isdisjoint(used):
        return list(used)
    below: dict[str, list[str]] = {}  # by value: its views among those used, and others on the way to these
    roots: dict[str, None] = {}
    for value in used:
        while value in graph.views and value not in below.get(graph.views[value], ()):
            below.setdefault(graph.views[value], []).append(value)
            value = graph.views[value]
        if value not in graph.views:
            roots[value] = None
    choice = _Choice(graph, frozenset(used), below, piece_of)
    return sorted((sent for root in roots for sent in choice.sent(root)), key=graph.maker.__getitem__)


@dataclass(frozen=True)
class _Choice:
    """Chooses what of a value and its views is sent; see `fewest_bytes`."""

    graph: Graph
    used: frozenset[str]
    below: dict[str, list[str]]
    piece_of: Callable[[str], int]

    def sent(self, value: str) -> list[str]:
        """The value alone, nothing if all have it, or what is best of its views."""
        if self.graph.maker[value] < 0:
            return []
        if value in self.used:
            return [value]
        parts = [sent for view in self.below[value] for sent in self.sent(view)]
        can_be_sent = value not in self.graph.lists and len(self.graph.value[value].shape) <= MOST_DIMENSIONS
        if can_be_sent and self.piece_of(value) in map(self.piece_of, parts):
            size = self.graph.value[value].bytes
            return [value] if size < sum(self.graph.value[part].bytes for part in parts) else parts
        return parts


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
    def _used(self) -> dict[int, list[str]]:
        """By piece: values of other pieces that it uses, in the order in which they are made."""
        found: dict[int, list[str]] = {}
        for place, operator in enumerate(self.graph.operators):
            if operator.name in self.graph.plain:
                continue
            source = self.piece_of(place)
            for value in operator.outputs:
                users = self.graph.users[value]
                # Most values stay in their piece: their last user is in it as well.
                if not users or self.piece_of(users[-1]) == source:
                    continue
                for target in {self.piece_of(user) for user in users} - {source}:
                    found.setdefault(target, []).append(value)
        return found

    @cached_property
    def _sent(self) -> dict[int, list[str]]:
        """By piece: values that others send to it. It uses them, or views of them."""
        return {piece: fewest_bytes(self.graph, used, self._maker) for piece, used in self._used.items()}

    def _maker(self, value: str) -> int:
        """Which piece makes a value."""
        return self.piece_of(self.graph.maker[value])

    @cached_property
    def channels(self) -> dict[Channel, tuple[str, ...]]:
        """Which values each channel carries, in the order in which they are made."""
        carried: dict[Channel, list[str]] = {}
        for target, values in self._sent.items():
            for value in values:
                carried.setdefault((self._maker(value), target), []).append(value)
        return {channel: tuple(values) for channel, values in sorted(carried.items())}

    def views(self, piece: int) -> frozenset[str]:
        """Values of other pieces that a piece makes itself: views of what it gets or the model is given."""
        found, sent = set[str](), set(self._sent.get(piece, ()))
        for value in self._used.get(piece, ()):
            while value not in sent and value not in found and self.graph.maker[value] >= 0:
                found.add(value)
                value = self.graph.views[value]
        return frozenset(found)

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
